"""What an answer may look like: the forms of a request's constraint, as the server, the processor and the sampler know
them.

A constraint travels as JSON in :attr:`mstar.spec.request.SamplingParams.grammar`; :func:`read_constraint`
checks what a client sent, :func:`encode_constraint` and :func:`decode_constraint` go back and forth. Only what can be
seen without a tokenizer is checked here: the form and its size. Whether a schema, an expression or a grammar is sound
says :class:`mstar.resources.grammars.GrammarCompiler`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mstar.spec.errors import RequestError, nearest

__all__ = [
    "MAX_DEPTH",
    "MAX_LENGTH",
    "Choice",
    "Constraint",
    "EbnfGrammar",
    "JsonObject",
    "JsonSchema",
    "Regex",
    "Schema",
    "StructuralTag",
    "decode_constraint",
    "encode_constraint",
    "read_constraint",
]

MAX_LENGTH = 65_536
"""Most characters of a constraint as JSON."""

MAX_DEPTH = 64
"""Most levels that a constraint's objects and arrays, or the brackets of an expression or a grammar, may be nested."""


class JsonObject(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class Schema(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """OpenAI's description of a schema.

    :param schema: JSON Schema, an object or a truth value. :param strict: ``False``: objects may have properties that
        the schema does not name, as JSON Schema says; otherwise only where ``additionalProperties`` allows them.
    """

    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""

    json_schema: Schema


class Regex(msgspec.Struct, frozen=True, tag_field="type", tag="regex"):
    """A text that a regular expression matches as a whole."""

    regex: str


class Choice(msgspec.Struct, frozen=True, tag_field="type", tag="choice"):
    """One of some texts, none of them empty."""

    choice: list[str]


class EbnfGrammar(msgspec.Struct, frozen=True, tag_field="type", tag="grammar"):
    """A text that a grammar in EBNF (GBNF's dialect, rule ``root``) describes."""

    grammar: str


class StructuralTag(msgspec.Struct, frozen=True, tag_field="type", tag="structural_tag"):
    """Free and constrained stretches in one answer, in xgrammar's notation: a forced tool call, or free text until a
    tool call begins and its schema from there.

    :param format: for instance ``{"type": "triggered_tags", "triggers": ["<call>"], "tags": [{"begin": "<call>",
        "content": {"type": "json_schema", "json_schema": {…}}, "end": "</call>"}]}``.
    """

    format: dict[str, Any]


Constraint = JsonObject | JsonSchema | Regex | Choice | EbnfGrammar | StructuralTag

_TYPES = ("json_object", "json_schema", "regex", "choice", "grammar", "structural_tag")


def read_constraint(form: Mapping[str, Any], param: str = "response_format") -> Constraint | None:
    """The constraint that *form* states; ``None`` for ``{"type": "text"}``.

    :param param: the client's field, which errors name.
    :raises RequestError: *form* is none, too long or too deep.
    """
    kind = form.get("type")
    if kind == "text":
        return None
    if kind not in _TYPES:
        hint = nearest(kind if isinstance(kind, str) else "", ("text", *_TYPES))
        raise RequestError(
            f"{param}.type: {kind!r} is not supported{hint}",
            param=f"{param}.type",
            code="unsupported_value",
        )
    _check_size(form, param)
    try:
        found: Constraint = msgspec.convert(dict(form), Constraint)
    except msgspec.ValidationError as error:
        raise RequestError(f"{param}: {error}", param=param) from None
    if isinstance(found, Choice) and not (found.choice and all(found.choice)):
        raise RequestError(f"{param}.choice: at least one text, and none that is empty", param=f"{param}.choice")
    for text in _expressions(found):
        if _bracket_depth(text) > MAX_DEPTH:
            raise RequestError(f"{param}: brackets are nested more than {MAX_DEPTH} deep", param=param)
    return found


def encode_constraint(constraint: Constraint) -> str:
    """As JSON, without what is left out or not known. A schema's properties stay in the client's order, which is the
    order in which an answer has them."""
    return msgspec.json.encode(constraint).decode()


def decode_constraint(text: str) -> Constraint:
    """What :func:`encode_constraint` wrote."""
    return msgspec.json.decode(text, type=Constraint)


def _check_size(form: Mapping[str, Any], param: str) -> None:
    # Depth first, level by level: encoding a value that is nested too deep would exhaust the stack.
    level: list[Any] = [form]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, Mapping) else value)
            if isinstance(inner, Mapping | list | tuple)
        ]
        if not level:
            break
    else:
        raise RequestError(f"{param}: nested more than {MAX_DEPTH} deep", param=param)
    try:
        length = len(msgspec.json.encode(form))
    except (UnicodeEncodeError, TypeError, ValueError) as error:
        raise RequestError(f"{param}: not valid JSON: {error}", param=param) from None
    if length > MAX_LENGTH:
        raise RequestError(f"{param}: {length} bytes as JSON are more than the limit of {MAX_LENGTH}", param=param)


def _expressions(constraint: Constraint) -> list[str]:
    """The texts in *constraint* that are parsed as expressions or grammars."""
    if isinstance(constraint, Regex):
        return [constraint.regex]
    if isinstance(constraint, EbnfGrammar):
        return [constraint.grammar]
    found: list[str] = []
    todo: list[Any] = [msgspec.to_builtins(constraint)]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            found += [value[key] for key in ("pattern", "regex", "grammar") if isinstance(value.get(key), str)]
            properties = value.get("patternProperties")
            found += list(properties) if isinstance(properties, dict) else []
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return found


def _bracket_depth(text: str) -> int:
    """How deep opening brackets are nested at most, if all of them count: escaped and quoted ones too."""
    depth = most = 0
    for char in text:
        if char in "([{":
            depth += 1
            most = max(most, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return most

"""What the fields of a pydantic model may hold, in words: for listings and for the documentation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

__all__ = ["FieldFacts", "describe_fields"]

_WORDS = {
    "integer": "whole number",
    "boolean": "`true` or `false`",
    "string": "text",
    "array": "list",
    "object": "mapping",
    "null": "`null`",
}


class FieldFacts(NamedTuple):
    """One field: its name, the values that it takes, its default and what it means; code stands in backquotes."""

    name: str
    value: str
    default: str
    meaning: str


def describe_fields(
    model: type[BaseModel], inside: bool = False, defaults: Mapping[str, Any] | None = None
) -> list[FieldFacts]:
    """The fields of *model*, in the order declared.

    :param inside: below each field that is a section stand its own, as ``section.field``.
    :param defaults: what stands, where nobody says otherwise, instead of *model*'s own defaults.
    """
    return _described(model, inside, "", {} if defaults is None else defaults)


def _described(model: type[BaseModel], inside: bool, before: str, defaults: Mapping[str, Any]) -> list[FieldFacts]:
    known, rows = model.model_json_schema(mode="validation"), []
    for name, field in model.model_fields.items():
        kind = _kind(known["properties"][name], known.get("$defs", {}))
        section = _section(field)
        default = _in_words(defaults[name]) if name in defaults and section is None else _default(field)
        rows.append(FieldFacts(f"`{before}{name}`", kind, default, _meaning(field)))
        if inside and section is not None:
            rows += _described(section, inside, f"{before}{name}.", defaults.get(name) or {})
    return rows


def _kind(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        named = definitions[schema["$ref"].rpartition("/")[2]]
        return _kind(named, definitions) if "enum" in named else "a section, see below"
    if "anyOf" in schema:
        return " or ".join(_kind(part, definitions) for part in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "anything")
    return " ".join(filter(None, (_WORDS.get(kind, kind), _bounds(schema))))


def _bounds(schema: Mapping[str, Any]) -> str:
    marks = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return ", ".join(f"{mark} {_number(schema[key])}" for key, mark in marks.items() if key in schema)


def _number(value: float) -> str:
    power = abs(int(value)).bit_length() - 1
    if abs(value) >= 2**31 and abs(value) == 2**power:
        return f"{'-' if value < 0 else ''}2^{power}"
    return f"{value:g}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return _in_words(field.get_default(call_default_factory=True, validated_data={}))


def _in_words(value: Any) -> str:
    if isinstance(value, BaseModel):
        return ""  # a section, whose fields have defaults of their own
    if value is None or value in ((), [], {}):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else getattr(value, 'value', value)}`"


def _meaning(field: FieldInfo) -> str:
    if field.description:
        return field.description
    section = _section(field)
    return "" if section is None else inspect.getdoc(section) or ""


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that has fields of its own."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None

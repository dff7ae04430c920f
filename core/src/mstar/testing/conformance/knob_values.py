"""What a knobs class promises (its JSON schema), and values that break the promise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mstar.spec.knobs import Knobs

__all__ = ["BadValue", "bad_values", "options_of", "unbounded", "vary"]

_NUMBERS = ("integer", "number")
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


class BadValue(NamedTuple):
    """A value that knob *name* must refuse, and why."""

    name: str
    value: Any
    why: str


def options_of(cls: type[Knobs]) -> dict[str, list[Mapping[str, Any]]]:
    """Knob → the schemas of the values that it takes; ``null`` left out."""
    schema = cls.model_json_schema()
    definitions = schema.get("$defs", {})

    def resolve(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if "$ref" in part:
            part = definitions[part["$ref"].rpartition("/")[2]]
        if "anyOf" in part:
            for option in part["anyOf"]:
                yield from resolve(option)
        elif part.get("type") != "null":
            yield part

    return {name: list(resolve(part)) for name, part in schema.get("properties", {}).items()}


def unbounded(cls: type[Knobs]) -> Iterator[str]:
    """Knobs whose values nothing bounds, each with what it lacks."""
    for name, options in options_of(cls).items():
        for option in options:
            kind = option.get("type")
            fixed = "enum" in option or "const" in option
            if kind in _NUMBERS and not fixed and not any(bound in option for bound in _BOUNDS):
                yield f"{name!r}: a number without bounds: give Field(ge=…, le=…)"
            elif kind == "string" and not fixed and "maxLength" not in option and "pattern" not in option:
                yield f"{name!r}: a text without a limit: give Field(max_length=…) or a Literal of the valid words"
            elif kind == "array" and "maxItems" not in option:
                yield f"{name!r}: a list without a limit: give Field(max_length=…)"


def vary(cls: type[Knobs], name: str) -> list[Any]:
    """A few valid values of knob *name* beside its default and not far above it, so that they cost little more. Empty
    for what the schema says too little about."""
    field = cls.model_fields[name]
    found: list[Any] = []
    for option in options_of(cls)[name]:
        if "enum" in option or "const" in option:
            found += option.get("enum", [])
        elif option.get("type") == "boolean":
            found += [True, False]
        elif option.get("type") in _NUMBERS:
            found += _near(option, 0 if field.is_required() or field.default is None else field.default)
        elif option.get("type") == "string" and "pattern" not in option:
            found.append("ab"[: option.get("maxLength", 2)])
    return [value for value in found if field.is_required() or value != field.default]


def _near(option: Mapping[str, Any], default: float) -> Iterator[Any]:
    grid = option.get("multipleOf", 1 if option["type"] == "integer" else 0.25)
    low, high = (option.get(bound, sign * math.inf) for bound, sign in (("minimum", -1), ("maximum", 1)))
    above, below = option.get("exclusiveMinimum", -math.inf), option.get("exclusiveMaximum", math.inf)
    for steps in (-2, -1, 1, 2):
        value = default + steps * grid
        value = low if low > value else min(value, high)
        if above < value < below:
            yield value


def bad_values(cls: type[Knobs]) -> Iterator[BadValue]:
    """Values outside of each knob's bounds and of the wrong type; all of them can be written in JSON."""
    for name, options in options_of(cls).items():
        kinds = {option.get("type") for option in options}
        yield from (BadValue(name, value, "of the wrong type") for value in _mistyped(kinds))
        if len(options) == 1:
            yield from (BadValue(name, value, why) for value, why in _outside(options[0]))


def _mistyped(kinds: set[Any]) -> Iterator[Any]:
    if None in kinds:  # anything goes, or a shape that this module does not know
        return
    if "object" not in kinds:
        yield {"no": "object"}
    if kinds & set(_NUMBERS) and "string" not in kinds:
        yield "many"
        yield "5"
    if "boolean" not in kinds:
        yield True
    if "number" not in kinds and "integer" in kinds:
        yield 1.5
    if kinds == {"boolean"}:
        yield "yes"
        yield 1
    if kinds == {"string"}:
        yield 7


def _outside(option: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    for bound, step in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1), ("exclusiveMaximum", 0)):
        if bound in option:
            yield option[bound] + step, f"outside of its declared {bound} {option[bound]}"
    if 0 < (longest := option.get("maxLength", 0)) < 100_000:
        yield "x" * (longest + 1), f"longer than its declared maxLength {longest}"
    if all(isinstance(word, str) for word in option.get("enum", (1,))):
        yield "no-such-word", f"not among its declared values {option['enum']}"
    if isinstance(option.get("const"), str):
        yield "no-such-word", f"not its only value {option['const']!r}"

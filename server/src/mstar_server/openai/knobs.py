"""A model's knobs among the fields of a request: the one way from a body to :class:`~mstar.spec.knobs.Knobs`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from mstar.spec.errors import RequestError, nearest
from mstar.spec.knobs import Knobs, validate_knobs

__all__ = ["FormText", "knobs_of", "typed"]


class FormText(str):
    """A field of a form that no request has: perhaps a knob, whose type is known once the model is."""


def knobs_of(
    body: BaseModel,
    knobs: type[Knobs],
    given: Mapping[str, Any] | None = None,
    *,
    fields: Sequence[str] = (),
    also: Iterable[str] = (),
) -> Knobs:
    """The knobs that *body* has as extra fields, and *given* ones. ``null`` counts as not sent.

    :param fields: fields of *body* that are knobs of the same name, where the model has them.
    :param also: names that a client may send beside those of *body* (files), for what was meant by an unknown one.
    :raises RequestError: names a field that neither the route nor the model has with the nearest that they have, or the
        knob at fault.
    """
    values = dict(given or {})
    for name in fields:
        if name in knobs.model_fields and (value := getattr(body, name)) is not None:
            values[name] = value
    for name, value in (body.model_extra or {}).items():
        if name not in knobs.model_fields:
            of_route = {*type(body).model_fields} - {*fields}  # those count where the model has them
            known = nearest(name, {*of_route, *knobs.model_fields, *also})
            raise RequestError(f"unknown parameter {name!r}{known}", param=name, code="unknown_parameter")
        if isinstance(value, FormText):
            value = typed(str(value), knobs.model_fields[name].annotation)
        if value is not None:
            values[name] = value
    return validate_knobs(knobs, values)


def typed(text: str, annotation: Any) -> Any:
    """*text* as a value of *annotation*: itself where a text will do and it is no number that would do as well, else as
    JSON spells one. An empty text is no value; what is no JSON stays as it is, for validation to say what is wrong."""
    kinds = set(_kinds(annotation))
    if str in kinds and not (kinds & {int, float} and _is_number(text)):
        return text
    if text == "":
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _kinds(annotation: Any) -> Iterator[type]:
    """The types that *annotation* allows; of a ``Literal`` those of its values."""
    inner = get_args(annotation)
    if isinstance(annotation, type) and not inner:
        yield str if issubclass(annotation, str) else annotation
    for part in inner:
        if isinstance(part, str | int | float):
            yield type(part)
        else:
            yield from _kinds(part)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

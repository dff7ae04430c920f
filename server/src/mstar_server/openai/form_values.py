"""Fields of a form as values: a form has texts only, a model's knobs have types."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile

from mstar.spec.errors import RequestError, nearest
from mstar.spec.knobs import Knobs, validate_knobs
from mstar_server.errors import validation_fault

__all__ = ["form_body", "form_knobs"]

B = TypeVar("B", bound=BaseModel)


def form_body(cls: type[B], form: FormData, *, lists: Sequence[str] = (), files: Sequence[str] = ()) -> B:
    """An instance of *cls* from *form*'s texts, which pydantic reads as the types of its fields.

    :param lists: fields that may be sent several times, with or without ``[]`` behind the name. :param files: fields
        that are files, which *cls* does not have. An empty text counts as not sent.
    """
    found: dict[str, Any] = {}
    for name, value in form.multi_items():
        name = name.removesuffix("[]") if name.removesuffix("[]") in lists else name
        if name in files:
            continue
        if isinstance(value, UploadFile):
            raise _stray_file(name, cls, files)
        if not value:
            continue
        if name in lists:
            found.setdefault(name, []).append(value)
        elif name in found:
            raise RequestError(f"{name!r} was sent more than once", param=name)
        else:
            found[name] = value
    try:
        return cls.model_validate(found)
    except ValidationError as error:
        raise validation_fault(error.errors(include_url=False), found) from None


def _stray_file(name: str, cls: type[BaseModel], files: Sequence[str]) -> RequestError:
    if name in cls.model_fields:
        return RequestError(f"{name!r} must be a text, not a file", param=name)
    return RequestError(f"unknown file {name!r}{nearest(name, files)}", param=name, code="unknown_parameter")


def form_knobs(
    body: BaseModel, knobs: type[Knobs], further: Mapping[str, Any], files: Sequence[str] = ("file",)
) -> Knobs:
    """The knobs that *body* has as extra fields, and *further* ones. Raises :class:`RequestError` for a field that
    neither the route nor the model has, naming the nearest that they have."""
    values = dict(further)
    known = {*type(body).model_fields, *knobs.model_fields, *files}
    for name, value in (body.model_extra or {}).items():
        if name not in knobs.model_fields:
            message = f"unknown parameter {name!r}{nearest(name, known)}"
            raise RequestError(message, param=name, code="unknown_parameter")
        values[name] = _typed(value, knobs.model_fields[name].annotation)
    return validate_knobs(knobs, values)


def _typed(text: str, annotation: Any) -> Any:
    """*text* as JSON spells a value of *annotation*; as it is where that is a text, or where it is no JSON."""
    if annotation is str or (str in get_args(annotation) and not _is_number(text)):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

"""Bodies that come as JSON or as a form with files: read into one model either way.

A form has texts only. A field of the request is read as what its type says; one that may be a knob is kept as
:class:`FormText` until the model, and so the knob's type, is known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile

from mstar.spec.errors import RequestError, nearest
from mstar.spec.knobs import Knobs, validate_knobs
from mstar_server.errors import validation_fault
from mstar_server.media.source import Source
from mstar_server.media.uploads import open_form, upload_source
from mstar_server.options import ServerOptions

__all__ = ["FormText", "Uploads", "check_prompt", "further_knobs", "read_body"]

B = TypeVar("B", bound=BaseModel)

Uploads = dict[str, list[Source]]
"""Field of a form → its files, in the client's order."""

_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")


class FormText(str):
    """A field of a form that no request has: perhaps a knob."""


async def read_body(request: Request, cls: type[B], files: Sequence[str], options: ServerOptions) -> tuple[B, Uploads]:
    """*request*'s body as *cls*, and its uploads.

    :param files: the fields that may be files of a form; ``NAME[]`` counts as ``NAME``.
    :raises RequestError: 400 that names the field, 413, or 415.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type in _FORMS:
        field_bytes = max(4 * options.max_text_chars, options.max_kwargs_bytes) + 1
        async with open_form(request, options, field_bytes) as form:
            values, uploads = await _form(form, cls, files)
    elif media_type == "application/json":
        try:
            values, uploads = json.loads(await request.body()), {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(values, dict):
            raise RequestError("the body must be a JSON object", code="invalid_json")
    else:
        what = media_type or "a body without Content-Type"
        message = f"send multipart/form-data or application/json, not {what!r}"
        raise RequestError(message, code="unsupported_media_type", status=415)
    try:
        return cls.model_validate(values), uploads
    except ValidationError as error:
        raise validation_fault(error.errors(include_url=False), values) from None


async def _form(form: FormData, cls: type[BaseModel], files: Sequence[str]) -> tuple[dict[str, Any], Uploads]:
    values: dict[str, Any] = {}
    uploads: Uploads = {}
    for sent, value in form.multi_items():
        name = sent.removesuffix("[]")
        if isinstance(value, UploadFile):
            if name not in files:
                message = f"{sent!r} cannot be a file{nearest(name, files)}"
                raise RequestError(message, param=sent, code="unknown_parameter")
            uploads.setdefault(name, []).append(await upload_source(value, sent))
        elif name in files and name not in cls.model_fields:
            raise RequestError(f"{sent!r} must be a file, not a text", param=sent)
        elif name in values:
            raise RequestError(f"{name!r} was sent more than once", param=name)
        elif name in cls.model_fields:
            values[name] = _read(value, cls.model_fields[name].annotation)
        else:
            values[name] = FormText(value)
    return values, uploads


def further_knobs(body: BaseModel, knobs: type[Knobs], fields: Sequence[str]) -> Knobs:
    """The model's knobs among what *body* has beside its own fields, and of those among *fields* that the model has
    knobs for. ``null`` counts as not sent. Raises :class:`RequestError` that names the nearest known field."""
    values = {
        name: value for name in fields if name in knobs.model_fields and (value := getattr(body, name)) is not None
    }
    for name, value in (body.model_extra or {}).items():
        if name not in knobs.model_fields:
            known = nearest(name, {*type(body).model_fields, *knobs.model_fields})
            raise RequestError(f"unknown parameter {name!r}{known}", param=name, code="unknown_parameter")
        if isinstance(value, FormText):
            value = _read(str(value), knobs.model_fields[name].annotation)
        if value is not None:
            values[name] = value
    return validate_knobs(knobs, values)


def _read(text: str, annotation: Any) -> Any:
    """*text* as a value of *annotation*: itself where a text will do, else as JSON, as far as it is some."""
    if _takes_text(annotation):
        return text
    if text == "":
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # validation says what is wrong with it


def _takes_text(annotation: Any) -> bool:
    inner = get_args(annotation)
    if isinstance(annotation, type):
        return issubclass(annotation, str)
    return any(isinstance(value, str) or _takes_text(value) for value in inner)


def check_prompt(prompt: str, options: ServerOptions) -> None:
    """Raise unless *prompt* says something and is short enough."""
    if not prompt.strip():
        raise RequestError("'prompt' is empty", param="prompt")
    if len(prompt) > options.max_text_chars:
        message = f"'prompt' of {len(prompt)} characters is longer than the limit of {options.max_text_chars}"
        raise RequestError(message, param="prompt", code="text_too_long")

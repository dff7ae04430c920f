"""Bodies that come as JSON or as a form with files: read into one model either way.

A form has texts only. A field of the request is read as what its type says; one that may be a knob is kept as
:class:`~mstar_server.openai.knobs.FormText` until the model, and so the knob's type, is known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile

from mstar.spec.errors import RequestError, nearest
from mstar_server.errors import validation_fault
from mstar_server.media.source import Source
from mstar_server.media.uploads import open_form, upload_source
from mstar_server.openai.knobs import FormText, typed
from mstar_server.options import ServerOptions

__all__ = ["Uploads", "check_prompt", "read_body"]

B = TypeVar("B", bound=BaseModel)

Uploads = dict[str, list[Source]]
"""Field of a form → its files, in the client's order."""

_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")


async def read_body(
    request: Request,
    cls: type[B],
    files: Sequence[str],
    options: ServerOptions,
    *,
    lists: Sequence[str] = (),
    as_json: bool = True,
) -> tuple[B, Uploads]:
    """*request*'s body as *cls*, and its uploads.

    :param files: the fields that may be files of a form; ``NAME[]`` counts as ``NAME``. :param lists: those that may be
        sent several times. :param as_json: the body need not be a form.
    :raises RequestError: 400 that names the field, 413, or 415.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type in _FORMS:
        field_bytes = max(4 * options.max_text_chars, options.max_kwargs_bytes) + 1
        async with open_form(request, options, field_bytes) as form:
            values, uploads = await _form(form, cls, files, lists)
    elif as_json and media_type == "application/json":
        try:
            values, uploads = json.loads(await request.body()), {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(values, dict):
            raise RequestError("the body must be a JSON object", code="invalid_json")
    else:
        what = media_type or "a body without Content-Type"
        message = f"send multipart/form-data{' or application/json' if as_json else ''}, not {what!r}"
        raise RequestError(message, code="unsupported_media_type", status=415)
    try:
        return cls.model_validate(values), uploads
    except ValidationError as error:
        raise validation_fault(error.errors(include_url=False), values) from None


async def _form(
    form: FormData, cls: type[BaseModel], files: Sequence[str], lists: Sequence[str]
) -> tuple[dict[str, Any], Uploads]:
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
        elif name in lists:
            if value:
                values.setdefault(name, []).append(value)
        elif name in values:
            raise RequestError(f"{name!r} was sent more than once", param=name)
        elif name in cls.model_fields:
            field = cls.model_fields[name]
            if value or field.is_required():  # else an empty one is one that was not filled in
                values[name] = typed(value, field.annotation)
        else:
            values[name] = FormText(value)
    return values, uploads


def check_prompt(prompt: str, options: ServerOptions) -> None:
    """Raise unless *prompt* says something and is short enough."""
    if not prompt.strip():
        raise RequestError("'prompt' is empty", param="prompt")
    if len(prompt) > options.max_text_chars:
        message = f"'prompt' of {len(prompt)} characters is longer than the limit of {options.max_text_chars}"
        raise RequestError(message, param="prompt", code="text_too_long")

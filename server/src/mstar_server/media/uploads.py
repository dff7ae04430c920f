"""Forms with files: what a route does with ``multipart/form-data``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.datastructures import FormData, UploadFile

from mstar.spec.errors import RequestError
from mstar_server.media.source import Source
from mstar_server.options import ServerOptions

__all__ = ["open_form", "upload_source"]


@contextlib.asynccontextmanager
async def open_form(request: Request, options: ServerOptions, max_field_bytes: int) -> AsyncIterator[FormData]:
    """*request*'s form, multipart or URL-encoded. Files are closed when the block ends; sources made of them stay.

    Files go to disk as they arrive, beyond 1 MiB each; the body as a whole is counted while it arrives and refused with
    413 beyond ``max_body_bytes``. Raises :class:`RequestError` 413 for a file larger than ``max_file_bytes``.
    :param max_field_bytes: longest field that is no file.
    """
    # one file more than allowed may pass: the request itself names the limit
    limits = {"max_files": options.max_files + 1, "max_fields": 1000, "max_part_size": max_field_bytes}
    async with request.form(**limits) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile) and (value.size or 0) > options.max_file_bytes:
                message = f"{name!r}: a file of {value.size} bytes is larger than the limit of {options.max_file_bytes}"
                raise RequestError(message, param=name, code="file_too_large", status=413)
        yield form


async def upload_source(value: object, param: str) -> Source:
    """The file that was sent in field *param* of a form. Raises :class:`RequestError` when it is missing or a text."""
    if not isinstance(value, UploadFile):
        what = "is required" if value is None else "must be a file, not a text"
        raise RequestError(f"{param!r} {what}", param=param)
    return await Source.of_upload(value)

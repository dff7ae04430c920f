"""Forms with files: what a route does with ``multipart/form-data``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator

from fastapi import Request
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from mstar.spec.errors import RequestError
from mstar_server.media.source import Source
from mstar_server.options import ServerOptions

__all__ = ["open_form", "upload_source"]

_MAX_FIELDS = 1000


@contextlib.asynccontextmanager
async def open_form(request: Request, options: ServerOptions, max_field_bytes: int) -> AsyncIterator[FormData]:
    """*request*'s form, multipart or URL-encoded. Files are closed when the block ends; sources made of them stay.

    Files go to disk as they arrive, beyond 1 MiB each; the body as a whole is counted while it arrives and refused with
    413 beyond ``max_body_bytes``. Raises :class:`RequestError` that names the field: 400 for one file more than
    ``max_files``, 413 for a file larger than ``max_file_bytes``.
    :param max_field_bytes: longest field that is no file.
    """
    form = await _read(request, options, max_field_bytes)
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile) and (value.size or 0) > options.max_file_bytes:
                message = f"{name!r}: a file of {value.size} bytes is larger than the limit of {options.max_file_bytes}"
                raise RequestError(message, param=name, code="file_too_large", status=413)
        yield form
    finally:
        await form.close()


async def _read(request: Request, options: ServerOptions, max_field_bytes: int) -> FormData:
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        return await request.form(max_fields=_MAX_FIELDS, max_part_size=max_field_bytes)
    async with contextlib.aclosing(request.stream()) as body:
        try:
            return await _Parser(request.headers, body, options.max_files, max_field_bytes).parse()
        except MultiPartException as error:
            raise RequestError(f"the form cannot be read: {error.message}", code="invalid_form") from None


class _Parser(MultiPartParser):
    """Starlette's, with limits whose refusals name the field."""

    def __init__(self, headers: Headers, body: AsyncGenerator[bytes, None], most_files: int, most_bytes: int):
        super().__init__(headers, body, max_files=math.inf, max_fields=_MAX_FIELDS, max_part_size=most_bytes)
        self._most_files, self._files = most_files, 0
        self._most_bytes = most_bytes

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        part = self._current_part
        self._files += part.file is not None
        if self._files > self._most_files:
            message = f"{part.field_name!r}: the form has more files than the limit of {self._most_files}"
            raise RequestError(message, param=part.field_name, code="too_many_files")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._current_part
        if part.file is None and len(part.data) + end - start > self._most_bytes:
            message = f"{part.field_name!r} is longer than the limit of {self._most_bytes} bytes"
            raise RequestError(message, param=part.field_name, code="too_large", status=413)
        super().on_part_data(data, start, end)


async def upload_source(value: object, param: str) -> Source:
    """The file that was sent in field *param* of a form. Raises :class:`RequestError` when it is missing or a text."""
    if not isinstance(value, UploadFile):
        what = "is required" if value is None else "must be a file, not a text"
        raise RequestError(f"{param!r} {what}", param=param)
    return await Source.of_upload(value)

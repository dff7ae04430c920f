"""``/``: a page to try the models in a browser. Its files hold no secret; what it asks wants a key.

The files are read once, when the router is made: a request names one of them or gets 404, no path reaches the disk.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

__all__ = ["make_router"]

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "media-src data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Nothing but the page's own files and what it has made itself: what a model writes can load or run nothing."""

_HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked about each time: an upgrade of the server shows at once
    "Content-Security-Policy": _POLICY,
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def make_router() -> APIRouter:
    """The router of the page at ``/`` and of its files below ``/playground/``."""
    router = APIRouter(include_in_schema=False)
    known = {name: _read(file) for name, file in _walk(files("mstar_server").joinpath("playground"))}

    @router.get("/")
    async def page(request: Request) -> Response:
        return _answer(request, known["index.html"])

    @router.get("/playground")
    async def moved(request: Request) -> Response:
        return RedirectResponse(request.scope.get("root_path", "") + "/")

    @router.get("/playground/{name:path}")
    async def file(name: str, request: Request) -> Response:
        found = known.get(name)
        if found is None:
            raise HTTPException(404)
        return _answer(request, found)

    return router


def _walk(folder: Traversable, prefix: str = "") -> list[tuple[str, Traversable]]:
    """The page's files by their path below *folder*."""
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in _TYPES:
            found.append((prefix + entry.name, entry))
    return found


def _read(file: Traversable) -> _File:
    content = file.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _File(content, _TYPES[file.name.rpartition(".")[2]], etag)


def _answer(request: Request, file: _File) -> Response:
    headers = {**_HEADERS, "ETag": file.etag}
    if file.etag in re.findall(r'"[^"]*"', request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)

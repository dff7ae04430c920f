"""What every request passes before it reaches a route: the proxy's path, its key, the size of its body."""

from __future__ import annotations

import logging
from pathlib import Path
from urllib.parse import parse_qsl

from starlette._utils import get_route_path  # as the router does it: what is open is judged by the same path
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mstar.api_keys import ApiKey, digest_of, find_key, read_keys
from mstar.spec.errors import RequestError, SetupError
from mstar_server.errors import error_response, refuse
from mstar_server.exchange import current

__all__ = ["BodyLimit", "KeyCheck", "KeyRing", "RootPath"]

log = logging.getLogger("mstar.server")

SUBPROTOCOL = "openai-insecure-api-key."
"""How browsers send a key to a websocket, since they cannot set headers: OpenAI's clients do it so."""


class KeyRing:
    """The keys that are accepted: one that the operator typed, and those of a file, read anew when it changes.

    :raises SetupError: the file cannot be read.
    """

    def __init__(self, key: str | None = None, path: Path | None = None):
        self._typed = () if key is None else (ApiKey("api-key", "api-key", digest_of(key), "at the start"),)
        self._path, self._seen = path, _state_of(path)
        self._filed = () if path is None else read_keys(path)

    def find(self, secret: str) -> ApiKey | None:
        """The key whose secret is *secret*."""
        if self._path is not None and (state := _state_of(self._path)) != self._seen:
            self._seen = state
            self._reload(self._path)
        return find_key((*self._typed, *self._filed), secret)

    def _reload(self, path: Path) -> None:
        if not path.exists():
            self._filed = ()  # whoever removed the file wanted the keys to end
            log.error("the file of API keys %s is gone: none of its keys is accepted any more", path)
            return
        try:
            self._filed = read_keys(path)
        except SetupError as error:
            log.error("%s; the keys stay as they were", error)
        else:
            log.info("%d API keys read from %s", len(self._filed), path)


def _state_of(path: Path | None) -> tuple[int, int, int] | None:
    """Changes whenever the file does."""
    try:
        facts = None if path is None else path.stat()
    except OSError:
        return None
    return None if facts is None else (facts.st_mtime_ns, facts.st_size, facts.st_ino)


class KeyCheck:
    """Wants a key on everything but ``/health`` and below: ``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``; a
    websocket may send it as query ``api_key`` or as a subprotocol.

    :param page: the files of the playground are open too. They are the same on every server; what the page asks is not.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, page: bool = False):
        self.app, self.ring, self.page = app, ring, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = get_route_path(scope)
        if scope["type"] == "lifespan" or _is_health(path) or (self.page and _is_page(path)):
            await self.app(scope, receive, send)
            return
        key = self.ring.find(_secret(scope))
        if key is None or key.expired():
            what = "a valid key is needed" if key is None else "this key has expired"
            error = RequestError(
                f"{what}: send the header 'Authorization: Bearer KEY'", code="invalid_api_key", status=401
            )
            await refuse(error, scope, receive, send, {"WWW-Authenticate": "Bearer"})
            return
        exchange = current()
        if exchange is not None:
            exchange.caller = key
        await self.app(scope, receive, _choosing(scope, send))


def _secret(scope: Scope) -> str:
    """What the request offers as its key."""
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return _utf8(token.strip())
    if (token := headers.get("x-api-key", "")) or scope["type"] != "websocket":
        return _utf8(token.strip())
    offered: list[str] = scope.get("subprotocols", [])
    for name in offered:
        if name.startswith(SUBPROTOCOL):
            return name.removeprefix(SUBPROTOCOL)
    query: bytes = scope.get("query_string", b"")
    return dict(parse_qsl(query.decode("latin-1"))).get("api_key", "")


def _utf8(value: str) -> str:
    """A header's value as its client meant it: Starlette reads bytes as Latin-1."""
    return value.encode("latin-1").decode("utf-8", "surrogateescape")


def _choosing(scope: Scope, send: Send) -> Send:
    """*send*, which accepts one of a websocket's subprotocols if one came along with the key: a browser closes a socket
    that accepts none of those that it has offered. The key is never sent back."""
    offered = scope.get("subprotocols", ())
    others = [name for name in offered if not name.startswith(SUBPROTOCOL)]
    if len(others) == len(offered):
        return send
    scope["subprotocols"] = others

    async def choosing(message: Message) -> None:
        if message["type"] == "websocket.accept" and others and message.get("subprotocol") is None:
            message["subprotocol"] = others[0]
        await send(message)

    return choosing


class RootPath:
    """Says below which path a proxy shows the application, whether the proxy cuts that off or not."""

    def __init__(self, app: ASGIApp, path: str):
        self.app, self.path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app({**scope, "root_path": self.path}, receive, send)


def _is_health(path: str) -> bool:
    return path == "/health" or path.startswith("/health/")


def _is_page(path: str) -> bool:
    return path in ("/", "/playground") or path.startswith("/playground/")


class BodyLimit:
    """Answers 413 to a larger body: from its declared length, else while it arrives; and 415 to a compressed one, whose
    size nobody knows."""

    def __init__(self, app: ASGIApp, limit: int):
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("identity", ""):
            message = f"Content-Encoding {coding[:40]!r} is not supported: send the body as it is"
            error = RequestError(message, code="unsupported_content_encoding", status=415)
            await error_response(error, {"Accept-Encoding": "identity", "Connection": "close"})(scope, receive, send)
            return
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self.limit:
            error = RequestError(self._message(f" ({declared} bytes)"), code="too_large", status=413)
            await error_response(error, {"Connection": "close"})(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self.limit:
                    raise HTTPException(413, self._message(""), {"Connection": "close"})
            return message

        await self.app(scope, counted, send)

    def _message(self, size: str) -> str:
        return f"the body{size} is larger than the limit of {self.limit} bytes"

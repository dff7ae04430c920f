"""What every request passes before it reaches a route: the key and the size of its body."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mstar.spec.errors import RequestError
from mstar_server.errors import error_response

__all__ = ["ApiKey", "BodyLimit"]


class ApiKey:
    """Wants ``Authorization: Bearer KEY`` on everything but ``/health`` and below."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_health(scope["path"]) or self._accepts(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        error = RequestError(
            "a valid key is needed: send the header 'Authorization: Bearer KEY'", code="invalid_api_key", status=401
        )
        response = error_response(error, {"WWW-Authenticate": "Bearer"})
        if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008, "reason": "a valid key is needed"})
            return
        await response(scope, receive, send)

    def _accepts(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1"), self.key)


def _is_health(path: str) -> bool:
    return path == "/health" or path.startswith("/health/")


class BodyLimit:
    """Answers 413 to a larger body: from its declared length, else while it arrives; and 415 to a compressed one, whose
    size nobody knows."""

    def __init__(self, app: ASGIApp, limit: int):
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        coding = Headers(scope=scope).get("content-encoding", "identity").strip().lower()
        if coding not in ("identity", ""):
            message = f"Content-Encoding {coding[:40]!r} is not supported: send the body as it is"
            error = RequestError(message, code="unsupported_content_encoding", status=415)
            await error_response(error, {"Accept-Encoding": "identity", "Connection": "close"})(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
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

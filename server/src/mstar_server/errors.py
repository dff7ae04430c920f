"""One error contract for every route: ``{"error": {"message", "type", "param", "code"}}`` with the right status.

Whatever goes wrong (a deliberate :class:`RequestError`, a body that does not parse or validate, an unknown path, a bug)
becomes that object: as a response before the first byte, as an event of the stream after it. A bug is logged with an id
that its answer carries.
"""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mstar.spec.errors import FaultFound, MstarError, RequestError, nearest
from mstar.spec.knobs import nearest_bound
from mstar.spec.origin import describe
from mstar_server.json_body import json_fault

__all__ = [
    "BREAK_OFF",
    "ErrorMiddleware",
    "as_request_error",
    "error_event",
    "error_object",
    "error_response",
    "install_handlers",
    "refuse",
    "request_cancelled",
    "validation_fault",
]

log = logging.getLogger("mstar.server")

_BY_STATUS = {
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
}

_LONGEST_TEXT = 4096
"""Characters of a message or a field's name that are sent back."""


def as_request_error(error: BaseException, target: str = "") -> RequestError:
    """*error* as something that a client may read. A bug is logged here, once, under the id that the answer names, with
    its place in the code that *target* names."""
    if isinstance(error, RequestError):
        return error
    incident = uuid.uuid4().hex
    log.error("unhandled error, id %s: %s", incident, _said(error, target), exc_info=error)
    return RequestError(
        f"internal error; the server's log has the cause under id {incident}",
        code="internal_error",
        status=500,
        type="server_error",
    )


def _said(error: BaseException, target: str) -> str:
    """*error* in one sentence, for a log that has its traceback too."""
    if isinstance(error, FaultFound):
        return error.message
    return str(error) if isinstance(error, MstarError) else describe(error, (target,) if target else ())


def request_cancelled() -> RequestError:
    """What is said of a request that was cancelled by its id before anything of its answer was there."""
    return RequestError("the request has been cancelled", code="request_cancelled", status=499)


def error_object(error: RequestError) -> dict[str, Any]:
    """*error* as every route's JSON has it."""
    param = None if error.param is None else _readable(error.param)
    return {"error": {"message": _readable(error.message), "type": error.type, "param": param, "code": error.code}}


def error_event(error: RequestError) -> dict[str, Any]:
    """*error* where no status line can be sent any more: the last event of a stream, on every route that has no other
    word for it; with the status that it would have had. OpenAI's clients raise what is under ``error``."""
    retry_after = getattr(error, "retry_after", None)
    later = {} if retry_after is None else {"retry_after": retry_after}
    return {"type": "error", "status": error.status, **later, **error_object(error)}


def _readable(text: str) -> str:
    """*text*, which may quote what a client sent, as something that can be sent back: JSON can spell half a surrogate
    pair, UTF-8 cannot; and what is quoted has no bound."""
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}…"
    return text.encode("utf-8", "backslashreplace").decode()


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The response for *error*, with ``Retry-After`` (whole seconds) where the error knows one."""
    headers = dict(headers or {})
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
    return Response(msgspec.json.encode(error_object(error)), error.status, headers, "application/json")


async def refuse(
    error: RequestError, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str] | None = None
) -> None:
    """Answer a request, or a websocket that is not open yet, with *error*, from outside the application."""
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": error.message})
        return
    await error_response(error, headers)(scope, receive, send)


def install_handlers(app: FastAPI) -> None:
    """Make *app* answer every fault that a route or the framework raises in the one form."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    kind, code = _BY_STATUS.get(
        status, ("server_error" if status >= 500 else "invalid_request_error", "invalid_request")
    )
    message = str(error.detail)
    if status == 400 and isinstance(error.__cause__, ValueError | RecursionError):  # FastAPI's, of a body
        return error_response(json_fault(error.__cause__))
    if status == 404 and message == "Not Found":
        message = f"no route {request.url.path!r}{nearest(request.url.path, request.app.state.mstar.mounted)}"
    elif status == 405 and message == "Method Not Allowed":
        message = f"{request.method} is not allowed on {request.url.path!r}"
    return error_response(RequestError(message, code=code, status=status, type=kind), error.headers)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    place = faults[0]["loc"][0]
    inner = [{**fault, "loc": fault["loc"][1:]} for fault in faults]
    if place == "body":
        return error_response(validation_fault(inner, error.body))
    given = request.path_params if place == "path" else dict(request.query_params)
    return error_response(validation_fault(inner, given))


def validation_fault(faults: Sequence[Any], body: Any) -> RequestError:
    """The one of pydantic's *faults* worth showing: the deepest, since a union reports each of its branches."""
    if faults[0]["type"] == "json_invalid":
        reason, place = faults[0]["ctx"]["error"], faults[0]["loc"][-1]
        return json_fault(json.JSONDecodeError(reason, "", place) if isinstance(place, int) else ValueError(reason))
    paths = [_path(fault, body) for fault in faults]
    best = max(range(len(faults)), key=lambda i: len(paths[i]))
    fault, param = faults[best], _dotted(paths[best])
    if not param:
        return RequestError(
            "the body must be a JSON object, sent with Content-Type: application/json", code="invalid_json"
        )
    if fault["type"] == "missing":
        return RequestError(f"{param!r} is required", param=param, code="missing_required_parameter")
    if fault["type"] == "extra_forbidden":
        more = fault.get("ctx", {})  # of models that look for the nearest field
        param = _dotted([*paths[best], more["field"]]) if "field" in more else param
        message = f"unknown parameter {param!r}{more.get('nearest', '')}"
        return RequestError(message, param=param, code="unknown_parameter")
    text = fault["msg"].removeprefix("Value error, ")
    message = f"{param!r}: {text[:1].lower()}{text[1:]}, got {_shown(fault.get('input'))}"
    return RequestError(message + nearest_bound(fault.get("ctx", {})), param=param)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _path(fault: Any, body: Any) -> list[str | int]:
    """A fault's place in *body*: pydantic's location without the names of union branches, which are no part of it."""
    parts, value = fault["loc"], body
    path: list[str | int] = []
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if isinstance(value, Mapping) and (part in value or (last and fault["type"] == "missing")):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        path.append(part)
    return path


def _dotted(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


BREAK_OFF = "mstar.break_off"
"""In a scope: a weak reference to what closes the connection in the middle of its response."""


class ErrorMiddleware:
    """Turns a bug into a 500 of the contract; after the response began, only the connection can be closed."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            if started:
                if not _broken_off(scope, error):
                    raise
                return
            route = getattr(scope.get("endpoint"), "__module__", "")  # perhaps a plugin's
            await error_response(as_request_error(error, route))(scope, receive, send)


def _broken_off(scope: Scope, error: Exception) -> bool:
    """Close the connection if *error* is no bug: a time that ran out or a worker that died needs no traceback."""
    told = error if isinstance(error, RequestError) else error.__cause__  # Starlette's, around what it cannot answer
    if not isinstance(told, RequestError) or BREAK_OFF not in scope:
        return False
    log.warning("the answer was broken off: %s", told)
    break_off = scope[BREAK_OFF]()
    if break_off is not None:  # else the connection is gone already
        break_off()
    return True

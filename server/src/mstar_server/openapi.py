"""What the OpenAPI document says of answers: the errors that every route may give, and bodies in several forms."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

__all__ = ["ERRORS", "answers"]


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str = Field(description="invalid_request_error, rate_limit_error or server_error.")
    param: str | None = Field(description="The field at fault, as a path: `messages[0].content`.")
    code: str | None = Field(description="What went wrong, for programs.")


class ErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorObject


_MEANINGS = {
    400: "The request is at fault; `param` names the field.",
    401: "A valid key is needed.",
    404: "There is no such model or object.",
    408: "The request did not arrive in time.",
    409: "The object's state does not allow it.",
    413: "The body, or a file in it, is too large.",
    415: "The body has a media type or an encoding that is not taken.",
    422: "A file could not be decoded within its limits.",
    429: "Too many requests; see `Retry-After`.",
    499: "The request was cancelled.",
    500: "An error of the server; its log has the cause under the id in the message.",
    502: "A file that the request names could not be fetched.",
    503: "The model is not ready, or the server is stopping; see `Retry-After`.",
    504: "The request took longer than it may.",
}

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": meaning} for status, meaning in _MEANINGS.items()
}
"""``responses`` of every router."""


def answers(description: str, *media_types: str, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route whose success is an object as JSON, text (server-sent events and JSON lines too) or a
    file, as the request wants."""
    return {status: {"description": description, "content": {kind: {"schema": _schema(kind)} for kind in media_types}}}


def _schema(media_type: str) -> dict[str, Any]:
    if media_type == "application/json":
        return {"type": "object"}
    if media_type.startswith("text/") or media_type == "application/x-ndjson":
        return {"type": "string"}
    return {"type": "string", "contentMediaType": media_type}

"""What the OpenAPI document says of requests and answers in several forms, and of the errors of every route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

__all__ = ["ERRORS", "answers", "body_of", "with_errors"]


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

_REFERENCE = "#/components/schemas/{model}"
_ERROR = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=ErrorAnswer.__name__)}}}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": meaning, "content": _ERROR} for status, meaning in _MEANINGS.items()
}
"""``responses`` of every router. The body is not given as a ``model``, of which FastAPI would make a validator for each
status of each route at an application's first request: a fifth of a second, for bodies that it never sees."""


def with_errors(document: dict[str, Any]) -> dict[str, Any]:
    """*document*, an OpenAPI document, with the schemas that :data:`ERRORS` refers to."""
    _, found = models_json_schema([(ErrorAnswer, "serialization")], ref_template=_REFERENCE)
    document.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
    return document


def answers(description: str, *media_types: str, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route whose success is an object as JSON, text (server-sent events and JSON lines too) or a
    file, as the request wants."""
    content = {kind: {"schema": _answer_schema(kind)} for kind in media_types}
    return {status: {"description": description, "content": content}}


def _answer_schema(media_type: str) -> dict[str, Any]:
    if media_type == "application/json":
        return {"type": "object"}
    if media_type == "text/event-stream":
        return {}  # of its events, each of which is an object of its own kind
    if media_type.startswith("text/") or media_type == "application/x-ndjson":
        return {"type": "string"}
    return {"type": "string", "contentMediaType": media_type}


def body_of(
    cls: type[BaseModel],
    files: Sequence[str] = (),
    *,
    several: Sequence[str] = (),
    required: Sequence[str] = (),
    as_json: bool = True,
) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is *cls*, as JSON or as a form in which *files* are uploads.

    :param several: fields that are uploads too, any number of each. :param required: those of *files* that must be
        there. :param as_json: the body need not be a form.
    """
    form = _schema(cls)
    file = {"type": "string", "format": "binary"}
    for name in files:
        form["properties"][name] = file
    for name in several:
        form["properties"][name] = {"type": "array", "items": file}
    if required:
        form["required"] = [*form.get("required", ()), *required]
    content = {"multipart/form-data": {"schema": form}}
    if as_json:
        content = {"application/json": {"schema": _schema(cls)}, **content}
    return {"requestBody": {"required": True, "content": content}}


def _schema(cls: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of *cls*, without references (an OpenAPI document has its own root)."""
    schema = cls.model_json_schema()
    found: dict[str, Any] = _inline(schema, schema.pop("$defs", {}))
    return found


def _inline(value: Any, known: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if "$ref" in value:
            return _inline(known[value["$ref"].rpartition("/")[2]], known)
        return {name: _inline(inner, known) for name, inner in value.items()}
    return [_inline(inner, known) for inner in value] if isinstance(value, list) else value

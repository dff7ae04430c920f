"""What the OpenAPI document says of bodies that come as JSON or as a form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

__all__ = ["body_of"]


def body_of(cls: type[BaseModel], files: Sequence[str] = ()) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is *cls*, as JSON or as a form in which *files* are uploads."""
    json, form = _schema(cls), _schema(cls)
    for name in files:
        form["properties"][name] = {"type": "string", "format": "binary"}
    content = {"application/json": {"schema": json}, "multipart/form-data": {"schema": form}}
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

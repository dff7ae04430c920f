"""Bodies in JSON, as far as they are the same on every route: UTF-8 text that is JSON and holds whole characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fastapi import Request
from starlette.requests import HTTPConnection

from mstar.spec.errors import RequestError

__all__ = ["check_json", "json_fault", "read_json"]

_MAY_BE_HALF = re.compile(rb"\\u[dD]|\xed[\xa0-\xbf]")
_HALF = re.compile("[\ud800-\udfff]")

_MOST_LEVELS = 128
"""Deeper bodies are refused: what renders, compiles or encodes parts of them recurses, and would end in the middle."""


async def read_json(request: Request) -> Any:
    """The body of *request*, parsed once however often it is asked for. Raises 400 for what is no JSON."""
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise json_fault(error) from None


async def check_json(request: HTTPConnection) -> None:
    """Refuse a JSON body that later code would stumble over: half a surrogate pair in a string, which JSON can spell
    but UTF-8 cannot, and endless nesting. A dependency of every route; a websocket has no body."""
    if not isinstance(request, Request):
        return
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        return
    body = await request.body()
    if body.count(b"{") + body.count(b"[") > _MOST_LEVELS:
        _check_depth(await read_json(request))
    if _MAY_BE_HALF.search(body) or b"\0" in body[:4]:  # else UTF-8 without escapes: whole characters
        for path, text in _texts(await read_json(request)):
            if _HALF.search(text):
                where = f"{path!r}" if path else "the body"
                message = f"{where} is not valid Unicode: it holds a lone surrogate"
                raise RequestError(message, param=path or None, code="invalid_unicode")


def _check_depth(body: Any) -> None:
    stack: list[tuple[int, str, Any]] = [(1, "", body)]
    while stack:
        level, field, value = stack.pop()
        if level > _MOST_LEVELS:
            raise RequestError(
                f"{field!r} is nested too deeply: more than {_MOST_LEVELS} levels",
                param=field,
                code="nested_too_deeply",
            )
        if isinstance(value, dict):
            stack.extend((level + 1, field or k, v) for k, v in value.items() if isinstance(v, dict | list))
        elif isinstance(value, list):
            stack.extend((level + 1, field or "body", v) for v in value if isinstance(v, dict | list))


def _texts(body: Any) -> Iterator[tuple[str, str]]:
    """All strings of *body*, keys too, with their places. Without recursion: bodies may be deep."""
    stack: list[tuple[str, Any]] = [("", body)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, dict):
            for key, item in value.items():
                place = f"{path}.{key}" if path else key
                yield place, key
                stack.append((place, item))
        elif isinstance(value, list):
            stack.extend((f"{path}[{number}]", item) for number, item in enumerate(value))


def json_fault(error: BaseException) -> RequestError:
    """What to tell the client whose body could not be parsed."""
    if isinstance(error, RecursionError):
        why = "it is nested too deeply"
    elif isinstance(error, UnicodeDecodeError):
        why = f"byte {error.start} is not UTF-8"
    elif isinstance(error, json.JSONDecodeError):
        why = f"{error.msg} (at character {error.pos})"
    else:
        why = str(error)[:200]  # an integer of thousands of digits
    return RequestError(f"the body is not valid JSON: {why}", code="invalid_json")

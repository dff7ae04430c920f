"""The tools of a chat request, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mstar.spec.errors import RequestError, nearest

__all__ = ["read_tools", "tool_choice"]

MOST_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = ("none", "auto", "required")


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Mapping[str, Any], ...]:
    """*tools* as they came, if each is a function with a name of its own and parameters that are an object's schema."""
    if tools is None:
        return ()
    if len(tools) > MOST_TOOLS:
        raise RequestError(f"{len(tools)} tools are more than the limit of {MOST_TOOLS}", param="tools")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type") != "function":
            message = f"'{where}.type': only 'function' is supported, got {str(tool.get('type'))[:80]!r}"
            raise RequestError(message, param=f"{where}.type")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise RequestError(f"'{where}.function' must be an object", param=f"{where}.function")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            message = f"'{where}.function.name' must be 1 to 64 of letters, digits, '_' and '-', got {str(name)[:80]!r}"
            raise RequestError(message, param=f"{where}.function.name")
        if name in names:
            raise RequestError(f"'{where}.function.name': {name!r} is there twice", param=f"{where}.function.name")
        if parameters is not None and not isinstance(parameters, Mapping):
            message = f"'{where}.function.parameters' must be a JSON schema"
            raise RequestError(message, param=f"{where}.function.parameters")
        names.add(name)
    return tuple(tools)


def tool_choice(choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> Any:
    """*choice*, if it is one that *tools* allow; for what asks for nothing, ``None``."""
    if isinstance(choice, str):
        if choice not in _CHOICES:
            message = f"'tool_choice': {choice[:80]!r} is unknown{nearest(choice, _CHOICES)}"
            raise RequestError(message, param="tool_choice")
        if choice == "required" and not tools:
            raise RequestError("'tool_choice' is 'required', but there are no 'tools'", param="tool_choice")
        return None if choice == "auto" else choice
    if choice is None:
        return None
    function = choice.get("function")
    if choice.get("type") != "function" or not isinstance(function, Mapping):
        shape = "{'type': 'function', 'function': {'name': …}}"
        raise RequestError(f"'tool_choice' must be one of {', '.join(_CHOICES)}, or {shape}", param="tool_choice")
    name, names = function.get("name"), [tool["function"]["name"] for tool in tools]
    if name not in names:
        message = f"'tool_choice.function.name': {str(name)[:80]!r} is not among 'tools'{nearest(str(name), names)}"
        raise RequestError(message, param="tool_choice.function.name")
    return choice

"""How models write calls of tools, read as the text comes, and prescribed when a call is wanted.

A format is found by what a model's chat template shows the model of it (:func:`tool_format_of`); a family with a format
of its own subclasses :class:`ToolFormat`.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mstar.processing.stops import could_begin

__all__ = ["CallParser", "HermesFormat", "QwenXmlFormat", "ToolFormat", "tool_format_of"]

Parts = list[tuple[str, str]]
"""Pieces of a call: (the tool's name with the first piece, text of the arguments)."""


class CallParser(abc.ABC):
    """Reads one call, from behind its opening tag to its closing one.

    :ivar done: the closing tag has been read. :ivar begun: the tool's name has been given out.
    """

    done = begun = False

    @abc.abstractmethod
    def push(self, text: str) -> tuple[int, Parts]:
        """What *text* settles: how many of its characters, which do not come again, and the pieces that they make.

        *text* begins with what the last call did not settle.
        """


class ToolFormat(abc.ABC):
    """One way of writing calls. :cvar begin: opens a call, :cvar end: closes it.

    :param tools: the task's tools, as OpenAI spells them.
    """

    begin: ClassVar[str]
    end: ClassVar[str]

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        self.functions = {tool["function"]["name"]: tool["function"] for tool in tools}

    @abc.abstractmethod
    def parser(self) -> CallParser: ...

    @abc.abstractmethod
    def arguments(self, function: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str]:
        """How a call of *function* is written, for a constraint: what comes before its arguments, xgrammar's format of
        the arguments, what comes behind (the tags included)."""

    def constraint(self, names: Sequence[str], parallel: bool) -> dict[str, Any]:
        """A structural tag that allows calls of the tools *names* and nothing else; at least one."""
        tags = []
        for name in names:
            before, content, behind = self.arguments(self.functions[name])
            tags.append({"type": "tag", "begin": before, "content": content, "end": behind})
        form = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        return {"type": "structural_tag", "format": form}


def tool_format_of(template: str) -> type[ToolFormat] | None:
    """The format that a chat template teaches its model, if it is known here."""
    if "<tool_call>" not in template:
        return None
    return QwenXmlFormat if "<function=" in template else HermesFormat


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}


# --- Hermes: JSON between tags (Hermes 2 Pro, Qwen2.5, Qwen3, SmolLM3) ------------------------------------------------

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[^\s])')


class HermesFormat(ToolFormat):
    """``<tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>``."""

    begin, end = "<tool_call>", "</tool_call>"

    def parser(self) -> CallParser:
        return _JsonCall(self.end)

    def arguments(self, function: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str]:
        before = f'{self.begin}\n{{"name": {json.dumps(function["name"])}, "arguments": '
        return before, {"type": "json_schema", "json_schema": _schema(function)}, f"}}\n{self.end}"


class _JsonCall(CallParser):
    """The arguments go out as they are written, once the name stands before them; else with the call's end."""

    def __init__(self, end: str):
        self._end = end
        self._depth, self._string, self._escaped = 0, False, False
        self._read = False  # the arguments are complete

    def push(self, text: str) -> tuple[int, Parts]:
        if not self.begun:
            return self._head(text)
        used, parts = 0, Parts()
        if not self._read:
            used = self._value_end(text)
            if used:
                parts.append(("", text[:used]))
        if self._read:
            place = text.find(self._end, used)
            if place >= 0:
                self.done = True
                return place + len(self._end), parts
            used = max(used, len(text) - could_begin(text, (self._end,)))
        return used, parts

    def _head(self, text: str) -> tuple[int, Parts]:
        match = _HEAD.match(text)
        if match and text[match.end()] == "{":
            self.begun = True
            return match.end(), [(json.loads(match[1], strict=False), "")]
        return self._whole(text)

    def _whole(self, text: str) -> tuple[int, Parts]:
        """A call whose name does not come first, or whose arguments are a string with JSON in it."""
        start = len(text) - len(text.lstrip())
        try:
            call, end = json.JSONDecoder(strict=False).raw_decode(text, start)
        except (ValueError, RecursionError):
            place = text.find(self._end)
            self.done = place >= 0  # what is between the tags is no JSON: see Channels._parse
            return (place + len(self._end) if self.done else 0), []
        place = text.find(self._end, end)
        if place < 0:
            return 0, []
        self.done = True
        given = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if not isinstance(given, dict | str) or not isinstance(call.get("name"), str):
            return place + len(self._end), []
        self.begun = True
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return place + len(self._end), [(call["name"], arguments)]

    def _value_end(self, text: str) -> int:
        """Characters of *text* that belong to the arguments' object. Braces in strings do not count."""
        for i, char in enumerate(text):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._string = False
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._read = True
                    return i + 1
        return len(text)


# --- Qwen's XML (Qwen3-Coder, Qwen3.5, Qwen3.8) -----------------------------------------------------------------------

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_CLOSE = "</parameter>"


class QwenXmlFormat(ToolFormat):
    """``<tool_call>\\n<function=f>\\n<parameter=x>\\n1\\n</parameter>\\n</function>\\n</tool_call>``.

    A parameter's text is JSON, unless the tool's schema says that it is a string.
    """

    begin, end = "<tool_call>", "</tool_call>"

    def parser(self) -> CallParser:
        return _XmlCall(self.functions, self.end)

    def arguments(self, function: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str]:
        before = f"{self.begin}\n<function={function['name']}>\n"
        content = {"type": "qwen_xml_parameter", "json_schema": _schema(function)}
        return before, content, f"\n</function>\n{self.end}"


class _XmlCall(CallParser):
    """Each parameter goes out when it is complete."""

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], end: str):
        self._functions, self._end = functions, end
        self._types: Mapping[str, Any] = {}
        self._given = 0
        self._closed = False

    def push(self, text: str) -> tuple[int, Parts]:
        used, parts = 0, Parts()
        if not self.begun:
            match = _FUNCTION.match(text)
            if match is None:
                place = text.find(self._end)
                self.done = place >= 0
                return (place + len(self._end) if self.done else 0), []
            self.begun, used = True, match.end()
            name = match[1].strip()
            self._types = _schema(self._functions.get(name, {})).get("properties") or {}
            parts.append((name, "{"))
        while not self._closed and (match := _PARAMETER.match(text, used)):
            place = text.find(_CLOSE, match.end())
            if place < 0:
                break
            parts.append(("", self._parameter(match[1].strip(), text[match.end() : place].removesuffix("\n"))))
            used = place + len(_CLOSE)
        if not self._closed and text[used:].lstrip().startswith("</function>"):
            used = text.index("</function>", used) + len("</function>")
            self._closed = True
            parts.append(("", "}"))
        place = text.find(self._end, used)
        # behind an open parameter the end may be part of its value
        if place >= 0 and (self._closed or not _PARAMETER.match(text, used)):
            self.done = True
            if not self._closed:
                parts.append(("", "}"))
            return place + len(self._end), parts
        return used, parts

    def _parameter(self, name: str, text: str) -> str:
        schema: Any = self._types.get(name)
        value: Any = text
        if _is_string(schema):
            # a constraint lets blanks stand around a value; in a free text they may be meant
            if text.strip() in (schema.get("enum") or (schema.get("const"),)):
                value = text.strip()
        else:
            try:
                value = json.loads(text)
            except ValueError:
                value = text
        self._given += 1
        comma = ", " if self._given > 1 else ""
        return f"{comma}{json.dumps(name, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"


def _is_string(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"

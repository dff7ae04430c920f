"""Thoughts, text and calls of tools told apart, however the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.processing.channels import Channels, Piece, ReasoningTags
from mstar.processing.stops import StopStrings
from mstar.processing.tool_calls import HermesFormat, QwenXmlFormat, ToolFormat, tool_format_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "go"}},
]
HERMES, XML = HermesFormat(TOOLS), QwenXmlFormat(TOOLS)
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "a}</tool_call>\\"{", "days": 2}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=look>\n<parameter=place>\n5\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)


def split(channels: Channels, parts: Sequence[str]) -> list[Piece]:
    pieces: list[Piece] = []
    for part in parts:
        pieces += channels.push(part)
        if channels.finished:
            return pieces
    return pieces + channels.finish()


def said(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Neighbours of one kind joined; a call as name(arguments)."""
    found: list[tuple[str, str]] = []
    for key, run in itertools.groupby(pieces, key=lambda piece: (piece.kind, piece.call)):
        same = list(run)
        text = "".join(piece.text for piece in same)
        if key[0] == "call":
            text = f"{''.join(piece.name for piece in same)}({text})"
        if text and text != "()":
            if found and found[-1][0] == key[0] != "call":
                found[-1] = (key[0], found[-1][1] + text)
            else:
                found.append((key[0], text))
    return found


def channels(tools: ToolFormat | None = HERMES, stop: Sequence[str] = (), **more: Any) -> Channels:
    return Channels(StopStrings(stop), ReasoningTags(), tools=tools, **more)


LOOK = ("call", 'look({"place": "a}</tool_call>\\"{", "days": 2})')
CASES: list[tuple[str, dict[str, Any], list[tuple[str, str]]]] = [
    ("plain", {}, [("text", "plain")]),
    ("<think>\nhm\n</think>\n\nyes", {}, [("reasoning", "hm\n"), ("text", "yes")]),
    ("hm</think>yes", {"thinking": True}, [("reasoning", "hm"), ("text", "yes")]),
    ("never ends", {"thinking": True}, [("reasoning", "never ends")]),
    ("no <think>here</think>", {}, [("text", "no <think>here</think>")]),
    ("a < b <tool", {}, [("text", "a < b <tool")]),
    ("hm </thin", {"thinking": True}, [("reasoning", "hm </thin")]),
    (CALL, {}, [LOOK]),
    (f"first\n{CALL}\n{CALL}\n", {}, [("text", "first\n"), LOOK, LOOK]),
    (f"{CALL}\nlast", {}, [LOOK, ("text", "last")]),
    (f"{CALL}{CALL}", {"single": True}, [LOOK]),
    (f"<think>a</think>{CALL}", {}, [("reasoning", "a"), LOOK]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "go"}</tool_call>', {}, [("call", 'go({"a": 1})')]),
    ('<tool_call>{"name": "go", "arguments": "{\\"a\\": 1}"}</tool_call>', {}, [("call", 'go({"a": 1})')]),
    ('<tool_call>{"name": "go"}</tool_call>', {}, [("call", "go({})")]),
    ('<tool_call>{"name": "look", "arguments": {"pla', {}, [("call", 'look({"pla)')]),
    ("<tool_call>nonsense</tool_call>.", {}, [("text", "<tool_call>nonsense</tool_call>.")]),
    ("<tool_call>cut", {}, [("text", "<tool_call>cut")]),
    (CALL, {"tools": None}, [("text", CALL)]),
    (XML_CALL, {"tools": XML}, [("call", 'look({"place": "5", "days": 2})')]),
    ("<tool_call><function=go></function></tool_call>x", {"tools": XML}, [("call", "go({})"), ("text", "x")]),
    ("<tool_call><function=look><parameter=place>x", {"tools": XML}, [("call", "look({)")]),
    ("one END two", {"stop": ["END"]}, [("text", "one ")]),
    ("<think>END</think>a END b", {"stop": ["END"]}, [("reasoning", "END"), ("text", "a ")]),
    ("a EN<tool_call>D", {"stop": ["END"]}, [("text", "a EN<tool_call>D")]),
    (f"text {CALL} END x", {"stop": ["END", "days"]}, [("text", "text "), LOOK, ("text", " ")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "how", "expected"), CASES)
def test_however_cut(text: str, how: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    for size in (1, 2, 3, 7, len(text)):
        pieces = split(channels(**how), [text[i : i + size] for i in range(0, len(text), size)])
        assert said(pieces) == expected, size
        assert [piece.end for piece in pieces] == sorted(piece.end for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_cut_of_any_mixture_tells_the_same(data: st.DataObject) -> None:
    words = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "\n", "a", "STOP", "ST", '{"name": "go"', "}"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=9)))
    thinking = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = said(split(channels(stop=["STOP"], thinking=thinking), [text]))
    assert said(split(channels(stop=["STOP"], thinking=thinking), parts)) == whole


def test_arguments_go_out_as_they_are_written() -> None:
    split_up = channels()
    assert said(split_up.push('<tool_call>{"name": "go", "arguments": ')) == []
    assert said(split_up.push('{"a"')) == [("call", 'go({"a")')]
    assert said(split_up.push(": [1")) == [("call", "(: [1)")]


@pytest.mark.parametrize("form", [HERMES, XML])
def test_a_prescribed_call_is_one_that_is_read(form: ToolFormat) -> None:
    """What a constraint makes the model write comes out as a call."""
    (tag,) = form.constraint(["look"], parallel=False)["format"]["tags"]
    inside = '{"place": "x"}' if form is HERMES else "<parameter=place>\nx\n</parameter>"
    pieces = split(channels(form), [tag["begin"] + inside + tag["end"]])
    ((kind, call),) = said(pieces)
    assert (kind, json.loads(call.removeprefix("look(")[:-1])) == ("call", {"place": "x"})


def test_the_format_is_the_templates() -> None:
    assert tool_format_of("… <tool_call>{'name': …}</tool_call> …") is HermesFormat
    assert tool_format_of("… <tool_call><function=name>…") is QwenXmlFormat
    assert tool_format_of("… nothing …") is None
    assert ReasoningTags.of("… {{ '</think>' }}") == ReasoningTags()
    assert ReasoningTags.of("…") is None
    assert ReasoningTags().open_in("<|im_start|>assistant\n<think>\n")
    assert not ReasoningTags().open_in("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_blanks_around_a_value_of_a_closed_set_are_no_part_of_it() -> None:
    """A constraint lets them stand there; in a free text they may be meant."""
    closed = {"type": "string", "enum": ["here", "there"]}
    properties = {"where": closed, "note": {"type": "string"}, "only": {"type": "string", "const": "x"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    values = (("where", " here\n\n"), ("note", " here"), ("only", "x "), ("where", "hereabouts "))
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values)
    call = f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    ((_, got),) = said(split(Channels(StopStrings((), False), None, False, QwenXmlFormat([tool])), [call]))
    assert got == 'f({"where": "here", "note": " here", "only": "x", "where": "hereabouts "})'

"""Thoughts, stop strings and calls of tools in one answer, over HTTP.

A tiny decoder with a real tokenizer is made to write a text by constraining it to that; what is told apart in the text
is what a real model's would be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from mstar.testing.tiny_tokenizers import TEMPLATE

from .serving import Server, serving
from .tiny_models import publish

MODEL = "tiny-llama"
KNOWS = "{# <think>…</think> <tool_call>{…}</tool_call> #}" + TEMPLATE
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": "b END c"}}\n</tool_call>'
by_stream = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("weights")
    publish(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    (folder / "chat_template.jinja").write_text(KNOWS)
    with serving(MODEL, extra_plugins=("tests.tiny_models",), executor="inline", weights=str(folder)) as running:
        yield running


@dataclass
class Said:
    """An answer, whole or joined from its chunks."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)  # name, arguments
    reason: str | None = None
    tokens: int = 0

    def add(self, message: dict[str, Any]) -> None:
        self.content += message.get("content") or ""
        self.reasoning += message.get("reasoning_content") or ""
        for number, call in enumerate(message.get("tool_calls") or ()):
            name, arguments = self.calls.setdefault(call.get("index", number), ["", ""])
            function = call["function"]
            self.calls[call.get("index", number)] = [name + function.get("name", ""), arguments + function["arguments"]]


def answer(server: Server, text: str, stream: bool, **more: Any) -> Said:
    """What comes of the model's writing *text*."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 400,
        "response_format": {"type": "choice", "choice": [text]},
        **more,
    }
    said = Said()
    if not stream:
        reply = server.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        said.add(choice["message"])
        said.reason, said.tokens = choice["finish_reason"], reply.json()["usage"]["completion_tokens"]
        return said
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", "/v1/chat/completions", json=asked) as reply:
        assert reply.status_code == 200, reply.read()
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    *chunks, usage = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    reasons = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        said.add(choice["delta"])
        reasons.append(choice["finish_reason"])
    assert reasons[:-1] == [None] * (len(reasons) - 1), "one end, behind everything"
    said.reason, said.tokens = reasons[-1], usage["usage"]["completion_tokens"]
    return said


@by_stream
@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_in_a_thought_is_none(server: Server, stream: bool, keep: bool) -> None:
    """A client means the text that it is shown; and the split stays valid."""
    text = "<think>\nto END or not END\n</think>\n\nso: END of it"
    said = answer(server, text, stream, stop=["END"], include_stop_str_in_output=keep)
    assert (said.reasoning, said.content, said.reason) == ("to END or not END\n", "so: END" if keep else "so: ", "stop")


@by_stream
@pytest.mark.parametrize(
    ("text", "stop", "reasoning", "content"),
    [
        ("<think>a</think>b", ["</think>b"], "a", "b"),
        ("<think>a</thin", ["zz"], "a</thin", ""),
        ("<think>a</th b</think>c", ["</th"], "a</th b", "c"),
        ("<think>a <think> b</think>c <think>d", ["nothing"], "a <think> b", "c <think>d"),
        ("a</think>b", ["</"], "", "a"),
    ],
)
def test_what_looks_like_a_tag_or_a_stop_string_is_not_lost(
    server: Server, stream: bool, text: str, stop: list[str], reasoning: str, content: str
) -> None:
    """Whatever is held back around the end of a thought comes out on its own side."""
    said = answer(server, text, stream, stop=stop)
    assert (said.reasoning, said.content, said.reason) == (reasoning, content, "stop")


@by_stream
def test_the_text_before_a_stop_string_arrives_with_tools_about(server: Server, stream: bool) -> None:
    """A stop string where a call could have begun."""
    for text, stop, content in (
        ("It is so <tool STOP", "<tool STOP", "It is so "),
        ("It is so <tool_ca STOP", "STOP", "It is so <tool_ca "),
        ("It is so STOP <tool_call>", "STOP", "It is so "),
    ):
        said = answer(server, text, stream, stop=[stop], tools=[LOOK])
        assert (said.content, said.calls, said.reason) == (content, {}, "stop")


@by_stream
@pytest.mark.parametrize("most", [12, 20])
def test_a_thought_that_is_cut_ends_with_length(server: Server, stream: bool, most: int) -> None:
    """And nothing is tried again behind the client's back."""
    said = answer(server, "<think>\na long thought about little\n</think>\n\nyes", stream, max_tokens=most)
    assert (said.content, said.reason, said.tokens) == ("", "length", most)
    whole = answer(server, "<think>\na long thought about little\n</think>\n\nyes", stream)
    assert (whole.content, whole.reason) == ("yes", "stop")


@by_stream
def test_arguments_that_are_cut_end_with_length(server: Server, stream: bool) -> None:
    """Wherever the cut is, the answer ends cleanly, and what was written of the call is what the whole one has."""
    text = f"So. {CALL}"
    whole = answer(server, text, stream, tools=[LOOK])
    assert (whole.content, whole.calls, whole.reason) == ("So. ", {0: ["look", '{"a": "b END c"}']}, "tool_calls")
    for most in range(1, whole.tokens - 1, 5):
        said = answer(server, text, stream, tools=[LOOK], max_tokens=most)
        assert said.reason == "length", most
        assert said.calls.keys() <= {0}
        if said.calls:
            name, arguments = said.calls[0]
            assert (name, said.content) == ("look", "So. ")
            assert '{"a": "b END c"}'.startswith(arguments), most
        else:
            assert text.startswith(said.content), most


@by_stream
@pytest.mark.parametrize("stop", [None, ["END"]])
def test_a_call_is_never_in_the_content_and_never_twice(server: Server, stream: bool, stop: list[str] | None) -> None:
    """A stop string inside of a call's arguments is none."""
    for text, content, count in (
        (CALL, "", 1),
        (f"So. {CALL}", "So. ", 1),
        (f"{CALL}\n{CALL}", "", 2),
        (f"<think>\n{CALL}\n</think>\n\n{CALL}", "", 1),
    ):
        said = answer(server, text, stream, tools=[LOOK], stop=stop)
        assert said.content.rstrip("\n") == content.rstrip("\n"), text
        assert said.calls == {number: ["look", '{"a": "b END c"}'] for number in range(count)}, text
        assert said.reason == "tool_calls"

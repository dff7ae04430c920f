"""Structured output and calls of tools over HTTP: a random model, which would write neither by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mstar.testing.tiny_tokenizers import TEMPLATE

from .serving import Server, serving
from .tiny_models import publish

MODEL = "tiny-llama"
THINKING = "{# <think>…</think> <tool_call>{…}</tool_call> #}" + TEMPLATE.replace(
    "assistant\\n'", "assistant\\n<think>\\n'"
)
PLAIN = "{# <tool_call>{…}</tool_call> #}" + TEMPLATE
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
GO = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "additionalProperties": False}}}


def serve(folder: Path, template: str) -> Any:
    publish(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    (folder / "chat_template.jinja").write_text(template)
    return serving(MODEL, extra_plugins=("tests.tiny_models",), weights=str(folder), executor="inline")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("plain"), PLAIN) as running:
        yield running


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("thinking"), THINKING) as running:
        yield running


def official(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(server: Server, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 150, **more}
    with official(server) as client:
        answer = client.chat.completions.create(temperature=1.0, seed=3, **asked)
        return list(answer) if more.get("stream") else answer


def fits(value: Any) -> bool:
    return value.keys() == {"ok", "kind"} and isinstance(value["ok"], bool) and value["kind"] in ("a", "b")


STRICT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
FORMATS = [
    (STRICT, lambda text: fits(json.loads(text))),
    ({"type": "regex", "regex": "[0-9]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
    ({"type": "choice", "choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    ({"type": "grammar", "grammar": 'root ::= "a" | "b"'}, lambda text: text in ("a", "b")),
]


@pytest.mark.parametrize(("form", "right"), FORMATS, ids=[form["type"] for form, _ in FORMATS])
def test_an_answer_has_the_format(server: Server, form: dict[str, Any], right: Any) -> None:
    choice = ask(server, response_format=form).choices[0]
    assert right(choice.message.content), choice
    assert choice.finish_reason == "stop"


def test_thoughts_come_first_and_are_free(thinker: Server) -> None:
    # a random model does not stop thinking: its thought is cut, and nothing of it is content
    choice = ask(thinker, response_format=STRICT, max_tokens=20).choices[0]
    assert choice.message.content == ""
    assert choice.message.reasoning_content
    assert choice.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"look", "go"}), ({"type": "function", "function": {"name": "look"}}, {"look"})],
)
def test_a_call_that_is_wanted_comes(server: Server, choice: Any, names: set[str], stream: bool) -> None:
    more = {"tools": [LOOK, GO], "tool_choice": choice, "parallel_tool_calls": False}
    if stream:
        name = arguments = content = ""
        reason = None
        for chunk in ask(server, stream=True, **more):
            (part,) = chunk.choices
            for piece in part.delta.tool_calls or ():
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
            content += part.delta.content or ""
            reason = part.finish_reason or reason
    else:
        whole = ask(server, **more).choices[0]
        (call,) = whole.message.tool_calls
        name, arguments, content, reason = call.function.name, call.function.arguments, "", whole.finish_reason
        assert whole.message.content is None
    assert name in names
    assert fits(json.loads(arguments)) if name == "look" else json.loads(arguments) == {}
    assert (content, reason) == ("", "tool_calls")


def test_a_response_may_be_a_call(server: Server) -> None:
    tool = {"type": "function", **LOOK["function"], "strict": True}
    with official(server) as client:
        response = client.responses.create(
            model=MODEL, input="Hi", tools=[tool], tool_choice="required", max_output_tokens=150
        )  # type: ignore[list-item]
    call = response.output[0]
    assert call.type == "function_call"
    assert fits(json.loads(call.arguments))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {**STRICT, "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "jsonschema"}}, "response_format.type"),
    ({"response_format": {"type": "regex", "regex": "(["}}, "response_format"),
    ({"response_format": {"type": "regex", "regex": "(?<=a)b"}}, "response_format"),
    ({"response_format": {"type": "grammar", "grammar": "root ::= nowhere"}}, "response_format"),
    ({"response_format": STRICT, "ignore_eos": True}, "ignore_eos"),
    ({"tools": [LOOK], "tool_choice": "required", "response_format": FORMATS[1][0]}, "response_format"),
]


@pytest.mark.parametrize(("wrong", "param"), BAD)
def test_what_cannot_be_is_refused_and_the_next_is_answered(server: Server, wrong: dict[str, Any], param: str) -> None:
    """Cases B1 and B2."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
    refused = server.http.post("/v1/chat/completions", json={**body, **wrong})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param, refused.text
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200

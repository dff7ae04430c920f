"""Qwen3.5 through a real server, with a tiny random checkpoint: thoughts, tools, forms, second turns."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import Qwen3_5ForCausalLM

from mstar.processing.tokenizer import TextTokenizer
from mstar_qwen3.tiny import write_text

from .serving import Server, serving

KEY = "qwen3_5_4b"
MESSAGES: Any = [{"role": "user", "content": "Hello there, how are you?"}]
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string", "enum": ["here", "there"]}, "twice": {"type": "boolean"}},
            "required": ["where", "twice"],
            "additionalProperties": False,
        },
    },
}
by_stream = pytest.mark.parametrize("stream", [False, True])


def plugins() -> tuple[str, ...]:
    """The package's, unless it is installed."""
    names = {entry.value for entry in importlib.metadata.entry_points(group="mstar.plugins")}
    return () if "mstar_qwen3.plugin" in names else ("mstar_qwen3.plugin",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_5")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(
        KEY, extra_plugins=plugins(), executor="inline", weights=str(folder), dtype="float32",
        max_concurrent_requests=8, resources={"kv": {"tokens": 16384}},
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer(folder)


def chat(client: openai.OpenAI, stream: bool = False, **asked: Any) -> Any:
    """The message and the reason of an answer, whole or joined from its chunks."""
    body = {"model": KEY, "messages": MESSAGES, "temperature": 0, "max_tokens": 40, **asked}
    if not stream:
        (choice,) = client.chat.completions.create(**body).choices
        message = choice.message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        return message.content or "", getattr(message, "reasoning_content", None) or "", calls, choice.finish_reason
    content = reasoning = ""
    found: dict[int, list[str]] = {}
    reason = None
    for chunk in client.chat.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            name, arguments = found.setdefault(call.index, ["", ""])
            found[call.index] = [name + (call.function.name or ""), arguments + (call.function.arguments or "")]
        reason = choice.finish_reason or reason
    return content, reasoning, [tuple(call) for call in found.values()], reason


@by_stream
@pytest.mark.parametrize("within", [False, True], ids=["field", "chat_template_kwargs"])
def test_thinking_on_and_off(client: openai.OpenAI, stream: bool, within: bool) -> None:
    def asked(on: bool) -> Any:
        body = {"enable_thinking": on}
        return {**({"chat_template_kwargs": body} if within else body), "ignore_eos": True}

    default = chat(client, stream, extra_body={"ignore_eos": True})
    content, reasoning, calls, reason = default
    assert (content, calls, reason) == ("", [], "length")
    assert reasoning
    assert chat(client, stream, extra_body=asked(True)) == default
    content, reasoning, calls, reason = chat(client, stream, extra_body=asked(False))
    assert (reasoning, calls, reason) == ("", [], "length")
    assert content


@by_stream
def test_an_answer_has_its_form_behind_the_thought(
    client: openai.OpenAI, tokenizer: TextTokenizer, stream: bool
) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    # a random model would think for ever
    bias = {str(tokenizer.id_of("</think>")): 12}
    content, reasoning, _, reason = chat(
        client, stream, response_format=form, logit_bias=bias, max_tokens=400, temperature=1.0, seed=5
    )
    assert reason == "stop"
    assert isinstance(json.loads(content)["ok"], bool)
    assert "</think>" not in reasoning + content


@by_stream
def test_a_call_in_the_models_own_format(client: openai.OpenAI, stream: bool) -> None:
    content, _, calls, reason = chat(
        client, stream, tools=[LOOK], tool_choice="required", parallel_tool_calls=False, max_tokens=600,
        temperature=80.0, seed=1, extra_body={"enable_thinking": False},
    )  # fmt: skip
    ((name, arguments),) = calls
    assert (content, name, reason) == ("", "look", "tool_calls")
    found = json.loads(arguments)
    assert found.keys() == {"where", "twice"}
    assert found["where"] in ("here", "there")
    assert isinstance(found["twice"], bool)


@by_stream
def test_a_call_is_read_as_the_model_writes_it(client: openai.OpenAI, stream: bool) -> None:
    call = (
        "<tool_call>\n<function=look>\n<parameter=where>\nhere\n</parameter>\n<parameter=twice>\ntrue\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    content, _, calls, reason = chat(
        client, stream, tools=[LOOK], max_tokens=400,
        extra_body={"enable_thinking": False, "response_format": {"type": "choice", "choice": [f"So.\n\n{call}"]}},
    )  # fmt: skip
    assert (content.strip(), reason) == ("So.", "tool_calls")
    assert [(name, json.loads(text)) for name, text in calls] == [("look", {"where": "here", "twice": True})]


def test_thoughts_calls_and_results_go_back_in(client: openai.OpenAI, server: Server) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "look", "arguments": '{"where": "here", "twice": false}'},
    }
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
    ]
    body = {"model": KEY, "messages": history, "tools": [LOOK]}
    reply = server.http.post("/tokenize", json=body)
    assert reply.status_code == 200, reply.text
    text = server.http.post("/detokenize", json={"model": KEY, "tokens": reply.json()["tokens"]}).json()["prompt"]
    assert "<think>\nhm\n</think>" in text
    assert "<function=look>\n<parameter=where>\nhere\n</parameter>\n<parameter=twice>\nfalse\n</parameter>" in text
    assert "<tool_response>\nnothing\n</tool_response>" in text
    assert chat(client, messages=history, tools=[LOOK], extra_body={"ignore_eos": True})[3] == "length"


def test_what_the_template_of_qwen3_8_reads_is_not_forwarded(client: openai.OpenAI, server: Server) -> None:
    assert chat(client, reasoning_effort="low") == chat(client)
    body = {"model": KEY, "messages": MESSAGES, "chat_template_kwargs": {"preserve_thinking": False}}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "chat_template_kwargs.preserve_thinking"


@pytest.mark.parametrize(
    ("field", "value"), [("enable_thinking", "yes"), ("repetition_penalty", 0), ("top_k", -1), ("max_tokens", 5000)]
)
def test_a_bad_field_is_named_before_anything_runs(server: Server, field: str, value: Any) -> None:
    reply = server.http.post("/v1/chat/completions", json={"model": KEY, "messages": MESSAGES, field: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


def test_generate_thinks_or_not(server: Server) -> None:
    def ask(**knobs: Any) -> Any:
        form = {"text": "Hi", "model_kwargs": json.dumps({"temperature": 0, "max_tokens": 9, **knobs})}
        reply = server.http.post("/generate", data=form)
        assert reply.status_code == 200, reply.text
        return reply.json()

    assert "reasoning" in json.dumps(ask()["outputs"])
    assert "reasoning" not in json.dumps(ask(enable_thinking=False)["outputs"])


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_the_ends_of_generation_config(client: openai.OpenAI, tokenizer: TextTokenizer, end: str) -> None:
    bias = {str(tokenizer.id_of(end)): 100}
    content, reasoning, _, reason = chat(client, logit_bias=bias)
    assert (content, reasoning, reason) == ("", "", "stop")


def test_penalties_count(client: openai.OpenAI) -> None:
    plain = chat(client, max_tokens=60)
    assert chat(client, max_tokens=60, extra_body={"repetition_penalty": 5.0}) != plain
    assert chat(client, max_tokens=60, frequency_penalty=2.0) != plain


def test_samples_and_second_turns_share_a_prompt(client: openai.OpenAI, server: Server) -> None:
    prompt = [7, 9, 11, 13] * 200
    asked: Any = {"model": KEY, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    one = client.completions.create(prompt=prompt, temperature=0, **asked)
    several = client.completions.create(prompt=prompt, n=3, temperature=0, **asked)
    assert [choice.text for choice in several.choices] == [one.choices[0].text] * 3
    assert several.usage is not None
    assert several.usage.prompt_tokens_details is not None
    assert (several.usage.prompt_tokens_details.cached_tokens or 0) >= 512
    assert not any(pool["used"] for pool in server.pools()[KEY].values())


def test_greedy_tokens_are_those_of_transformers(client: openai.OpenAI, folder: Path, tokenizer: TextTokenizer) -> None:
    reference = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for length in (3, 70, 150):
        prompt = [(i * 37 + length) % 300 for i in range(length)]
        with torch.no_grad():
            want = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, length, dtype=torch.int64), do_sample=False,
                max_new_tokens=16, min_new_tokens=16, top_k=None, pad_token_id=0,
            )[0, length:]  # fmt: skip
        extra: Any = {"min_tokens": 16}
        got = client.completions.create(model=KEY, prompt=prompt, temperature=0, max_tokens=16, extra_body=extra)
        assert got.choices[0].text == tokenizer.decode(want.tolist())

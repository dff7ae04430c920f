"""Completions and embeddings through a real server, asked as OpenAI's client asks."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from mstar.testing.miniatures.catalog import continue_sum, embed_answer
from mstar.testing.miniatures.common import decode, encode

from .serving import Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("mini_chat", "mini_embed", extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def answer(text: str, tokens: int) -> str:
    return decode(continue_sum(encode(text), tokens))


def test_a_completion_goes_on_with_the_text(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="mini_chat", prompt="abc", max_tokens=5)
    assert reply.object == "text_completion"
    assert reply.choices[0].text == answer("abc", 5)
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 5)


def test_a_prompt_of_ids_is_the_text_that_they_spell(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="mini_chat", prompt=encode("abc"), max_tokens=5, echo=True)
    assert reply.choices[0].text == "abc" + answer("abc", 5)


def test_choices_come_prompt_by_prompt(client: openai.OpenAI, server: Server) -> None:
    reply = client.completions.create(model="mini_chat", prompt=["abc", "b c"], n=2, max_tokens=4)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == [answer(t, 4) for t in ("abc", "abc", "b c", "b c")]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 16)
    assert not any(pool["used"] for pool in server.pools()["mini_chat"].values())


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_is_whole(client: openai.OpenAI, echo: bool) -> None:
    ask: dict[str, Any] = {"model": "mini_chat", "prompt": ["abc", "d"], "max_tokens": 6, "echo": echo}
    whole = client.completions.create(**ask)
    texts, reasons, last = ["", ""], {}, None
    for chunk in client.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        assert last is None, "usage comes last"
        last = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == {0: "length", 1: "length"}
    assert last == whole.usage


def test_log_probabilities_have_the_older_shape(client: openai.OpenAI) -> None:
    chosen = client.completions.create(model="mini_chat", prompt="abc", max_tokens=3, logprobs=0).choices[0]
    assert "".join(chosen.logprobs.tokens) == chosen.text
    assert chosen.logprobs.text_offset == [0, 1, 2]
    assert chosen.logprobs.top_logprobs == [{}, {}, {}]
    two = client.completions.create(model="mini_chat", prompt="abc", max_tokens=3, logprobs=2).choices[0].logprobs
    for token, value, top in zip(two.tokens, two.token_logprobs, two.top_logprobs, strict=True):
        assert len(top) == 2
        assert max(top, key=top.get) == token
        assert top[token] == value < 0


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [1, 4711]}, "prompt[1]"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"n": 0}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": -1}, "temperature"),
        ({"temprature": 1}, "temprature"),
        ({"prompt": ["a"] * 3000}, "prompt"),
    ],
)
def test_wrong_completions_name_the_field(server: Server, wrong: dict[str, Any], param: str) -> None:
    reply = server.http.post("/v1/completions", json={"model": "mini_chat", "prompt": "abc", **wrong})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text


def test_embeddings_come_in_order(client: openai.OpenAI) -> None:
    texts = ["abc", "d", "hello there"]
    reply = client.embeddings.create(model="mini_embed", input=texts)  # as base64, which is the client's default
    assert [item.index for item in reply.data] == [0, 1, 2]
    for item, text in zip(reply.data, texts, strict=True):
        np.testing.assert_array_equal(item.embedding, embed_answer(encode(text)))
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, texts))


def test_embeddings_as_numbers_and_base64_agree(server: Server) -> None:
    ask = {"model": "mini_embed", "input": encode("abc")}
    plain = server.http.post("/v1/embeddings", json={**ask, "encoding_format": "float"}).json()
    coded = server.http.post("/v1/embeddings", json={**ask, "encoding_format": "base64"}).json()
    assert (
        plain["data"][0]["embedding"] == np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4").tolist()
    )


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 2}, "dimensions"),
        ({"inputs": "a"}, "inputs"),
        ({"model": "mini_chat"}, "model"),
    ],
)
def test_wrong_embeddings_name_the_field(server: Server, wrong: dict[str, Any], param: str) -> None:
    reply = server.http.post("/v1/embeddings", json={"model": "mini_embed", "input": "abc", **wrong})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text

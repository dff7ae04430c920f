"""What went wrong in other servers, asked of a real server with a tiny decoder and a real tokenizer.

Each test is named by the rows of the list of cases that it stands for (A: text, B: structure and tools, H: the server).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from mstar_server.options import ServerOptions

from .serving import Server, serving
from .tiny_models import publish

MODEL = "tiny-llama"
CHAT, COMPLETIONS, RESPONSES, GENERATE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("weights")
    publish(MODEL, folder)
    with serving(MODEL, extra_plugins=("tests.tiny_models",), executor="inline", weights=str(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def _alive(server: Server) -> Iterator[None]:
    """After each test the server answers, and holds nothing."""
    yield
    assert server.http.post(CHAT, json=chat(max_tokens=1)).status_code == 200
    assert not any(pool["used"] for pool in server.pools()[MODEL].values())


def chat(content: Any = "Hello there", **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
        **more,
    }


def events(server: Server, body: dict[str, Any], route: str = CHAT) -> list[dict[str, Any]]:
    """The chunks of a stream, whose bytes are UTF-8 event by event and end with ``[DONE]``."""
    with server.http.stream("POST", route, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        data = b"".join(answer.iter_raw())
    parts = data.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    return [json.loads(part.removeprefix(b"data: ").decode("utf-8", "strict")) for part in parts[:-2]]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(delta.get("content") or "" for delta in deltas)


def whole(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def structured(response_format: Any, **more: Any) -> dict[str, Any]:
    return chat(response_format=response_format, ignore_eos=None, **more)


def stops(text: str) -> list[str]:
    """Strings of several tokens and characters in the middle of *text*."""
    clean = [i for i in range(2, len(text) - 5) if "\ufffd" not in text[i : i + 4]]
    return [text[i : i + size] for i in clean[:12:3] for size in (2, 4)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a1_a6_no_character_of_a_stop_string_slips_out(server: Server, stream: bool, keep: bool) -> None:
    full = whole(server, chat())["message"]["content"]
    found = stops(full)
    assert len(found) > 3, full
    for stop in found:
        end = full.index(stop) + (len(stop) if keep else 0)
        body = chat(stop=stop, include_stop_str_in_output=keep)
        if stream:
            chunks = events(server, body)
            text, reason = text_of(chunks), chunks[-1]["choices"][0]["finish_reason"]
        else:
            choice = whole(server, body)
            text, reason = choice["message"]["content"], choice["finish_reason"]
        assert (text, reason) == (full[:end], "stop"), stop


def test_a7_characters_of_many_tokens_come_whole(server: Server) -> None:
    said = "😀👩‍👩‍👧‍👦 日本語 é 🇫🇷"
    body = structured(form({"type": "string", "enum": [said]}), max_tokens=150)
    text = whole(server, body)["message"]["content"]
    assert json.loads(text) == said
    chunks = events(server, body)
    assert text_of(chunks) == text
    assert not any("\ufffd" in text_of([chunk]) for chunk in chunks)
    assert sum(bool(text_of([chunk])) for chunk in chunks) > 5, "a stream, not one piece"


@pytest.mark.parametrize("seed", range(3))
def test_a7_joined_deltas_are_the_whole_answer_even_of_noise(server: Server, seed: int) -> None:
    body = chat(temperature=2.0, seed=seed, max_tokens=40)
    assert text_of(events(server, body)) == whole(server, body)["message"]["content"]


@pytest.mark.parametrize("tools", [None, [], [{"type": "function", "function": {"name": "f"}}]])
def test_a9_a11_one_usage_chunk_at_the_end(server: Server, tools: Any) -> None:
    more = {} if tools is None else {"tools": tools}
    chunks = events(server, chat(stream_options={"include_usage": True}, max_tokens=4, **more))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4 > 4


@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}])
def test_a10_no_usage_unless_asked_for(server: Server, options: Any) -> None:
    chunks = events(server, chat(stream_options=options, max_tokens=2))
    assert all(chunk["choices"] and not chunk.get("usage") for chunk in chunks)


def test_a12_the_role_comes_first(server: Server) -> None:
    first, *rest = events(server, chat(max_tokens=3))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    for chunk in rest[:-1]:
        assert chunk["choices"][0]["delta"].get("content"), "never role and content both null"


def test_a16_log_probabilities_of_the_chosen_token_only(client: openai.OpenAI) -> None:
    on = {"ignore_eos": True}
    new = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=3, logprobs=True, extra_body=on
    )
    assert [entry.top_logprobs for entry in new.choices[0].logprobs.content] == [[], [], []]  # type: ignore[union-attr]
    old = client.completions.create(model=MODEL, prompt="a", max_tokens=3, logprobs=0, extra_body=on)
    assert old.choices[0].logprobs.top_logprobs in ([{}] * 3, None)  # type: ignore[union-attr]
    assert len(old.choices[0].logprobs.token_logprobs) == 3  # type: ignore[arg-type, union-attr]


WRONG_SAMPLING = [
    ("top_k", 0.01),
    ("top_k", -2),
    ("temperature", 1e6),
    ("temperature", -1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_p", -1),
    ("top_p", 1.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-39),  # as float32 next to nothing: logits divided by it are infinite
    ("presence_penalty", 1e9),
    ("frequency_penalty", float("-inf")),
    ("min_p", 2),
    ("seed", 2**64),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", [1]),
    ("stop", [1]),
    ("logit_bias", {"1": 1e9}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"99999999": 1}),
    ("n", 0),
    ("n", 10**9),
]


@pytest.mark.parametrize(("knob", "value"), WRONG_SAMPLING, ids=lambda v: str(v)[:12])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE])
def test_a18_wrong_sampling_is_refused_by_name(server: Server, route: str, knob: str, value: Any) -> None:
    if route == GENERATE:
        if knob in ("stop", "logit_bias", "n"):
            pytest.skip("no knob of the native route")
        body: dict[str, Any] = {"model": MODEL, "text": "a", "model_kwargs": {knob: value}}
    elif route == CHAT:
        body = chat(**{knob: value})
    else:
        body = {"model": MODEL, "prompt": "a", knob: value}
    for stream in ("stream", "streaming") if route == GENERATE else ("stream", "stream"):
        sent = body if stream == "stream" and route == GENERATE else {**body, stream: True}
        answer = server.http.post(route, content=json.dumps(sent), headers={"content-type": "application/json"})
        assert answer.status_code == 400, (answer.status_code, answer.text[:200])
        assert knob in answer.json()["error"]["param"]


def test_a19_a20_the_same_alone_and_in_company(server: Server) -> None:
    greedy, drawn = chat(), chat(temperature=1.0, seed=5)
    others = [chat(f"number {n}", temperature=1.3, seed=n) for n in range(14)]
    alone = [whole(server, greedy), whole(server, drawn)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda body: whole(server, body), [greedy, *others, drawn]))
    assert [together[0], together[-1]] == alone


CONTEXT = 256


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, RESPONSES, GENERATE])
def test_a21_a23_too_long_is_a_400_that_names_both_numbers(server: Server, route: str, stream: bool) -> None:
    long = "Hello there " * 200
    body: dict[str, Any] = {
        CHAT: chat(long, stream=stream),
        COMPLETIONS: {"model": MODEL, "prompt": long, "stream": stream},
        RESPONSES: {"model": MODEL, "input": long, "stream": stream},
        GENERATE: {"model": MODEL, "text": long, "streaming": stream},
    }[route]
    answer = server.http.post(route, json=body)
    assert answer.status_code == 400, answer.text[:200]
    message = answer.json()["error"]["message"]
    assert str(CONTEXT) in message
    if route == CHAT:  # the prompt's own length is right, too
        ask = {"model": MODEL, "messages": body["messages"]}
        assert str(server.http.post("/tokenize", json=ask).json()["count"]) in message


@pytest.mark.parametrize("stream", [False, True])
def test_a21_a_prompt_that_fits_with_more_tokens_than_do(server: Server, stream: bool) -> None:
    answer = server.http.post(CHAT, json=chat(max_tokens=10_000, stream=stream))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "max_tokens"
    assert "10000" in error["message"]
    assert str(CONTEXT) in error["message"]


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        (CHAT, "top_logprobs", 10**6),
        (CHAT, "top_logprobs", -1),
        (CHAT, "prompt_logprobs", -1),
        (COMPLETIONS, "logprobs", 10**6),
        (COMPLETIONS, "logprobs", -1),
        (COMPLETIONS, "prompt_logprobs", -1),
        (RESPONSES, "top_logprobs", 10**6),
    ],
)
def test_a25_log_probabilities_have_a_cap(server: Server, route: str, field: str, value: int) -> None:
    body: dict[str, Any] = {
        CHAT: chat(logprobs=True),
        COMPLETIONS: {"model": MODEL, "prompt": "a"},
        RESPONSES: {"model": MODEL, "input": "a", "include": ["message.output_text.logprobs"]},
    }[route]
    answer = server.http.post(route, json={**body, field: value})
    assert answer.status_code == 400, answer.text[:200]
    assert answer.json()["error"]["param"] == field


def test_a27_an_assistant_that_only_called(server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "b"},
    ]
    assert server.http.post(CHAT, json=chat(messages=messages)).status_code == 200


def test_a32_eight_at_once_all_end(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: text_of(events(server, chat(f"{n}", max_tokens=30))), range(8)))
    assert all(texts)


@pytest.mark.parametrize(
    "response_format",
    [
        form({"type": "nonsense"}),
        form({"type": "object", "properties": 5}),
        form({"$ref": "#/nowhere"}),
        form({"$ref": "http://127.0.0.1/schema"}),
        form({"type": "string", "pattern": "(["}),
        form({"type": "string", "pattern": "(a)\\1"}),
        form("text"),
        {"type": "json_schema"},
        {"type": "jason"},
        {"type": "regex", "pattern": "(["},
        {"type": "regex", "pattern": "a" * 100_000},
        {},
    ],
    ids=lambda value: json.dumps(value)[:60],
)
@pytest.mark.parametrize("stream", [False, True])
def test_b1_b2_what_cannot_be_compiled_is_a_400(server: Server, response_format: Any, stream: bool) -> None:
    good = structured(form({"type": "integer", "enum": [7]}), max_tokens=10)
    assert json.loads(whole(server, good)["message"]["content"]) == 7
    answer = server.http.post(CHAT, json=structured(response_format, stream=stream))
    assert answer.status_code == 400, answer.text[:300]
    assert answer.json()["error"]["param"].startswith("response_format")
    assert json.loads(whole(server, good)["message"]["content"]) == 7


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


@pytest.mark.parametrize("depth", [60, 200, 300])
@pytest.mark.parametrize("where", ["response_format", "tools"])
def test_b1_a_deep_schema_is_an_answer_or_a_400(server: Server, depth: int, where: str) -> None:
    schema = nested(depth)
    function = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    more: dict[str, Any] = {"response_format": form(schema)} if where == "response_format" else {"tools": [function]}
    answer = server.http.post(CHAT, json=chat(**more, max_tokens=4, ignore_eos=None))
    assert answer.status_code in (200, 400), answer.text[:300]


@pytest.mark.parametrize("tools", [None, [], [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
@pytest.mark.parametrize("choice", ["none", "auto"])
def test_b9_tool_choices_that_ask_for_nothing(server: Server, tools: Any, choice: str) -> None:
    body = chat(tools=tools, tool_choice=choice, max_tokens=2)
    assert server.http.post(CHAT, json=body).status_code == 200


def test_h10_paths_lead_nowhere_else(server: Server) -> None:
    for path in ("/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/%2e%2e/", "/docs/../../etc/passwd", "/v1/models/%00"):
        answer = server.http.get(path, headers={"Range": "bytes=" + "0-," * 5000})
        assert answer.status_code == 404, path


def test_the_limit_of_choices_is_said_in_numbers(server: Server) -> None:
    answer = server.http.post(CHAT, json=chat(n=ServerOptions().max_choices + 1))
    assert str(ServerOptions().max_choices) in answer.json()["error"]["message"]

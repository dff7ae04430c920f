from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import logging
import sys
import types

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from PIL import Image as Pillow

from mstar.hookspecs import hookimpl
from mstar.spec.errors import NotReady, RequestError, TooBusy
from mstar.spec.processor import TextDelta
from mstar.spec.request import TokenLogprob
from mstar.spec.tasks import Text
from mstar_server.openai.chat_adapter import ChatAdapter

URL = "/v1/chat/completions"


def events(text: str) -> list[str]:
    assert text.endswith("\n\n")
    blocks = text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def chunks(text: str) -> list[dict]:
    *body, last = events(text)
    assert last == "[DONE]"
    for chunk in body:
        ChatCompletionChunk.model_validate_json(chunk, strict=False)
    return [json.loads(chunk) for chunk in body]


async def test_whole_answer_has_openais_shape(kit, chat):
    service = kit.Service(kit.HELLO)
    async with kit.client(service) as client:
        reply = await client.post(URL, json=chat())
    assert reply.status_code == 200
    answer = ChatCompletion.model_validate_json(reply.text)
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == "Hello 🙂"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 5, 10)
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.system_fingerprint.startswith("fp_")


async def test_stream_says_the_role_first_and_joins_to_the_whole_text(kit, chat):
    async with kit.client(kit.Service(kit.HELLO)) as client:
        reply = await client.post(URL, json=chat(stream=True))
    assert reply.headers["content-type"].startswith("text/event-stream")
    parts = chunks(reply.text)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0]["role"] == "assistant"
    assert all("role" in d or d.get("content") is not None for d in deltas)
    assert "".join(d.get("content", "") for d in deltas) == "Hello 🙂"
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert all("usage" not in part for part in parts)


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}])
async def test_no_usage_chunk_unless_asked(kit, chat, options):
    async with kit.client(kit.Service(kit.HELLO)) as client:
        reply = await client.post(URL, json=chat(stream=True, stream_options=options))
    assert all("usage" not in part for part in chunks(reply.text))


async def test_include_usage_adds_one_last_chunk(kit, chat):
    async with kit.client(kit.Service(kit.HELLO)) as client:
        reply = await client.post(URL, json=chat(stream=True, n=2, stream_options={"include_usage": True}))
    *parts, last = chunks(reply.text)
    assert all(part["usage"] is None and part["choices"] for part in parts)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (5, 10)


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_siblings_with_their_own_seeds(kit, chat, stream):
    service = kit.Service()
    service.script = lambda number: [TextDelta(f"answer {number}", (1,))]
    async with kit.client(service) as client:
        reply = await client.post(URL, json=chat(n=3, seed=2**63 - 2, stream=stream))
    assert [task.knobs.seed for task in service.tasks] == [2**63 - 2, 2**63 - 1, -(2**63)]
    first = service.ids[0][0]
    assert [sibling for _, sibling in service.ids] == [None, first, first]
    texts = {0: "", 1: "", 2: ""}
    if stream:
        for choice in (part["choices"][0] for part in chunks(reply.text)):
            texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        texts = {choice["index"]: choice["message"]["content"] for choice in reply.json()["choices"]}
    assert texts == {i: f"answer {i}" for i in range(3)}


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_have_openais_shape(kit, chat, stream):
    found = TokenLogprob(token=1, logprob=-0.5, top=[(1, -0.5), (3, float("-inf"))])
    service = kit.Service([TextDelta("Hel", (1,), (found,))])
    async with kit.client(service) as client:
        reply = await client.post(URL, json=chat(logprobs=True, top_logprobs=2, stream=stream))
    assert service.tasks[0].logprobs == 2
    choices = [c["choices"][0] for c in chunks(reply.text)] if stream else reply.json()["choices"]
    (entry,) = next(c["logprobs"]["content"] for c in choices if c["logprobs"])
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("Hel", -0.5, list(b"Hel"))
    assert entry["top_logprobs"][1] == {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xC3]}


async def test_logprobs_without_alternatives_reports_the_chosen_token(kit, chat):
    service = kit.Service(kit.HELLO)
    async with kit.client(service) as client:
        await client.post(URL, json=chat(logprobs=True))
        await client.post(URL, json=chat(logprobs=False, top_logprobs=0))
    assert [task.logprobs for task in service.tasks] == [0, None]


async def test_logprobs_of_a_processor_that_cannot_spell_tokens(kit, chat):
    service = kit.Service(kit.HELLO)
    service.processor = object()
    async with kit.client(service) as client:
        reply = await client.post(URL, json=chat(logprobs=True))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logprobs")


async def test_only_what_the_client_set_reaches_the_knobs(kit, chat):
    service = kit.Service(kit.HELLO)
    sent = {
        "temperature": 0,
        "top_k": 3,
        "min_p": 0.1,
        "steps": 7,
        "max_completion_tokens": 9,
        "ignore_eos": True,
        "top_p": None,
        "user": "someone",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "stop": ["END", "\n"],
        "include_stop_str_in_output": True,
        "logit_bias": {"3": -100},
    }
    async with kit.client(service) as client:
        assert (await client.post(URL, json=chat(**sent))).status_code == 200
        assert (await client.post(URL, json=chat(stop="x"))).status_code == 200
    task = service.tasks[0]
    assert task.knobs.model_fields_set == {"temperature", "top_k", "min_p", "steps", "max_tokens", "ignore_eos"}
    assert (task.knobs.max_tokens, task.knobs.steps) == (9, 7)
    assert (task.stop, task.include_stop, task.logit_bias) == (("END", "\n"), True, {3: -100.0})
    assert service.tasks[1].stop == ("x",)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", -1, "nearest valid value is 0"),
        ("temperature", 1e6, "nearest valid value is 100"),
        ("temperature", "hot", "temperature"),
        ("temperature", True, "temperature"),
        ("top_p", -1, "top_p"),
        ("top_k", 0.01, "top_k"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("n", 0, "nearest valid value is 1"),
        ("n", 10**6, "nearest valid value is 128"),
        ("top_logprobs", 10**6, "20"),
        ("top_logprobs", 2, "logprobs"),
        ("stream_options", {"include_usage": True}, "stream"),
        ("stream", "yes", "boolean"),
        ("logit_bias", {"x": 1}, "token id"),
        ("logit_bias", {"1": 101}, "-100"),
        ("logit_bias", {"9" * 5000: 1}, "token id"),
        ("top_k", 2**63, "beyond 64 bits"),
        ("max_tokens", 10**40, "beyond 64 bits"),
        ("temperature", "\ud800", "surrogate"),
        ("stop", 3, "stop"),
        ("steps", 51, "50"),
        ("modalities", ["text", "video"], "not supported"),
        ("tempratur", 1, "did you mean 'temperature'"),
        ("stepz", 1, "did you mean 'steps'"),
        ("messages", [], "empty"),
        ("messages", "hi", "list"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_field_is_named_before_any_byte_of_a_stream(kit, chat, field, value, said, stream):
    service = kit.Service(kit.HELLO)
    async with kit.client(service) as client:
        body = chat(**{"stream": stream, field: value}) if field != "stream_options" else chat(**{field: value})
        # as bytes: httpx would not send half a surrogate pair
        reply = await client.post(URL, content=json.dumps(body), headers={"Content-Type": "application/json"})
        error = reply.json()["error"]
        assert reply.status_code == 400
        assert error["param"] == field
        assert error["type"] == "invalid_request_error"
        assert said in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (await client.post(URL, json=chat())).status_code == 200


@pytest.mark.parametrize("text", ['{"temperature": NaN}', '{"temperature": Infinity}', '{"logit_bias": {"1": NaN}}'])
async def test_numbers_that_are_not_finite_are_refused(kit, chat, text):
    body = json.dumps(chat())[:-1] + ", " + text[1:]
    async with kit.client(kit.Service(kit.HELLO)) as client:
        reply = await client.post(URL, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == text.split('"')[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [], "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"parallel_tool_calls": True},
        {"functions": [], "function_call": "none"},
        {"max_tokens": 3, "max_completion_tokens": 3},
    ],
)
async def test_neutral_values_of_unsupported_fields_pass(kit, chat, fields):
    async with kit.client(kit.Service(kit.HELLO)) as client:
        assert (await client.post(URL, json=chat(**fields))).status_code == 200


async def test_two_different_limits_are_refused(kit, chat):
    async with kit.client(kit.Service(kit.HELLO)) as client:
        reply = await client.post(URL, json=chat(max_tokens=3, max_completion_tokens=4))
    assert reply.status_code == 400
    assert "max_completion_tokens" in reply.json()["error"]["message"]


async def test_every_kind_of_message(kit, chat):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "annotations": []},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": None, "refusal": "no"},
    ]
    service = kit.Service(kit.HELLO)
    async with kit.client(service) as client:
        assert (await client.post(URL, json=chat(messages=messages))).status_code == 200
    got = service.tasks[0].messages
    assert [m.role for m in got] == ["system", "developer", "user", "assistant", "tool", "assistant"]
    assert got[2].content == (Text("a"), Text("b"))
    assert (got[2].name, got[3].content, list(got[3].tool_calls), got[4].tool_call_id) == ("ann", (), [call], "c1")
    assert got[5].content == (Text("no"),)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "smell"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "txt": 1}]}, "messages[0].content[0].txt"),
        ({"role": "user", "content": [{"type": "video_url", "video_url": "data:x"}]}, "messages[0].content[0]"),
    ],
)
async def test_a_bad_message_is_named_by_its_path(kit, chat, message, param):
    async with kit.client(kit.Service(kit.HELLO)) as client:
        reply = await client.post(URL, json=chat(messages=[message]))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("message", "param", "near"),
    [
        ({"role": "user", "content": "x", "contnet": "y"}, "messages[0].contnet", "; did you mean 'content'?"),
        ({"role": "user", "contnet": "y"}, "messages[0].contnet", "; did you mean 'content'?"),
        ({"role": "user", "content": "x", "weight": 0}, "messages[0].weight", "; known: "),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "txt": 1}]},
            "messages[0].content[0].txt",
            "; did you mean 'text'?",
        ),
    ],
)
async def test_an_unknown_field_of_a_message_is_refused_with_the_nearest(kit, chat, message, param, near):
    service = kit.Service(kit.HELLO)
    async with kit.client(service) as client:
        error = (await client.post(URL, json=chat(messages=[message]))).json()["error"]
    assert (error["param"], error["code"], service.tasks) == (param, "unknown_parameter", [])
    assert error["message"].startswith(f"unknown parameter {param!r}{near}")


async def test_what_answers_carry_may_be_sent_back(kit, chat):
    """Messages of OpenAI's client and of others, as ``model_dump()`` gives them."""
    openai = {"refusal": None, "annotations": [], "audio": {"id": "a"}, "function_call": None, "tool_calls": None}
    others = {
        "reasoning": "so",
        "reasoning_content": "so",
        "reasoning_details": [{"type": "reasoning.text"}],
        "provider_specific_fields": {},
        "parsed": {"x": 1},
    }
    turn = {"role": "assistant", "content": "Hello", **openai, **others}
    service = kit.Service(kit.HELLO)
    async with kit.client(service) as client:
        answer = (await client.post(URL, json=chat())).json()["choices"][0]["message"]
        reply = await client.post(URL, json=chat(messages=[turn, answer, {"role": "user", "content": "x"}]))
    assert reply.status_code == 200, reply.text
    assert service.tasks[-1].messages[0].content == (Text("Hello"),)


async def test_unknown_query_parameters_are_ignored(kit, chat):
    async with kit.client(kit.Service(kit.HELLO)) as client:
        for route, body in ((URL, chat()), ("/generate", {"text": "x"})):
            assert (await client.post(f"{route}?api-version=2&x", json=body)).status_code == 200


def picture(kind: str = "PNG") -> str:
    out = io.BytesIO()
    Pillow.new("RGB", (4, 3), (255, 0, 0)).save(out, kind)
    return base64.b64encode(out.getvalue()).decode()


@pytest.mark.parametrize("bare", [False, True])
async def test_every_choice_sees_the_image_in_its_place(kit, chat, bare):
    url = f"data:image/png;base64,{picture()}"
    content = [
        {"type": "text", "text": "before"},
        {"type": "image_url", "image_url": url if bare else {"url": url, "detail": "low"}},
        {"type": "text", "text": "after"},
    ]
    service = kit.Service(kit.HELLO)
    async with kit.client(service) as client:
        reply = await client.post(URL, json=chat(messages=[{"role": "user", "content": content}], n=3))
    assert reply.status_code == 200
    assert len(service.tasks) == 3
    for task in service.tasks:
        before, image, after = task.messages[0].content
        assert (before, after) == (Text("before"), Text("after"))
        assert image.pixels.shape == (3, 4, 3)
        assert image.pixels[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/x.png"}}, "url_not_allowed"),
        ({"type": "image_url", "image_url": {"uri": "x"}}, "unknown_parameter"),
        ({"type": "image_url", "image_url": f"data:image/jpeg;base64,{picture('JPEG')[:400]}"}, "invalid_image"),
        (
            {"type": "input_audio", "input_audio": {"data": "UklGRiYAAABXQVZFanVuaw=="}},
            "invalid_audio",
        ),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "invalid_value"),
    ],
)
async def test_a_bad_media_part_is_a_400_that_names_it(kit, chat, part, code):
    async with kit.client(kit.Service(kit.HELLO)) as client:
        reply = await client.post(URL, json=chat(messages=[{"role": "user", "content": [part]}]))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)
    assert reply.json()["error"]["param"].startswith(f"messages[0].content[0].{part['type']}")


async def test_limits_on_messages_and_text(kit, chat):
    async with kit.client(kit.Service(kit.HELLO), max_messages=2, max_text_chars=10) as client:
        turn = {"role": "user", "content": "123456"}
        assert (await client.post(URL, json=chat(messages=[turn]))).status_code == 200
        many = (await client.post(URL, json=chat(messages=[turn] * 3))).json()["error"]
        long = (await client.post(URL, json=chat(messages=[turn] * 2))).json()["error"]
    assert (many["code"], long["code"]) == ("too_many_messages", "text_too_long")
    assert "limit of 2" in many["message"]
    assert "limit of 10" in long["message"]


async def test_unknown_model_and_wrong_route(kit, chat):
    robot = kit.Service(key="robot", abilities=("generate",))
    async with kit.client(kit.Service(kit.HELLO), robot) as client:
        unknown = await client.post(URL, json=chat(model="tinny"))
        wrong = await client.post(URL, json=chat(model="robot"))
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "did you mean 'tiny'" in unknown.json()["error"]["message"]
    assert wrong.status_code == 400
    assert "use /generate" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late", [False, True])
async def test_a_refusal_keeps_its_status_even_when_it_comes_from_the_engine(kit, chat, stream, late):
    service = kit.Service()
    for error, status, retry in ((TooBusy("full", retry_after=2.5), 429, "3"), (NotReady("later"), 503, "5")):
        service.script, service.refuse = ([error], None) if late else ((), error)
        async with kit.client(service) as client:
            reply = await client.post(URL, json=chat(stream=stream))
        assert (reply.status_code, reply.headers["retry-after"]) == (status, retry)
        assert reply.json()["error"]["message"] == str(error)


async def test_one_failed_choice_ends_the_request_and_cancels_the_others(kit, chat):
    service = kit.Service()
    service.script = lambda number: [RequestError("bad luck")] if number == 1 else [asyncio.Event()]
    async with kit.client(service) as client:
        for stream in (False, True):
            reply = await client.post(URL, json=chat(n=2, stream=stream))
            assert reply.status_code == 400
            assert service.answers[0].reason == "cancelled"
            service.answers.clear()


async def test_an_error_after_the_first_byte_is_a_typed_event_and_the_end(kit, chat):
    service = kit.Service(
        [*kit.HELLO, RequestError("worker died", code="worker_died", status=503, type="server_error")]
    )
    async with kit.client(service) as client:
        reply = await client.post(URL, json=chat(stream=True))
    assert reply.status_code == 200
    last = json.loads(events(reply.text)[-1])
    said = {"message": "worker died", "type": "server_error", "param": None, "code": "worker_died"}
    assert last == {"type": "error", "status": 503, "error": said}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_a_500_whose_id_is_in_the_log(kit, chat, caplog, stream):
    service = kit.Service([ZeroDivisionError("oops")])
    with caplog.at_level(logging.ERROR):
        async with kit.client(service) as client:
            reply = await client.post(URL, json=chat(stream=stream))
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (500, "server_error")
    (record,) = caplog.records
    assert record.args[0] in error["message"]
    assert "oops" not in error["message"]
    assert record.exc_info[0] is ZeroDivisionError


async def test_a_silent_stream_is_kept_alive_with_empty_chunks(kit, chat):
    release = asyncio.Event()
    service = kit.Service([release, *kit.HELLO])
    async with kit.client(service, keepalive_s=0.01) as client:
        request = asyncio.create_task(client.post(URL, json=chat(stream=True)))
        await asyncio.sleep(0.5)  # the first request to an application takes a while
        release.set()
        parts = chunks((await request).text)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:3] == [{"content": ""}, {"content": ""}]
    assert "".join(d.get("content", "") for d in deltas) == "Hello 🙂"


class Shouting(ChatAdapter):
    """What a family would register: it refuses nothing that the server's own takes, and adds a stop string."""

    def tasks(self, body, media):
        return [dataclasses.replace(task, stop=("!",)) for task in super().tasks(body, media)]


class Family:
    @hookimpl
    def mstar_openai(self, spec):
        return {"chat": "family_of_the_test:Shouting"} if spec.key == "tiny" else {}


async def test_a_familys_adapter_wins_over_the_servers(kit, chat, monkeypatch):
    module = types.ModuleType("family_of_the_test")
    module.Shouting = Shouting
    monkeypatch.setitem(sys.modules, module.__name__, module)
    service, other = kit.Service(kit.HELLO), kit.Service(kit.HELLO, key="other")
    async with kit.client(service, other, hooks=kit.Hooks(Family())) as client:
        assert (await client.post(URL, json=chat())).status_code == 200
        assert (await client.post(URL, json=chat(model="other"))).status_code == 200
    assert (service.tasks[0].stop, other.tasks[0].stop) == (("!",), ())


async def test_more_choices_than_can_ever_run_are_refused(kit, chat):
    service = kit.Service(kit.HELLO)
    service.limits = {"max_concurrent_requests": 2, "max_queue": 1}
    async with kit.client(service) as client:
        reply = await client.post(URL, json=chat(n=4))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")
        assert "at most 3" in reply.json()["error"]["message"]
        assert (await client.post(URL, json=chat(n=3))).status_code == 200

"""``/generate/ws`` on a real server: many requests on one socket, live input, everything that can go wrong."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from mstar.spec.errors import RequestError, TooBusy
from mstar.spec.processor import AudioDelta, FramesDelta, TextDelta

LIMIT_S = 5.0


class Talk:
    """A client's end of the socket that speaks JSON."""

    def __init__(self, socket):
        self.socket = socket

    async def say(self, **message) -> None:
        await self.socket.send(json.dumps(message))

    async def hear(self) -> dict:
        async with asyncio.timeout(LIMIT_S):
            return json.loads(await self.socket.recv())

    async def hear_until_end(self, request: str) -> list[dict]:
        """Events up to the end of *request*."""
        heard = [await self.hear()]
        while heard[-1].get("id") != request or heard[-1]["type"] == "delta":
            heard.append(await self.hear())
        return heard


@pytest.fixture
def talk(kit):
    @contextlib.asynccontextmanager
    async def open_socket(*services, headers=None, **options):
        async with (
            kit.server(*services, **options) as address,
            connect(f"ws://{address}/generate/ws", additional_headers=headers, max_size=None) as socket,
        ):
            yield Talk(socket)

    return open_socket


async def until(condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_request_answers_with_the_objects_of_the_json_lines(kit, talk):
    pixels = np.zeros((1, 2, 2, 3), np.uint8)
    script = [
        TextDelta("a", (1,)),
        AudioDelta(np.zeros(2, np.float32), 8000),
        FramesDelta(pixels),
        TextDelta("b", (2,)),
    ]
    service = kit.Service(script)
    async with talk(service) as client:
        await client.say(id="r1", text="hi", model_kwargs={"steps": 2}, output_modalities=["text"])
        *deltas, done = await client.hear_until_end("r1")
    assert [(d["id"], d["type"], d["modality"], d["index"]) for d in deltas] == [
        ("r1", "delta", "text", 0),
        ("r1", "delta", "audio", 0),
        ("r1", "delta", "image", 0),
        ("r1", "delta", "text", 1),
    ]
    assert (done["type"], done["finish_reason"], done["usage"]["completion_tokens"]) == ("done", "stop", 2)
    assert (service.tasks[0].text, service.tasks[0].knobs.steps, service.tasks[0].live) == ("hi", 2, ())


async def test_an_id_is_given_when_the_client_gives_none(kit, talk):
    async with talk(kit.Service(kit.HELLO)) as client:
        await client.say(text="hi")
        assert (await client.hear())["id"].startswith("gen-")


async def test_a_live_request_hears_appends_in_order_while_others_run(kit, talk):
    service = kit.Service()
    service.script = lambda number: ["echo"] if number < 2 else kit.HELLO
    two = np.asarray([[5, 6]], np.int16)
    async with talk(service) as client:
        await client.say(id="a", live=["audio"], append={"audio": [1, 2]})
        assert (await client.hear())["data"] == [2.0, 4.0]
        await client.say(id="b", live=["x", "y"])
        packed = base64.b64encode(two.tobytes()).decode()
        await client.say(id="b", append={"y": {"data": packed, "dtype": "int16", "shape": [1, 2]}})
        heard = await client.hear()
        assert (heard["id"], heard["stream"], heard["data"], heard["dtype"]) == ("b", "y", [[10, 12]], "int16")
        await client.say(id="c", text="plain")
        assert "".join(e.get("text", "") for e in await client.hear_until_end("c")) == "Hello 🙂"
        await client.say(id="a", append={"audio": "four"})
        assert (await client.hear())["data"] == [4]
        for number in range(5):
            await client.say(id="a", append={"audio": [number]})
        await client.say(id="a", end_input=True)
        *deltas, done = await client.hear_until_end("a")
        assert [d["data"] for d in deltas] == [[2.0 * n] for n in range(5)]
        assert done["finish_reason"] == "stop"
        await client.say(id="b", end_input="x")
        assert (await client.hear_until_end("b"))[-1]["type"] == "done"


async def test_an_opening_message_may_end_its_own_input(kit, talk):
    async with talk(kit.Service(["echo"])) as client:
        await client.say(id="a", live=["audio"], append={"audio": [1]}, end_input=True)
        first, done = await client.hear_until_end("a")
    assert (first["data"], done["type"]) == ([2.0], "done")


async def test_cancel_ends_one_request_and_its_id_is_free_again(kit, talk):
    service = kit.Service()
    service.script = lambda number: kit.HELLO if number == 2 else [asyncio.Event()]
    async with talk(service) as client:
        await client.say(id="a", text="x")
        await client.say(id="b", text="x")
        await until(lambda: len(service.answers) == 2)
        await client.say(id="a", cancel=True)
        done = await client.hear()
        assert (done["id"], done["type"], done["finish_reason"]) == ("a", "done", "cancelled")
        assert [answer.cancelled.is_set() for answer in service.answers] == [True, False]
        await client.say(id="a", text="again")
        assert (await client.hear_until_end("a"))[-1]["finish_reason"] == "stop"


async def test_a_cancel_right_behind_its_request_is_heard(kit, talk):
    async with talk(kit.Service([asyncio.Event()])) as client:
        for number in range(20):
            await client.say(id=str(number), text="x")
            await client.say(id=str(number), cancel=True)
            done = await client.hear()
            assert (done["id"], done["finish_reason"]) == (str(number), "cancelled")


async def test_closing_the_socket_cancels_everything(kit, talk):
    service = kit.Service()
    service.script = lambda number: [["echo"], [asyncio.Event()], [TextDelta("x" * 100_000, (1,))] * 5000][number]
    async with talk(service) as client:
        for name in "abc":
            await client.say(id=name, live=["s"])
        await until(lambda: len(service.answers) == 3 and service.answers[2].said > 10)
        client.socket.transport.abort()
        await until(lambda: all(answer.cancelled.is_set() for answer in service.answers))
        assert service.answers[2].said < 5000


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({"id": "e", "txt": "x"}, "txt", "unknown_parameter"),
        ({"id": "e", "model": "tinny"}, "model", "model_not_found"),
        ({"id": "e", "model_kwargs": {"steps": 0}}, "model_kwargs.steps", "invalid_value"),
        ({"id": "e", "text": "x", "live": "audio"}, "live", "invalid_value"),
        ({"id": "e", "text": "x", "append": {"audio": [1]}}, "append.audio", "unknown_stream"),
        (
            {"id": "e", "live": ["a"], "append": {"a": {"data": [1], "dtype": "flat32"}}},
            "append.a.dtype",
            "invalid_value",
        ),
        ({"id": "e", "live": ["a"], "append": {"a": {"data": "AAA", "shape": [1]}}}, "append.a", "invalid_base64"),
        ({"id": "e", "live": ["a"], "append": {"a": {"data": [1], "shape": [2]}}}, "append.a", "invalid_value"),
        ({"id": "e", "append": {"audio": [1]}}, "id", "unknown_request"),
        ({"id": "e", "cancel": True}, "id", "unknown_request"),
    ],
)
async def test_a_bad_message_is_an_error_event_and_the_socket_lives(kit, talk, message, param, code):
    async with talk(kit.Service(["echo"])) as client:
        await client.say(**message)
        error = await client.hear()
        assert (error["id"], error["type"], error["error"]["param"], error["error"]["code"]) == (
            "e",
            "error",
            param,
            code,
        )
        await client.say(id="f", live=["s"], append={"s": [1]})
        assert (await client.hear())["data"] == [2.0]


@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        ({"seed": 1}, "seed", "'seed' is a knob of 'tiny': put it in model_kwargs"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'? That is a knob: put it in model_kwargs"),
        ({"apend": {}}, "apend", "unknown parameter 'apend'; did you mean 'append'?"),
        ({"streaming": True}, "streaming", "unknown parameter 'streaming'"),
        ({"model_kwargs": {"stepps": 1}}, "model_kwargs.stepps", "did you mean 'steps'?"),
    ],
)
async def test_a_knob_in_the_wrong_place_or_unknown(kit, talk, message, param, said):
    async with talk(kit.Service(kit.HELLO)) as client:
        await client.say(id="e", text="x", **message)
        error = (await client.hear())["error"]
    assert (error["param"], error["code"]) == (param, "unknown_parameter")
    assert said in error["message"]


async def test_frames_that_are_no_message(kit, talk):
    async with talk(kit.Service(kit.HELLO), max_socket_message_bytes=1000) as client:
        for frame, code in (
            ("{", "invalid_json"),
            ("[1]", "invalid_json"),
            ('{"id": 3, "text": "x"}', None),
            ('{"id": "\\ud800", "text": "x"}', None),
            (json.dumps({"text": "x" * 1000}), "too_large"),
        ):
            await client.socket.send(frame)
            event = await client.hear()
            assert event["type"] == "error"
            assert event["error"]["code"] == (code or "invalid_value")
        await client.say(id="a", text="x")
        assert (await client.hear_until_end("a"))[-1]["type"] == "done"


async def test_errors_of_the_engine_and_bugs_are_events(kit, talk, caplog):
    service = kit.Service()
    faults = [RequestError("no", code="nope"), ZeroDivisionError("secret"), TooBusy("full")]
    service.script = lambda number: [TextDelta("a", (1,)), faults[number]]
    async with talk(service) as client:
        for code in ("nope", "internal_error", "queue_full"):
            await client.say(id="a", text="x")
            delta, error = await client.hear_until_end("a")
            assert (delta["text"], error["error"]["code"]) == ("a", code)
            assert "secret" not in error["error"]["message"]


async def test_an_append_that_comes_after_the_end_does_not_spoil_the_answer(kit, talk):
    go = asyncio.Event()
    service = kit.Service([TextDelta("a", (1,)), go, TextDelta("b", (2,))])
    async with talk(service) as client:
        await client.say(id="a", live=["s"])
        assert (await client.hear())["text"] == "a"
        pushed = asyncio.Event()

        async def too_late(*arguments, **named):
            service.answers[0].finish_reason = "stop"
            pushed.set()
            raise RequestError("request has ended", code="request_ended", status=409)

        service.answers[0].push = too_late
        await client.say(id="a", append={"s": [1]})
        await pushed.wait()
        go.set()
        delta, done = await client.hear_until_end("a")
        assert (delta["text"], done["type"], done["finish_reason"]) == ("b", "done", "stop")


async def test_an_append_that_the_model_refuses_fails_its_request(kit, talk):
    service = kit.Service([asyncio.Event()])
    async with talk(service) as client:
        await client.say(id="a", live=["s"])
        await until(lambda: service.answers)

        async def refuse(*arguments, **named):
            raise RequestError("must be 16 kHz", code="invalid_value")

        service.answers[0].push = refuse
        await client.say(id="a", append={"s": [1]})
        error = await client.hear()
        assert (error["id"], error["error"]["message"]) == ("a", "must be 16 kHz")
        assert service.answers[0].cancelled.is_set()


async def test_limits_on_requests_and_waiting_appends(kit, talk):
    service = kit.Service([asyncio.Event()])
    async with talk(service, max_socket_requests=2, max_socket_appends=3) as client:
        for name in "abc":
            await client.say(id=name, live=["s"])
        error = await client.hear()
        assert (error["id"], error["error"]["code"]) == ("c", "too_many_requests")
        await until(lambda: len(service.answers) == 2)
        service.answers[0].push = lambda *a, **k: asyncio.Event().wait()
        for number in range(10):
            await client.say(id="a", append={"s": [number]})
        error = await client.hear()
        assert (error["id"], error["error"]["code"]) == ("a", "too_many_appends")
        assert service.answers[0].cancelled.is_set()
        assert not service.answers[1].cancelled.is_set()


async def test_the_key_is_wanted_before_the_socket_opens(kit, talk):
    with pytest.raises(InvalidStatus) as caught:
        async with talk(kit.Service(kit.HELLO), api_key="k"):
            raise AssertionError("the socket opened without a key")
    assert caught.value.response.status_code == 401
    async with talk(kit.Service(kit.HELLO), api_key="k", headers={"Authorization": "Bearer k"}) as client:
        await client.say(id="a", text="x")
        assert (await client.hear_until_end("a"))[-1]["type"] == "done"

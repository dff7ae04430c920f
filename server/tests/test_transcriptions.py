"""Transcriptions where the model's part is played by a script: order, errors, log-probabilities, clients that leave."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import io
import json
import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import soundfile

from mstar.spec.errors import RequestError, TooBusy
from mstar.spec.processor import SegmentDelta, TextDelta
from mstar.spec.request import TokenLogprob
from mstar.spec.tasks import Audio, TranscriptionTask
from mstar_server.exchange import current
from mstar_server.on_demand import Shelf
from mstar_server.options import ServerOptions

RATE = 8000


def clip(seconds: float = 4.0) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, np.full(int(seconds * RATE), 0.1), RATE, format="WAV")
    return out.getvalue()


def post(client: Any, data: bytes = b"", **fields: Any) -> Any:
    return client.post("/v1/audio/transcriptions", data=fields, files={"file": ("a.wav", data or clip())})


class InSeconds:
    """A processor whose windows are a second long."""

    def __init__(self, inner: Any):
        self.token_bytes = inner.token_bytes

    def windows(self, task: TranscriptionTask) -> Sequence[TranscriptionTask]:
        assert task.audio is not None
        pieces = np.split(np.asarray(task.audio.samples), range(RATE, len(task.audio.samples), RATE))
        return [replace(task, audio=Audio(p, RATE), offset=float(i)) for i, p in enumerate(pieces)]


def service(kit: Any, script: Any, **more: Any) -> Any:
    made = kit.Service(script, abilities=("transcription", "translation"), **more)
    made.processor = InSeconds(made.processor)
    return made


def events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]" or '"error"' in lines[-1]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_windows_run_at_once_and_are_told_in_order(kit: Any) -> None:
    gate = asyncio.Event()
    tiny = service(kit, lambda n: [gate, TextDelta("first")] if n == 0 else [TextDelta(f"later{n}")])
    async with kit.client(tiny) as client:
        asked = asyncio.create_task(post(client, stream="true"))
        while len(tiny.answers) < 4 or not all(a.finish_reason for a in tiny.answers[1:]):
            await asyncio.sleep(0.01)
        gate.set()
        said = events((await asked).text)
    assert [e["delta"] for e in said[:-1]] == ["first", " later1", " later2", " later3"]
    assert (said[-1]["type"], said[-1]["text"]) == ("transcript.text.done", "first later1 later2 later3")
    assert [task.offset for task in tiny.tasks] == [0.0, 1.0, 2.0, 3.0]


async def test_the_log_does_not_name_all_windows_of_a_long_clip(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mstar.server")
    tiny = service(kit, [TextDelta("x")])
    async with kit.client(tiny) as client:
        await post(client, clip(9.0))
    (line,) = [record.getMessage() for record in caplog.records if "transcriptions" in record.getMessage()]
    assert line.count("trsc-") == 4
    assert line.endswith("-8 (9 in all)")


async def test_no_more_windows_at_once_than_there_is_room_for(kit: Any) -> None:
    gate = asyncio.Event()
    tiny = service(kit, [gate, TextDelta("x")])
    tiny.limits = {"max_concurrent_requests": 2}
    async with kit.client(tiny) as client:
        asked = asyncio.create_task(post(client))
        while len(tiny.answers) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert len(tiny.answers) == 2
        gate.set()
        assert (await asked).json()["text"] == "x x x x"


async def test_a_busy_model_refuses_the_first_window_and_keeps_later_ones_waiting(kit: Any) -> None:
    busy = [TooBusy("full", retry_after=0.01)]
    tiny = service(kit, lambda n: busy if n in (1, 2, 5) else [TextDelta(str(n))])
    async with kit.client(tiny) as client:
        assert len((await post(client)).json()["text"].split()) == 4
        tiny.script = busy
        reply = await post(client, stream="true")
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")


def window(offset: float) -> TranscriptionTask:
    return TranscriptionTask(knobs=None, want=("text",), audio=Audio(np.zeros(RATE), RATE), offset=offset)


async def test_a_window_that_goes_on_with_another_waits_for_room_as_well(kit: Any) -> None:
    scripts = [[TextDelta("one"), window(1.0)], [TooBusy("full", retry_after=0.01)], [TextDelta("two")]]
    tiny = service(kit, lambda n: scripts[n])
    async with kit.client(tiny) as client:
        reply = await post(client, clip(1.0))
    assert (reply.status_code, reply.json()["text"]) == (200, "one two")


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_server_that_stops_lets_a_clip_end(kit: Any, stream: str) -> None:
    """Also the windows of it that have not begun."""
    gate = asyncio.Event()
    tiny = service(kit, lambda n: [TextDelta("one"), gate, window(1.0)] if n == 0 else [TextDelta("two")])
    async with kit.client(tiny) as client:
        asked = asyncio.create_task(post(client, clip(1.0), stream=stream))
        while not tiny.answers:
            await asyncio.sleep(0.01)
        draining = asyncio.create_task(tiny.drain(10))
        await asyncio.sleep(0)
        gate.set()
        text = (await asked).text
        assert "one two" in text, text
        assert await draining
        assert (await post(client)).status_code == 503
    assert tiny.holds == []


async def test_a_clip_that_is_cancelled_is_told_as_far_as_it_was_heard(kit: Any) -> None:
    scripts: list[Any] = [[TextDelta("one"), window(1.0)], [TextDelta("two"), asyncio.Event()]]
    tiny = service(kit, lambda n: scripts[n])
    async with kit.client(tiny) as client:
        asked = asyncio.create_task(client.post(
            "/v1/audio/transcriptions", files={"file": ("a.wav", clip(1.0))}, headers={"X-Request-ID": "mine"}
        ))  # fmt: skip
        while len(tiny.answers) < 2 or not tiny.answers[1].said:
            await asyncio.sleep(0.01)
        assert (await client.delete("/v1/requests/mine")).status_code == 200
        body = (await asked).json()
    assert (body["text"], body["finish_reason"], len(tiny.answers)) == ("one two", "cancelled", 2)
    assert tiny.holds == []


async def test_windows_that_have_not_begun_do_not_after_a_cancel(kit: Any) -> None:
    tiny = service(kit, lambda n: [TextDelta("one"), asyncio.Event()])
    tiny.limits = {"max_concurrent_requests": 1}
    async with kit.client(tiny) as client:
        asked = asyncio.create_task(client.post(
            "/v1/audio/transcriptions", files={"file": ("a.wav", clip())}, headers={"X-Request-ID": "mine"}
        ))  # fmt: skip
        while not tiny.answers or not tiny.answers[0].said:
            await asyncio.sleep(0.01)
        assert (await client.delete("/v1/requests/mine")).status_code == 200
        reply = await asked
    assert (reply.status_code, reply.json()["text"], reply.json()["finish_reason"]) == (200, "one", "cancelled")
    assert len(tiny.answers) == 1


async def test_a_model_on_demand_is_loaded_once_for_a_clip(kit: Any) -> None:
    """However long its processor looks at the clip before the first window."""
    made = []

    def make() -> Any:
        made.append(service(kit, [TextDelta("x")], key="a"))
        windows = made[-1].processor.windows

        def slow(task: TranscriptionTask) -> Sequence[TranscriptionTask]:
            time.sleep(0.3)
            return windows(task)

        made[-1].processor.windows = slow
        return made[-1]

    options = ServerOptions(idle_unload_s=0.0)
    model = Shelf(options).add(kit.make_spec(key="a", abilities=("transcription",)), make)
    async with kit.client(model, idle_unload_s=0.0) as client:
        assert (await post(client)).json()["text"] == "x x x x"
    await model.stop()
    assert len(made) == 1


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_request_is_let_go_when_it_has_ended(kit: Any, stream: str) -> None:
    """Its samples are memory that the garbage collector knows nothing of: it must not be needed."""
    tiny, requests, contexts = service(kit, [TextDelta("x")]), [], []

    async def watched(*arguments: Any, generate: Any = tiny.generate) -> Any:
        requests.append(weakref.ref(current()))
        contexts.append((current().answers, contextvars.copy_context()))  # as a connection's timer has it
        return await generate(*arguments)

    tiny.generate = watched
    async with kit.client(tiny) as client:
        gc.collect()
        gc.disable()
        try:
            await post(client, stream=stream)
            assert [answers for answers, _ in contexts] == [{}] * 4
            contexts.clear()
            await asyncio.sleep(0.05)
            assert [ref() for ref in requests] == [None] * 4
        finally:
            gc.enable()


async def test_an_error_has_its_status_until_something_was_said(kit: Any) -> None:
    wrong = RequestError("too odd", param="file")
    tiny = service(kit, lambda n: [wrong] if n == 0 else [TextDelta("x")])
    async with kit.client(tiny) as client:
        for stream in ("false", "true"):
            tiny.answers.clear()
            reply = await post(client, stream=stream)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "file")
        tiny.answers.clear()
        tiny.script = lambda n: [wrong] if n == 2 else [TextDelta("x")]
        said = events((await post(client, stream="true")).text)
        assert [e["type"] for e in said] == ["transcript.text.delta", "transcript.text.delta", "error"]
        assert said[-1]["error"]["param"] == "file"
        tiny.answers.clear()
        assert (await post(client)).status_code == 400
    assert all(answer.finish_reason for answer in tiny.answers if answer.said)


async def test_the_end_of_a_window_that_the_model_left_out_is_heard_again(kit: Any) -> None:
    rest = TranscriptionTask(knobs=None, want=("text",), audio=Audio(np.zeros(RATE), RATE), offset=0.4)
    scripts = [
        [TextDelta("one"), SegmentDelta(0.0, 0.4, "one"), rest],
        [TextDelta("two"), SegmentDelta(0.0, 0.6, "two")],
    ]
    tiny = service(kit, lambda n: scripts[n])
    async with kit.client(tiny) as client:
        body = (await post(client, clip(1.0), response_format="verbose_json")).json()
    assert body["text"] == "one two"
    assert [(s["start"], s["end"]) for s in body["segments"]] == [(0.0, 0.4), (0.4, 1.0)]
    assert [task.offset for task in tiny.tasks] == [0.0, 0.4]


async def test_a_window_may_be_heard_again_instead(kit: Any) -> None:
    """Nothing that the first attempt was, its finish reason included, is seen of it."""
    again = TranscriptionTask(knobs=None, want=("text",), audio=Audio(np.zeros(RATE), RATE))
    tiny = service(kit, lambda n: [again] if n < 2 else [TextDelta("third")])

    async def cut_short(*arguments: Any, generate: Any = tiny.generate) -> Any:
        answer = await generate(*arguments)
        answer.reason = "length" if len(tiny.answers) < 3 else None
        return answer

    tiny.generate = cut_short
    async with kit.client(tiny) as client:
        body = (await post(client, clip(1.0))).json()
        assert (body["text"], "finish_reason" in body) == ("third", False)
        assert len({name for name, _ in tiny.ids}) == 3
        tiny.answers.clear()
        tiny.script = [again]
        assert (await post(client, clip(1.0))).status_code == 500  # it never goes on
        assert len(tiny.answers) == 16


async def test_an_answer_that_ended_at_its_limit_says_so(kit: Any) -> None:
    tiny = service(kit, [TextDelta("cut")])

    async def cut_short(*arguments: Any, generate: Any = tiny.generate) -> Any:
        answer = await generate(*arguments)
        answer.reason = "length"
        return answer

    tiny.generate = cut_short
    async with kit.client(tiny) as client:
        assert (await post(client, clip(1.0))).json()["finish_reason"] == "length"
        assert events((await post(client, clip(1.0), stream="true")).text)[-1]["finish_reason"] == "length"


async def test_a_window_cut_short_whose_rest_is_heard_again_lacks_nothing(kit: Any) -> None:
    rest = TranscriptionTask(knobs=None, want=("text",), audio=Audio(np.zeros(RATE // 2), RATE), offset=0.5)
    tiny = service(kit, lambda n: [TextDelta("one"), rest] if n == 0 else [TextDelta("two")])

    async def cut_short(*arguments: Any, generate: Any = tiny.generate) -> Any:
        answer = await generate(*arguments)
        answer.reason = "length" if len(tiny.answers) == 1 else None
        return answer

    tiny.generate = cut_short
    async with kit.client(tiny) as client:
        body = (await post(client, clip(1.0))).json()
    assert (body["text"], "finish_reason" in body) == ("one two", False)


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_clip_without_windows_is_empty(kit: Any, stream: str) -> None:
    """A processor may find that nobody speaks."""
    tiny = service(kit, [TextDelta("you")])
    tiny.processor.windows = lambda task: ()
    async with kit.client(tiny) as client:
        reply = await post(client, stream=stream)
        if stream == "true":
            assert [(e["type"], e["text"]) for e in events(reply.text)] == [("transcript.text.done", "")]
        else:
            assert reply.json() == {"text": "", "usage": {"type": "duration", "seconds": 4.0}}
    assert not tiny.tasks


LOGPROBS = (TokenLogprob(token=1, logprob=-0.5), TokenLogprob(token=2, logprob=-1.5))


async def test_log_probabilities(kit: Any) -> None:
    tiny = service(kit, [TextDelta("Hel", (1,), LOGPROBS[:1]), TextDelta("lo", (2,), LOGPROBS[1:])])
    expected = [
        {"token": "Hel", "bytes": [72, 101, 108], "logprob": -0.5},
        {"token": "lo", "bytes": [108, 111], "logprob": -1.5},
    ]
    async with kit.client(tiny) as client:
        ask = {"include[]": "logprobs"}
        assert (await post(client, clip(1.0), **ask)).json()["logprobs"] == expected
        said = events((await post(client, clip(1.0), stream="true", **ask)).text)
        assert [e["logprobs"] for e in said] == [expected[:1], expected[1:], expected]
        assert tiny.tasks[0].logprobs == 0
        assert "logprobs" not in (await post(client, clip(1.0))).json()


async def test_fields_reach_the_task(kit: Any) -> None:
    tiny = service(kit, [TextDelta("x")])
    async with kit.client(tiny) as client:
        await post(client, clip(1.0), language="de", prompt="Namen", steps="7", temperature="0.5", top_k="3")
        await post(client, clip(1.0), chunking_strategy="auto")
        reply = await post(client, clip(1.0), steps="51")
        assert reply.json()["error"]["param"] == "steps"
        await client.post("/v1/audio/translations", data={"prompt": "x"}, files={"file": ("a.wav", clip(1.0))})
        streamed = await client.post(
            "/v1/audio/translations", data={"stream": "true"}, files={"file": ("a.wav", clip(1.0))}
        )
        assert streamed.json()["error"]["param"] == "stream"
    task, cut, other = tiny.tasks
    assert (task.chunked, cut.chunked, other.chunked) == (False, True, False)
    assert (task.language, task.prompt, task.translate) == ("de", "Namen", False)
    assert (task.knobs.steps, task.knobs.temperature, task.knobs.top_k) == (7, 0.5, 3)
    assert (other.translate, other.language) == (True, None)


async def test_a_greedy_model_takes_no_other_temperature(kit: Any) -> None:
    from mstar.spec.knobs import Knobs

    tiny = service(kit, [TextDelta("x")], knobs=Knobs)
    async with kit.client(tiny) as client:
        assert (await post(client, clip(1.0), temperature="0")).status_code == 200
        reply = await post(client, clip(1.0), temperature="0.7")
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_parameter")


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_client_that_leaves_ends_every_window(kit: Any, stream: str) -> None:
    tiny = service(kit, lambda n: [TextDelta("x"), asyncio.Event()])
    async with kit.server(tiny) as address:
        import httpx

        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
            asked = asyncio.create_task(post(client, stream=stream))
            async with asyncio.timeout(30):
                while len(tiny.answers) < 4:
                    await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            async with asyncio.timeout(10):
                await asyncio.gather(*(answer.cancelled.wait() for answer in tiny.answers))
    assert len(tiny.answers) == 4


async def test_a_file_over_the_limit(kit: Any) -> None:
    tiny = service(kit, [TextDelta("x")])
    async with kit.client(tiny, max_file_bytes=20_000) as client:
        reply = await post(client)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "file_too_large")
        assert "20000" in reply.json()["error"]["message"]
    async with kit.client(tiny, max_body_bytes=20_000) as client:
        reply = await post(client)
        assert reply.status_code == 413
        assert "20000" in reply.json()["error"]["message"]
    assert not tiny.tasks

"""Speech from a scripted model: what goes wrong while it is made, and pieces that follow one another."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from pydantic import Field

from mstar.spec.errors import NotReady, RequestError, TooBusy
from mstar.spec.knobs import Knobs
from mstar.spec.processor import AudioDelta
from mstar_server import spoken
from mstar_server.spoken import Spoken

TONE = AudioDelta(np.full(800, 0.25, np.float32), 8000)
PCM = np.full(800, 8192, "<i2").tobytes()


class SpeechKnobs(Knobs):
    speed: float = Field(1.0, ge=0.5, le=2, description="Of the speech.")


@pytest.fixture
def speaking(kit: Any) -> Callable[..., Any]:
    """Makes a model that speaks by a script, which may depend on the request's number."""

    def make(script: Sequence[Any] | Callable[[int], Sequence[Any]] = (TONE,), **spec: Any) -> Any:
        return kit.Service(script, **{"abilities": ("speech",), "knobs": SpeechKnobs, **spec})

    return make


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "hi", "response_format": "pcm", **changes}


async def ask(kit: Any, service: Any, **changes: Any) -> httpx.Response:
    async with kit.client(service) as client:
        return await client.post("/v1/audio/speech", json=body(**changes))


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


# --- ends and errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"stream": False}, {"stream_format": "sse"}])
@pytest.mark.parametrize(
    ("error", "status"),
    [(TooBusy("full"), 429), (NotReady("gone"), 503), (RequestError("no", param="input"), 400), (ValueError("x"), 500)],
)
async def test_errors_before_the_first_sound_have_their_status(
    kit: Any, speaking: Any, error: Exception, status: int, how: dict[str, Any]
) -> None:
    assert (await ask(kit, speaking([error]), **how)).status_code == status
    service = speaking()
    service.refuse = error
    assert (await ask(kit, service, **how)).status_code == status


@pytest.mark.parametrize("name", ["pcm", "mp3", "wav"])
async def test_an_error_after_it_breaks_the_connection(
    kit: Any, speaking: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody takes half of the sound for all of it; the log has one line for it."""
    service = speaking([TONE, TONE, RequestError("lost", status=500)])
    async with kit.server(service) as address, httpx.AsyncClient(base_url=f"http://{address}") as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/audio/speech", json=body(response_format=name, stream=True))
        assert (await client.get("/v1/models")).status_code == 200
    (said,) = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert said.getMessage() == "the answer was broken off: lost"
    assert said.exc_info is None


async def test_a_bug_after_it_breaks_the_connection_and_has_its_traceback(
    kit: Any, speaking: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service = speaking([TONE, TONE, ValueError("a bug")])
    async with kit.server(service) as address, httpx.AsyncClient(base_url=f"http://{address}") as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/audio/speech", json=body(stream=True))
    assert any(record.exc_info is not None and "a bug" in str(record.exc_info[1]) for record in caplog.records)


async def test_an_error_after_it_is_the_last_event(kit: Any, speaking: Any) -> None:
    reply = await ask(kit, speaking([TONE, RequestError("lost", status=500)]), stream_format="sse")
    sound, error = lines(reply.text)
    assert base64.b64decode(sound["audio"]) == PCM
    assert (error["type"], error["error"]["message"]) == ("error", "lost")


@pytest.mark.parametrize("how", [{}, {"stream": False}, {"stream_format": "sse"}, {"input": "a|b"}])
async def test_no_sound_at_all_is_no_empty_file(kit: Any, speaking: Any, how: dict[str, Any]) -> None:
    reply = await ask(kit, speaking([AudioDelta(np.zeros(0, np.float32), 8000)]), **how)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "nothing_to_speak")


@pytest.mark.parametrize("how", [{}, {"stream": False}, {"stream_format": "sse"}, {"input": "a|b"}])
async def test_who_cancels_before_the_first_sound_is_told_so(kit: Any, speaking: Any, how: dict[str, Any]) -> None:
    service = speaking([asyncio.Event()])
    async with kit.client(service) as client:
        asked = client.post("/v1/audio/speech", json=body(**how), headers={"X-Request-ID": "mine"})
        asking = asyncio.create_task(asked)
        await until(lambda: bool(service.answers))
        assert (await client.delete("/v1/requests/mine")).status_code == 200
        reply = await asking
    assert (reply.status_code, reply.json()["error"]["code"]) == (499, "request_cancelled")


async def test_silence_of_the_model_is_kept_alive(kit: Any, speaking: Any) -> None:
    gate = asyncio.Event()
    service = speaking([TONE, gate, TONE])
    async with kit.client(service, keepalive_s=0.02) as client:
        asking = asyncio.create_task(client.post("/v1/audio/speech", json=body(stream_format="sse")))
        await until(lambda: bool(service.answers) and service.answers[0].said == 1)
        await asyncio.sleep(0.1)
        gate.set()
        events = lines((await asking).text)
    assert events[1] == {"type": "speech.audio.delta", "audio": ""}
    assert b"".join(base64.b64decode(event.get("audio", "")) for event in events) == 2 * PCM


async def test_stereo_is_told_and_kept(kit: Any, speaking: Any) -> None:
    both = AudioDelta(np.tile(np.array([[0.5, -0.5]], np.float32), (100, 1)), 16_000)
    reply = await ask(kit, speaking([both]))
    assert (reply.headers["x-sample-rate"], reply.headers["x-audio-channels"]) == ("16000", "2")
    assert reply.headers["content-type"] == "audio/pcm;rate=16000;channels=2"
    whole = await ask(kit, speaking([both]), response_format="flac")
    samples, rate = soundfile.read(io.BytesIO(whole.content))
    assert (samples.shape, rate) == ((100, 2), 16_000)


async def test_a_rate_that_changes_is_an_error_not_noise(kit: Any, speaking: Any) -> None:
    other = AudioDelta(TONE.samples, 16_000)
    assert (await ask(kit, speaking([TONE, other]), stream=False)).status_code == 500
    *_, last = lines((await ask(kit, speaking([TONE, other]), stream_format="sse")).text)
    assert last["type"] == "error"


async def test_a_client_that_leaves_cancels_what_runs(kit: Any, speaking: Any) -> None:
    """Whole or streamed, before and after the first sound."""
    for script in ([asyncio.Event()], [TONE, asyncio.Event()]):
        for how in ({}, {"stream": False}, {"stream_format": "sse"}):
            service = speaking(script)
            async with kit.server(service) as address, httpx.AsyncClient(base_url=f"http://{address}") as client:
                asked = asyncio.create_task(client.post("/v1/audio/speech", json=body(input="a|b", **how), timeout=60))
                pieces = 1 if len(script) == 1 else 2
                await until(lambda s=service, n=pieces: len(s.answers) == n and s.answers[0].said == n - 1)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                await until(lambda s=service: all(answer.reason == "cancelled" for answer in s.answers))
            assert len(service.answers) == (1 if len(script) == 1 else 2)


# --- pieces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [None, 0, 1, 3])
async def test_the_next_pieces_begin_with_the_first_sound_of_this_one(kit: Any, speaking: Any, ahead: Any) -> None:
    starts, ends = [asyncio.Event() for _ in range(5)], [asyncio.Event() for _ in range(5)]
    service = speaking(lambda number: [starts[number], TONE, ends[number], TONE])
    options, beside = ({}, 2) if ahead is None else ({"speech_ahead": ahead}, ahead)

    async def begun(count: int) -> None:
        await until(lambda: len(service.answers) >= count)
        await asyncio.sleep(0.02)
        assert len(service.answers) == count

    async with kit.client(service, **options) as client:
        asking = asyncio.create_task(client.post("/v1/audio/speech", json=body(input="a|b|c|d|e")))
        for number in range(5):
            await begun(min(5, number + max(beside, 1)) if number else 1)
            starts[number].set()
            await begun(min(5, number + 1 + beside))
            ends[number].set()
        reply = await asking
    assert reply.content == 10 * PCM
    assert [task.text for task in service.tasks] == ["a", "b", "c", "d", "e"]
    assert len({name for name, _ in service.ids}) == 5


@pytest.mark.parametrize(("places", "others", "begun"), [(1, 0, 2), (4, 0, 2), (5, 0, 3), (8, 1, 3), (8, 2, 2)])
async def test_the_piece_after_the_next_takes_no_place_that_others_may_want(
    kit: Any, speaking: Any, places: int, others: int, begun: int
) -> None:
    """The next one is handed in always: else there might be a gap."""
    gate = asyncio.Event()
    service = speaking(lambda number: [TONE, gate])
    service.limits = {"max_concurrent_requests": places}
    taken = [service.answer(object(), None, None) for _ in range(others)]
    async with kit.client(service) as client:
        asking = asyncio.create_task(client.post("/v1/audio/speech", json=body(input="a|b|c|d")))
        await until(lambda: len(service.answers) >= others + begun)
        await asyncio.sleep(0.02)
        assert len(service.answers) == others + begun
        gate.set()
        for answer in taken:
            answer.finish_reason = "stop"
        assert (await asking).content == 4 * PCM


async def test_of_thousands_of_pieces_only_the_nearest_are_there(
    kit: Any, speaking: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Later ones are not begun, and of those that have been heard the request knows the names alone."""
    service, alive, most = speaking(), weakref.WeakSet[Any](), 0
    make = service.answer

    def made(*arguments: Any) -> Any:
        nonlocal most
        answer = make(*arguments)
        service.answers.clear()
        alive.add(answer)
        most = max(most, len(alive))
        return answer

    monkeypatch.setattr(service, "answer", made)
    with caplog.at_level("INFO", "mstar.server"):
        assert (await ask(kit, service, input="|".join("a" * 1500))).content == 1500 * PCM
    assert len(service.tasks) == 1500
    assert 2 <= most <= 4  # the one that has just ended may be there
    (line,) = [record.getMessage() for record in caplog.records if "/v1/audio/speech" in record.getMessage()]
    assert line.endswith("-1499 (1500 in all)")


async def test_a_piece_waits_while_the_queue_is_full(kit: Any, speaking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service, refused = speaking(), []
    generate = service.generate

    async def sometimes(task: Any, *arguments: Any) -> Any:
        if task.text == "b" and len(refused) < 2:
            refused.append(task)
            raise TooBusy("full", retry_after=0.01)
        return await generate(task, *arguments)

    monkeypatch.setattr(service, "generate", sometimes)
    assert (await ask(kit, service, input="a|b|c")).content == 3 * PCM
    assert len(refused) == 2


async def test_a_server_that_stops_lets_all_pieces_end(kit: Any, speaking: Any) -> None:
    gate = asyncio.Event()
    service = speaking(lambda number: [TONE] if number else [gate, TONE])
    async with kit.client(service) as client:
        asking = asyncio.create_task(client.post("/v1/audio/speech", json=body(input="a|b|c")))
        await until(lambda: service.answers)
        draining = asyncio.create_task(service.drain(10))
        await asyncio.sleep(0)
        gate.set()
        assert (await asking).content == 3 * PCM
        assert await draining
    assert service.holds == []


async def test_it_does_not_wait_for_ever(kit: Any, speaking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spoken, "BUSY_S", 0.0)
    service = speaking(lambda number: [TONE] if number == 0 else [TooBusy("full")])
    *_, last = lines((await ask(kit, service, input="a|b", stream_format="sse")).text)
    assert last["error"]["code"] == "queue_full"


@pytest.mark.parametrize("refused", [False, True])
async def test_a_piece_that_fails_ends_them_all(
    kit: Any, speaking: Any, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once what comes before it has been heard, whether it runs by then or was never taken."""
    gate, lost = asyncio.Event(), RequestError("lost", status=500)
    scripts = [[TONE, gate, TONE], [asyncio.Event()] if refused else [lost], [asyncio.Event()]]
    service = speaking(lambda number: scripts[number])
    generate, asked = service.generate, []

    async def refuse(task: Any, *arguments: Any) -> Any:
        asked.append(task.text)
        if refused and task.text == "b":
            raise lost
        return await generate(task, *arguments)

    monkeypatch.setattr(service, "generate", refuse)
    async with kit.client(service) as client:
        asking = asyncio.create_task(client.post("/v1/audio/speech", json=body(input="a|b|c", stream_format="sse")))
        await until(lambda: asked == (["a", "b"] if refused else ["a", "b", "c"]))
        gate.set()
        *sounds, last = lines((await asking).text)
    assert b"".join(base64.b64decode(sound["audio"]) for sound in sounds) == 2 * PCM
    assert last["error"]["message"] == "lost"
    assert [answer.reason for answer in service.answers[2:]] == ([] if refused else ["cancelled"])
    assert service.holds == []


async def test_a_client_that_leaves_while_a_piece_is_prepared_leaves_nothing(
    kit: Any, speaking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, stopped = speaking([TONE, asyncio.Event()]), []
    generate = service.generate

    async def slow(task: Any, *arguments: Any) -> Any:
        if task.text == "b":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                stopped.append(task.text)
                raise
        return await generate(task, *arguments)

    monkeypatch.setattr(service, "generate", slow)
    async with kit.server(service) as address, httpx.AsyncClient(base_url=f"http://{address}") as client:
        asked = asyncio.create_task(client.post("/v1/audio/speech", json=body(input="a|b|c"), timeout=60))
        await until(lambda: bool(service.answers) and service.answers[0].said == 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: stopped == ["b"] and service.answers[0].reason == "cancelled")
    assert len(service.answers) == 1
    assert service.holds == []


async def test_a_piece_that_is_cancelled_by_its_id_ends_them_all(speaking: Any) -> None:
    service = speaking([TONE, asyncio.Event()])
    tasks = [object(), object(), object()]
    answer: Any = Spoken(service, tasks, "s")  # type: ignore[arg-type]
    await answer.begin()
    reading = asyncio.create_task(_read(answer))
    await until(lambda: len(service.answers) == 3)
    service.answers[0].cancel()
    assert await reading == 1
    assert answer.finish_reason == "cancelled"
    assert [each.reason for each in service.answers] == 3 * ["cancelled"]


async def test_a_reader_that_stops_leaves_nothing_running(speaking: Any) -> None:
    """By an error, or on its own: whoever reads need not cancel what it does not know."""
    for second in ([RequestError("lost", status=500)], [asyncio.Event()]):
        gate = asyncio.Event()
        scripts = [[TONE, gate, TONE], second, [asyncio.Event()]]
        service = speaking(lambda number, scripts=scripts: scripts[number])
        answer: Any = Spoken(service, [object(), object(), object()], "s")  # type: ignore[arg-type]
        deltas = aiter(answer)
        await anext(deltas)
        await until(lambda service=service: len(service.answers) == 3)
        gate.set()
        await anext(deltas)
        if isinstance(second[0], RequestError):
            with pytest.raises(RequestError, match="lost"):
                await anext(deltas)
        else:
            await deltas.aclose()
        assert service.answers[2].reason == "cancelled"
        assert service.holds == []


async def _read(answer: Any) -> int:
    return len([delta async for delta in answer])


async def test_all_pieces_name_the_same_clip(kit: Any, speaking: Any) -> None:
    """The reference is encoded once."""
    out = io.BytesIO()
    soundfile.write(out, np.linspace(-1, 1, 400), 8000, format="WAV")
    coded = base64.b64encode(out.getvalue()).decode()
    service = speaking()
    assert (await ask(kit, service, input="a|b|c", ref_audio=coded, ref_text="what")).status_code == 200
    (name,) = {task.sample.id for task in service.tasks}
    assert name
    again = speaking()
    await ask(kit, again, ref_audio=coded, ref_text="other")
    assert again.tasks[0].sample.id != name


@pytest.mark.parametrize("voice", [None, "default", {"id": "default"}])
async def test_a_clip_goes_with_the_default_voice_and_no_other(kit: Any, speaking: Any, voice: Any) -> None:
    """OpenAI's client cannot leave ``voice`` out."""
    out = io.BytesIO()
    soundfile.write(out, np.linspace(-1, 1, 400), 8000, format="WAV")
    coded = base64.b64encode(out.getvalue()).decode()
    service = speaking()
    assert (await ask(kit, service, ref_audio=coded, ref_text="what", voice=voice)).status_code == 200
    assert service.tasks[0].sample is not None
    reply = await ask(kit, service, ref_audio=coded, ref_text="what", voice="ann")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "voice")


# --- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [0.5, 2.0])
async def test_speed_is_the_model_s_knob(kit: Any, speaking: Any, speed: float) -> None:
    service = speaking()
    assert (await ask(kit, service, speed=speed)).status_code == 200
    assert service.tasks[0].knobs.speed == speed


async def test_the_model_s_own_bounds_hold_for_speed(kit: Any, speaking: Any) -> None:
    reply = await ask(kit, speaking(), speed=3.0)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "speed")
    assert "nearest valid value is 2" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("speed", "near"), [(9, "4.0"), (0.1, "0.25")])
async def test_the_route_s_own_bounds_name_the_nearest_speed(kit: Any, speaking: Any, speed: float, near: str) -> None:
    reply = await ask(kit, speaking(), speed=speed)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].endswith(f", got {speed}; the nearest valid value is {near}")


async def test_a_model_that_takes_no_sound_takes_no_clip(kit: Any, speaking: Any) -> None:
    for changes, param in (({"ref_audio": "AAAA"}, "ref_audio"), ({"voice": "mine"}, "voice")):
        reply = await ask(kit, speaking(inputs=("text",)), **changes)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_a_long_clip_is_refused(kit: Any, speaking: Any) -> None:
    out = io.BytesIO()
    soundfile.write(out, np.zeros(60 * 8000 + 80), 8000, format="FLAC")
    reply = await ask(kit, speaking(), ref_audio=base64.b64encode(out.getvalue()).decode())
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "audio_too_long")
    assert "60.01 s is longer than the limit of 60 s" in reply.json()["error"]["message"]


async def test_nothing_is_scheduled_for_a_wrong_request(kit: Any, speaking: Any) -> None:
    service = speaking()
    for wrong in ({"input": " "}, {"voice": "eve"}, {"speed": 9}, {"ref_text": "x"}, {"stream_format": "x"}):
        assert (await ask(kit, service, **wrong)).status_code == 400
    assert service.tasks == []

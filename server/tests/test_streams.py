"""What holds for the streams of every route: how an error ends one, and what is sent while a model is silent. The
official client reads them."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import openai
import pytest

from mstar.spec.errors import RequestError, TooBusy
from mstar.spec.processor import AudioDelta, FramesDelta, ProgressDelta, TextDelta

from .test_every_route import picture, sound

ABILITIES = ("chat", "completion", "speech", "transcription", "image", "image_edit", "generate")
PIXELS = np.zeros((1, 8, 8, 3), np.uint8)
TONE = AudioDelta(np.full(800, 0.5, np.float32), 8000)
WORDS, PICTURE = (TextDelta("Hel", (1,)), TextDelta("lo", (2,))), (ProgressDelta(1, 2), FramesDelta(PIXELS))

ROUTES = {
    "chat": ("/chat/completions", {"json": {"messages": [{"role": "user", "content": "hi"}], "stream": True}}, WORDS),
    "completion": ("/completions", {"json": {"prompt": "hi", "stream": True}}, WORDS),
    "response": ("/responses", {"json": {"input": "hi", "stream": True}}, WORDS),
    "speech": (
        "/audio/speech",
        {"json": {"input": "hi", "response_format": "pcm", "stream_format": "sse"}},
        (TONE, TONE),
    ),
    "transcription": (
        "/audio/transcriptions",
        {"data": {"stream": "true"}, "files": {"file": ("a.wav", sound())}},
        WORDS,
    ),
    "image": ("/images/generations", {"json": {"prompt": "hi", "stream": True}}, PICTURE),
    "image_edit": (
        "/images/edits",
        {"data": {"prompt": "hi", "stream": "true"}, "files": {"image": ("a.png", picture())}},
        PICTURE,
    ),
}
by_route = pytest.mark.parametrize("route", ROUTES)


def service(kit, script):
    return kit.Service(script, abilities=ABILITIES)


def request_of(route):
    """Path, and the arguments that httpx sends it with."""
    path, sent, _ = ROUTES[route]
    kind, *_ = sent
    return path, {**sent, kind: {**sent[kind], "model": "tiny"}}


async def bytes_of(client, route):
    path, sent = request_of(route)
    async with client.stream("POST", f"/v1{path}", **sent) as answer:
        assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        return b"".join([piece async for piece in answer.aiter_raw()])


async def heard_by_the_official_client(client, route):
    """What its stream gives; each event as an object."""
    path, sent = request_of(route)
    official = openai.AsyncOpenAI(api_key="none", base_url="http://server/v1", http_client=client, max_retries=0)
    body = sent.get("json") or sent["data"]
    files = sent.get("files")
    as_form = {"files": files, "options": {"headers": {"Content-Type": "multipart/form-data"}}} if files else {}
    stream = await official.post(
        path, cast_to=object, body=body, stream=True, stream_cls=openai.AsyncStream[object], **as_form
    )
    return [event async for event in stream]


@by_route
async def test_an_error_after_the_first_event_is_raised_by_the_official_client(kit, route):
    first = ROUTES[route][2][0]
    tiny = service(kit, [first, TooBusy("lost it", retry_after=3)])
    async with kit.client(tiny) as client:
        if route == "response":  # whose protocol has an event of its own for it
            last = (await heard_by_the_official_client(client, route))[-1]
            assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
            assert last["response"]["error"]["message"] == "lost it"
            return
        with pytest.raises(openai.APIError, match="lost it") as caught:
            await heard_by_the_official_client(client, route)
        assert (caught.value.code, caught.value.type) == ("queue_full", "rate_limit_error")


@by_route
async def test_an_error_is_written_in_one_way(kit, route):
    first = ROUTES[route][2][0]
    async with kit.client(service(kit, [first, RequestError("lost it", param="x", status=422)])) as client:
        last = (await bytes_of(client, route)).strip().split(b"\n\n")[-1]
    name, _, data = last.rpartition(b"data: ")
    event = json.loads(data)
    if route != "response":
        error = {"message": "lost it", "type": "invalid_request_error", "param": "x", "code": "invalid_value"}
        assert event == {"type": "error", "status": 422, "error": error}
    assert name in (b"", f"event: {event['type']}\n".encode())


@by_route
async def test_an_error_before_the_first_event_has_its_status(kit, route):
    async with kit.client(service(kit, [TooBusy("full", retry_after=3)])) as client:
        path, sent = request_of(route)
        answer = await client.post(f"/v1{path}", **sent)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["code"] == "queue_full"


@by_route
async def test_silence_is_filled_with_events_that_clients_understand(kit, route):
    """Neither a comment nor a line that is no JSON; and what the client reads is what it would have read."""
    first, *rest = ROUTES[route][2]
    gate = asyncio.Event()
    tiny = service(kit, [first, gate, *rest])
    async with kit.client(tiny, keepalive_s=0.02) as client:
        filled = await in_silence(tiny, gate, heard_by_the_official_client(client, route))
        lines = (await in_silence(tiny, gate, bytes_of(client, route))).split(b"\n")
        plain = await heard_by_the_official_client(client, route)
    assert len(filled) >= len(plain) + 3, "several events in the silence"
    assert joined(filled) == joined(plain)
    for line in lines:
        assert line == b"" or line.startswith((b"event: ", b"data: {", b"data: [DONE]")), line
        assert not line.startswith((b":", b"data: :", b"id:"))
        if line.startswith(b"data: {"):
            json.loads(line.removeprefix(b"data: "))


async def in_silence(tiny, gate, asking):
    """What *asking* gives, once its answer has been silent for a while between its first delta and *gate*."""
    gate.clear()
    asked, count = asyncio.create_task(asking), len(tiny.answers)
    async with asyncio.timeout(20):
        while len(tiny.answers) == count or not tiny.answers[-1].said:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.2)
    gate.set()
    return await asked


def joined(events):
    """All that the answer says, whatever the route."""
    said = ""
    for event in events:
        for choice in event.get("choices", ()):
            said += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if str(event.get("type", "")).endswith((".delta", ".completed")):
            said += str(event.get("delta", "")) + str(event.get("audio", "")) + str(event.get("b64_json", ""))
    assert said
    return said


async def test_silence_in_json_lines_is_an_object_too(kit):
    gate = asyncio.Event()
    tiny = service(kit, [TextDelta("a"), gate])
    async with kit.client(tiny, keepalive_s=0.02) as client:
        asking = client.post("/generate", json={"text": "hi", "streaming": True})
        lines = (await in_silence(tiny, gate, asking)).text.splitlines()
        kinds = [json.loads(line)["type"] for line in lines]
    assert (kinds[0], set(kinds[1:-1]), kinds[-1]) == ("delta", {"keepalive"}, "done")

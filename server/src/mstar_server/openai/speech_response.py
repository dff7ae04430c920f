"""What ``POST /v1/audio/speech`` answers: a file, its bytes while they are made, or events."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from mstar.spec.errors import RequestError
from mstar.spec.processor import AudioDelta, Delta
from mstar_server.answers import Merged
from mstar_server.errors import as_request_error, error_event, request_cancelled
from mstar_server.media.encode.audio import content_type
from mstar_server.media.encode.sound import SoundStream, heavy, whole_sound
from mstar_server.openai.text_answers import finish_reason
from mstar_server.protocols import Answer
from mstar_server.sse import EventStream, data_event

__all__ = ["events", "raw", "whole"]

Batch = Sequence[tuple[int, Delta | None]]

_KEEPALIVE = data_event({"type": "speech.audio.delta", "audio": ""})


async def whole(merged: Merged, name: str) -> Response:
    """The sound of *merged*'s one answer as a file of format *name*."""
    deltas: list[AudioDelta] = []
    while not merged.done:
        deltas += _sounds(await merged.next_batch(None))
    sound = await asyncio.to_thread(whole_sound, deltas, name)
    if sound is None:
        raise _silent(merged)
    reason = finish_reason(merged.answers[0].finish_reason)
    headers = {**_facts(sound.rate, sound.channels), "X-Finish-Reason": reason}
    return Response(sound.data, 200, headers, content_type(name, sound.rate, sound.channels))


async def raw(merged: Merged, name: str) -> Response:
    """The bytes of such a file while they are made. Its head is sent with the first sound; until then an error has its
    status. After that an error breaks the connection, so that nobody takes half of the sound for all of it."""
    stream, data = SoundStream(name), b""
    while not stream.begun:
        if merged.done:
            raise _silent(merged)
        data += await _feed(stream, await merged.next_batch(None))
    media_type = content_type(name, stream.rate, stream.channels)
    response = EventStream(_bytes(merged, stream, data), media_type, merged.close)
    response.headers.update(_facts(stream.rate, stream.channels))
    return response


async def events(merged: Merged, name: str, keepalive_s: float) -> Response:
    """The same bytes as server-sent events. The status line waits for the first sound, at most *keepalive_s*."""
    batch = await merged.next_batch(keepalive_s)
    if merged.done and not _sounds(batch):
        raise _silent(merged)
    return EventStream(_events(merged, SoundStream(name), batch, keepalive_s), "text/event-stream", merged.close)


async def _bytes(merged: Merged, stream: SoundStream, data: bytes) -> AsyncGenerator[bytes, None]:
    if data:
        yield data
    while not merged.done:
        if data := await _feed(stream, await merged.next_batch(None)):
            yield data
    if data := await _in_thread(stream.name, stream.finish):
        yield data


async def _events(merged: Merged, stream: SoundStream, batch: Batch, keepalive_s: float) -> AsyncGenerator[bytes, None]:
    try:
        while True:
            data = await _feed(stream, batch)
            if data or not batch:
                yield _delta(data) if data else _KEEPALIVE
            if merged.done:
                break
            batch = await merged.next_batch(keepalive_s)
        if not stream.begun:
            raise _silent(merged)
        if data := await _in_thread(stream.name, stream.finish):
            yield _delta(data)
        yield data_event(_done(merged.answers[0]))
    except Exception as error:  # the status line is out: the error becomes the stream's last event
        yield data_event(error_event(as_request_error(error)))


async def _feed(stream: SoundStream, batch: Batch) -> bytes:
    sounds = _sounds(batch)
    return await _in_thread(stream.name, stream.feed, sounds) if sounds else b""


async def _in_thread(name: str, work: Any, *arguments: Any) -> bytes:
    """Encoding of format *name*, where it would hold up everyone else."""
    data: bytes = await asyncio.to_thread(work, *arguments) if heavy(name) else work(*arguments)
    return data


def _sounds(batch: Batch) -> list[AudioDelta]:
    return [delta for _, delta in batch if isinstance(delta, AudioDelta) and len(delta.samples)]


def _delta(data: bytes) -> bytes:
    return data_event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})


def _done(answer: Answer) -> dict[str, Any]:
    read, made = answer.prompt_tokens, answer.completion_tokens
    return {
        "type": "speech.audio.done",
        "usage": {"input_tokens": read, "output_tokens": made, "total_tokens": read + made},
        "finish_reason": finish_reason(answer.finish_reason),
    }


def _facts(rate: int, channels: int) -> Mapping[str, str]:
    return {"X-Sample-Rate": str(rate), "X-Audio-Channels": str(channels)}


def _silent(merged: Merged) -> RequestError:
    """Why there is no sound at all."""
    if merged.answers[0].finish_reason == "cancelled":
        return request_cancelled()
    return RequestError("'input' has nothing in it that this model can speak", param="input", code="nothing_to_speak")

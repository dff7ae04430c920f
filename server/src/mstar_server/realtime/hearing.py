"""What a client says, written down: a turn at a time, or live while it is said."""

from __future__ import annotations

import asyncio
from typing import Any

from mstar.processing.speech.transcript import TranscriptBuilder
from mstar.runtime.family import family_code
from mstar.spec.errors import RequestError
from mstar.spec.processor import TextDelta
from mstar.spec.tasks import Audio
from mstar_server.errors import as_request_error, error_object
from mstar_server.openai.transcribing import WindowRun, heard
from mstar_server.openai.transcription_request import TranscriptionRequest
from mstar_server.protocols import Answer, Service
from mstar_server.realtime.audio_buffer import LiveAudio
from mstar_server.realtime.conversation import Item
from mstar_server.realtime.events import new_id
from mstar_server.realtime.replies import Say
from mstar_server.realtime.settings import Transcribing
from mstar_server.state import ServerState

__all__ = ["listen", "write_down"]

_EVENT = "conversation.item.input_audio_transcription"


async def write_down(state: ServerState, service: Service, wish: Transcribing, item: Item, say: Say) -> None:
    """Transcribe *item*'s audio and tell it: deltas, then ``completed`` or ``failed``. The item gets its words."""
    audio = next(content.audio for content in item.content if content.audio is not None)
    run: WindowRun | None = None
    try:
        adapter, processor = state.adapter("transcription", service), await state.processor(service)
        body = TranscriptionRequest(model=service.spec.key, language=wish.language, prompt=wish.prompt)
        with family_code(f"{service.spec.key!r} could not read a turn", type(adapter).__module__):
            (task,) = adapter.tasks(body, {"file": audio}, translate=False)
        with family_code(f"{service.spec.key!r} could not cut a turn", service.spec.processor):
            windows = list(await asyncio.to_thread(processor.windows, task))
        run, builder = WindowRun(service, windows, new_id("trsc")), TranscriptBuilder(_seconds(audio))
        async for said in heard(run, builder):
            if said is not None and said[0]:
                await say(_delta(item, said[0]))
        item.content[0].text = builder.result().text
        await say(_completed(item, _seconds(audio)))
    except Exception as error:
        await say(_failed(item, as_request_error(error)))
    finally:
        if run is not None:
            run.close()


async def listen(answer: Answer, item: Item, audio: LiveAudio, say: Say) -> None:
    """Tell what *answer*, a live transcription of *item*, says of *audio*."""
    parts: list[str] = []
    try:
        async for delta in answer:
            if isinstance(delta, TextDelta) and delta.text:
                parts.append(delta.text)
                await say(_delta(item, delta.text))
        item.content[0].text = "".join(parts)
        await say(_completed(item, audio.seconds))
    except Exception as error:
        await say(_failed(item, as_request_error(error)))


def _seconds(audio: Audio) -> float:
    return len(audio.samples) / audio.rate


def _delta(item: Item, text: str) -> dict[str, Any]:
    return {"type": f"{_EVENT}.delta", "item_id": item.id, "content_index": 0, "delta": text}


def _completed(item: Item, seconds: float) -> dict[str, Any]:
    usage = {"type": "duration", "seconds": round(seconds, 3)}
    head = {"type": f"{_EVENT}.completed", "item_id": item.id, "content_index": 0}
    return {**head, "transcript": item.content[0].text, "usage": usage}


def _failed(item: Item, error: RequestError) -> dict[str, Any]:
    return {"type": f"{_EVENT}.failed", "item_id": item.id, "content_index": 0, **error_object(error)}

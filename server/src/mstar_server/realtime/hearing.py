"""What a client says, written down: a turn at a time, or live while it is said."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mstar.processing.speech.transcript import TranscriptBuilder
from mstar.runtime.family import family_code
from mstar.spec.errors import RequestError
from mstar.spec.processor import TextDelta
from mstar.spec.request import TokenLogprob
from mstar.spec.tasks import Audio, TranscriptionTask
from mstar_server.errors import as_request_error, error_object
from mstar_server.openai.text_answers import token_bytes_of
from mstar_server.openai.transcribing import WindowRun, heard
from mstar_server.openai.transcription_request import TranscriptionRequest
from mstar_server.openai.transcription_response import Spell, logprob_objects
from mstar_server.protocols import Answer, Service
from mstar_server.realtime.audio_buffer import LiveAudio
from mstar_server.realtime.conversation import Item
from mstar_server.realtime.events import new_id
from mstar_server.realtime.replies import Say
from mstar_server.realtime.settings import Transcribing
from mstar_server.state import ServerState

__all__ = ["check_wish", "listen", "write_down"]

_PROBE_RATE = 16_000
_EVENT = "conversation.item.input_audio_transcription"


async def write_down(
    state: ServerState, service: Service, wish: Transcribing, item: Item, say: Say, logprobs: bool = False
) -> None:
    """Transcribe *item*'s audio and tell it: deltas, then ``completed`` or ``failed``. The item gets its words.

    :param logprobs: with the log-probabilities of its tokens.
    """
    audio = next(content.audio for content in item.content if content.audio is not None)
    run: WindowRun | None = None
    try:
        spell = token_bytes_of(await state.processor(service)) if logprobs else None
        windows = await _windows(state, service, wish, audio, logprobs)
        run, builder = WindowRun(service, windows, new_id("trsc")), TranscriptBuilder(_seconds(audio))
        held: list[TokenLogprob] = []  # of text that is held back
        async for said in heard(run, builder):
            if said is None:
                continue
            held += said[2]
            if said[0]:
                await say(_delta(item, said[0], _told(held, spell)))
                held = []
        result = builder.result()
        item.content[0].text = result.text
        await say(_completed(item, _seconds(audio), _told(result.logprobs, spell)))
    except Exception as error:
        await say(_failed(item, as_request_error(error)))
    finally:
        if run is not None:
            run.close()


async def _windows(
    state: ServerState, service: Service, wish: Transcribing, audio: Audio, logprobs: bool
) -> list[TranscriptionTask]:
    adapter, processor = state.adapter("transcription", service), await state.processor(service)
    body = TranscriptionRequest(
        model=service.spec.key, language=wish.language, prompt=wish.prompt, include=["logprobs"] if logprobs else []
    )
    with family_code(f"{service.spec.key!r} could not read a turn", type(adapter).__module__):
        (task,) = adapter.tasks(body, {"file": audio}, translate=False)
    with family_code(f"{service.spec.key!r} could not cut a turn", service.spec.processor):
        return list(await asyncio.to_thread(processor.windows, task))


async def check_wish(state: ServerState, service: Service, wish: Transcribing, where: str) -> None:
    """Raises :class:`RequestError` for what every turn would be refused for: a moment of silence is prepared as one.

    :param where: the wish's place in the session, for the error. A model that is loaded on demand is loaded for it.
    """
    silence = Audio(np.zeros(_PROBE_RATE // 2, np.float32), _PROBE_RATE)
    try:
        processor = await state.processor(service)
        for task in (await _windows(state, service, wish, silence, False))[:1]:
            with family_code(f"{service.spec.key!r} could not read a turn", service.spec.processor):
                await asyncio.to_thread(processor.prepare, task, new_id("trsc"))
    except RequestError as error:
        if error.param in ("language", "prompt"):
            field = f"{where}.{error.param}"
            error.message = error.message.replace(f"{error.param!r}", f"{field!r}")
            error.param = field
        raise


async def listen(answer: Answer, item: Item, audio: LiveAudio, say: Say, spell: Spell | None = None) -> None:
    """Tell what *answer*, a live transcription of *item*, says of *audio*. *spell*: the bytes of a token, where the
    client wants log-probabilities."""
    parts: list[str] = []
    all_logprobs: list[TokenLogprob] = []
    held: list[TokenLogprob] = []
    try:
        async for delta in answer:
            if not isinstance(delta, TextDelta):
                continue
            held += delta.logprobs
            if delta.text:
                parts.append(delta.text)
                await say(_delta(item, delta.text, _told(held, spell)))
                all_logprobs, held = [*all_logprobs, *held], []
        item.content[0].text = "".join(parts)
        await say(_completed(item, audio.seconds, _told([*all_logprobs, *held], spell)))
    except Exception as error:
        await say(_failed(item, as_request_error(error)))


def _seconds(audio: Audio) -> float:
    return len(audio.samples) / audio.rate


def _told(logprobs: Sequence[TokenLogprob], spell: Spell | None) -> dict[str, Any]:
    return {} if spell is None else {"logprobs": logprob_objects(logprobs, spell)}


def _delta(item: Item, text: str, more: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": f"{_EVENT}.delta", "item_id": item.id, "content_index": 0, "delta": text, **more}


def _completed(item: Item, seconds: float, more: Mapping[str, Any]) -> dict[str, Any]:
    usage = {"type": "duration", "seconds": round(seconds, 3)}
    head = {"type": f"{_EVENT}.completed", "item_id": item.id, "content_index": 0}
    return {**head, "transcript": item.content[0].text, **more, "usage": usage}


def _failed(item: Item, error: RequestError) -> dict[str, Any]:
    return {"type": f"{_EVENT}.failed", "item_id": item.id, "content_index": 0, **error_object(error)}

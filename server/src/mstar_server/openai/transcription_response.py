"""Answers of ``/v1/audio/transcriptions`` and ``/v1/audio/translations``: bodies by format, and a stream's events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from mstar.processing.speech.transcript import Transcript, TranscriptBuilder, segment_object, srt, verbose, vtt
from mstar.spec.request import TokenLogprob
from mstar_server.errors import as_request_error, error_event
from mstar_server.openai.transcribing import WindowRun, heard
from mstar_server.sse import DONE, data_event

__all__ = ["Spell", "events", "logprob_objects", "whole"]

Spell = Callable[[int], bytes]

_KEEPALIVE = data_event({"type": "transcript.text.delta", "delta": ""})


def _text(transcript: Transcript) -> str:
    return transcript.text + "\n"


_PLAIN: Mapping[str, tuple[str, Callable[[Transcript], str]]] = {
    "text": ("text/plain", _text),
    "srt": ("application/x-subrip", srt),
    "vtt": ("text/vtt", vtt),
}
"""Format → media type and writer, for those that are no JSON."""


def whole(
    transcript: Transcript,
    response_format: str,
    *,
    task: str,
    timestamps: Sequence[str],
    spell: Spell | None = None,
) -> Response:
    """The response in *response_format*. :param spell: the bytes of a token, where log-probabilities were asked for."""
    if response_format in _PLAIN:
        media_type, write = _PLAIN[response_format]
        return Response(write(transcript), media_type=f"{media_type}; charset=utf-8")
    body: dict[str, Any]
    if response_format == "verbose_json":
        body = verbose(transcript, task, timestamps)
    else:
        body = {"text": transcript.text}
        if spell is not None:
            body["logprobs"] = logprob_objects(transcript.logprobs, spell)
    body["usage"] = {"type": "duration", "seconds": round(transcript.duration, 3)}
    if transcript.finish_reason is not None:
        body["finish_reason"] = transcript.finish_reason
    return Response(msgspec.json.encode(body), media_type="application/json")


async def events(
    run: WindowRun, builder: TranscriptBuilder, silence_s: float, *, segments: bool, spell: Spell | None
) -> AsyncGenerator[bytes, None]:
    """The stream of *run*: deltas, segments if they are wanted, then one ``transcript.text.done``."""
    logprobs: list[TokenLogprob] = []  # of text that is held back
    number = 0
    try:
        async for said in heard(run, builder, silence_s):
            if said is None:
                yield _KEEPALIVE
                continue
            text, segment, new = said
            logprobs += new
            if text:
                event: dict[str, Any] = {"type": "transcript.text.delta", "delta": text}
                if spell is not None:
                    event["logprobs"] = logprob_objects(logprobs, spell)
                logprobs = []
                yield data_event(event)
            if segments and segment is not None:
                facts = segment_object(number, segment)
                body = {"id": f"seg_{number}", **{name: facts[name] for name in ("start", "end", "text")}}
                yield data_event({"type": "transcript.text.segment", **body, "speaker": ""})
                number += 1
        yield data_event(_done(run, builder.result(), spell))
        yield DONE
    except Exception as error:  # the status line is out: the error becomes the stream's last event
        yield data_event(error_event(as_request_error(error)))


def _done(run: WindowRun, transcript: Transcript, spell: Spell | None) -> dict[str, Any]:
    event: dict[str, Any] = {"type": "transcript.text.done", "text": transcript.text}
    if spell is not None:
        event["logprobs"] = logprob_objects(transcript.logprobs, spell)
    event["usage"] = {
        "type": "tokens",
        "input_tokens": run.prompt_tokens,
        "output_tokens": run.completion_tokens,
        "total_tokens": run.prompt_tokens + run.completion_tokens,
        "seconds": round(transcript.duration, 3),
    }
    if transcript.finish_reason is not None:
        event["finish_reason"] = transcript.finish_reason
    return event


def logprob_objects(logprobs: Sequence[TokenLogprob], spell: Spell) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities, spelled as text and as bytes."""
    found = []
    for entry in logprobs:
        data = spell(entry.token)
        found.append({"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": entry.logprob})
    return found

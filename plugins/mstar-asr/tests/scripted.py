"""Whisper's API side with a script in the model's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mstar.processing.speech.transcript import Transcript, TranscriptBuilder
from mstar.registry import load_object
from mstar.spec.knobs import validate_knobs
from mstar.spec.processor import Delta, ProcessorContext
from mstar.spec.request import Done, Emit, EngineRequest, TokenLogprob
from mstar.spec.tasks import Audio, TranscriptionTask
from mstar_asr.whisper.processor import WhisperProcessor
from mstar_asr.whisper.spec import WHISPER_BASE, WHISPER_TINY_EN, WhisperKnobs

RATE = 16_000


def processor(folder: Path, english: bool = False) -> WhisperProcessor:
    spec = WHISPER_TINY_EN if english else WHISPER_BASE
    made = load_object(spec.processor)(ProcessorContext(spec, folder, spec.options()))
    assert isinstance(made, WhisperProcessor)
    return made


def asked(samples: np.ndarray | float, knobs: dict[str, Any] | None = None, **more: Any) -> TranscriptionTask:
    """A task. *samples*: or the seconds of a clip in which nobody speaks, which is heard nevertheless."""
    values = dict(knobs or {})
    if isinstance(samples, float):
        samples = np.zeros(int(samples * RATE), np.float32)
        values.setdefault("vad_filter", False)
    more = {"timestamps": ("segment",), "language": "en", **more}
    return TranscriptionTask(knobs=validate_knobs(WhisperKnobs, values), audio=Audio(samples, RATE), **more)


@dataclass
class Says:
    """What the model answers. *parts*: words and seconds. *words*: of the alignment, where each of its tokens begins
    in seconds, and the end."""

    parts: Sequence[str | float]
    logprob: float = -0.2
    no_speech: float = 0.01
    language: str | None = None
    reason: str = "stop"
    words: Sequence[float] = ()

    def events(self, model: WhisperProcessor) -> Iterator[Emit]:
        tokens = model.tokens
        if self.language is not None:
            yield _emit("language", np.array([[tokens.languages[self.language], 0.9]], np.float32))
        yield _emit("no_speech", np.array([self.no_speech], np.float32))
        ids: list[int] = []
        for part in self.parts:
            if isinstance(part, str):
                ids += model.tokenizer.encode(part, special=False)
            else:
                ids.append(tokens.timestamp_begin + round(part / 0.02))
        for token in [*ids, *([tokens.eot] if self.reason == "stop" else [])]:
            yield _emit("text", [token], [TokenLogprob(token=token, logprob=self.logprob)])
        if len(self.words):
            text = [token for token in ids if token < tokens.eot][: len(self.words) - 1]
            matrix = np.zeros((len(text) + 1, 1500), np.float32)
            for row, (start, end) in enumerate(zip(self.words, [*self.words[1:], 30.0], strict=True)):
                matrix[row, round(start * 50) : round(end * 50)] = 1.0
            yield _emit("aligned", np.array([*text, tokens.eot]))
            yield _emit("alignment", matrix)


def _emit(stream: str, data: Any, logprobs: list[TokenLogprob] | None = None) -> Emit:
    return Emit(id="r", stream=stream, seq=0, data=data, logprobs=logprobs)


@dataclass
class Heard:
    transcript: Transcript
    requests: list[EngineRequest] = field(default_factory=list)
    tasks: list[TranscriptionTask] = field(default_factory=list)

    @property
    def offsets(self) -> list[float]:
        return [task.offset for task in self.tasks]

    @property
    def temperatures(self) -> list[float]:
        return [request.sampling["sampler"].temperature for request in self.requests]

    @property
    def prompts(self) -> list[list[int]]:
        return [request.inputs["prompt"].tolist() for request in self.requests]


def hear(model: WhisperProcessor, task: TranscriptionTask, script: Callable[[int], Says] | Sequence[Says]) -> Heard:
    """Go through *task*'s windows as the server does. *script*: what is answered to request 0, 1, 2…"""
    assert task.audio is not None
    builder = TranscriptBuilder(len(task.audio.samples) / RATE)
    heard = Heard(builder.result())
    for window in model.windows(task):
        following: TranscriptionTask | None = window
        while following is not None:
            number = len(heard.requests)
            says = script(number) if callable(script) else script[number]
            _, following = answer(model, following, says, heard, builder)
    heard.transcript = builder.result()
    return heard


def answer(
    model: WhisperProcessor, task: TranscriptionTask, says: Says, heard: Heard, builder: TranscriptBuilder
) -> tuple[list[Delta], TranscriptionTask | None]:
    prepared = model.prepare(task, "r")
    heard.requests.append(prepared.request)
    heard.tasks.append(task)
    renderer = model.renderer(task, prepared)
    assert task.audio is not None
    builder.open(task.offset, task.offset + len(task.audio.samples) / RATE)
    deltas = [delta for event in says.events(model) for delta in renderer.feed(event)]
    deltas += renderer.finish(Done(id="r", reason=says.reason))
    for delta in deltas:
        builder.feed(delta)
    following = renderer.follow
    assert following is None or isinstance(following, TranscriptionTask)
    builder.close()
    return deltas, following


def spoken(pieces: Sequence[tuple[float, np.ndarray]], seconds: float) -> np.ndarray:
    """Silence with *pieces* at their seconds."""
    out = np.zeros(int(seconds * RATE), np.float32)
    for start, piece in pieces:
        at = int(start * RATE)
        out[at : at + len(piece)] = piece[: len(out) - at]
    return out


__all__ = ["RATE", "Heard", "Says", "answer", "asked", "hear", "processor", "spoken"]

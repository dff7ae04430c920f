"""The processors of the miniatures that transcribe: levels in, labels out; of whole clips with times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mstar.processing.speech.windows import WindowPolicy, cut
from mstar.spec.errors import RequestError
from mstar.spec.processor import Delta, Prepared, Renderer, SegmentDelta, TextDelta, Word
from mstar.spec.request import Emit, Push
from mstar.spec.tasks import Audio, Task, TranscriptionTask
from mstar.testing.miniatures.catalog import HUSH, LABEL_S, PAUSE, VOCAB, frames_for
from mstar.testing.miniatures.common import RATE, MiniProcessor, decode, text_of

__all__ = ["HearingProcessor", "ScribeProcessor"]

WINDOWS = WindowPolicy(window_s=16.0, whole_s=20.0)
LONGEST_S = 40.0
FRAME_S = LABEL_S / 2


class HearingProcessor(MiniProcessor):
    """A text is two frames a character; a clip is a frame for each 10 ms. What is not one level is silence."""

    def windows(self, task: TranscriptionTask) -> Sequence[TranscriptionTask]:
        return cut(task, WINDOWS.within(task.knobs.window_seconds))

    def inputs(self, task: Task) -> dict[str, Any]:
        longest = task.knobs.window_seconds or LONGEST_S
        if isinstance(task, TranscriptionTask):
            frames = _frames(task)
        else:
            super().inputs(task)  # refuses empty text
            frames = frames_for(text_of(task))
        if len(frames) * FRAME_S > longest + FRAME_S:
            where = "file" if isinstance(task, TranscriptionTask) else "text"
            message = f"{len(frames) * FRAME_S:.2f} seconds are longer than the limit of {longest}"
            raise RequestError(message, param=where, code="audio_too_long")
        return {"frames": frames}

    def prepare(self, task: Task, request_id: str) -> Prepared:
        if isinstance(task, TranscriptionTask) and task.logprobs is not None:
            raise RequestError("'include': this model has no log-probabilities", param="include")
        return super().prepare(task, request_id)

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return HearingRenderer(task) if isinstance(task, TranscriptionTask) else super().renderer(task, prepared)


def _frames(task: TranscriptionTask) -> np.ndarray:
    """One value a frame: a label, or ``HUSH``. A stretch of silence is so long that each word begins a pair."""
    if task.audio is None:
        raise RequestError("this model hears whole clips only", param="audio")
    samples, rate = np.asarray(task.audio.samples, dtype=np.float32), task.audio.rate
    frames: list[float] = []
    for number in range(max(1, int(len(samples) / rate / FRAME_S))):
        frame = samples[int(number * rate * FRAME_S) : int((number + 1) * rate * FRAME_S)]
        middle = frame[len(frame) // 4 : len(frame) - len(frame) // 4]
        steady = len(middle) > 0 and float(np.ptp(middle)) < 1 / (4 * VOCAB)
        level = float(middle.mean()) * 2 * VOCAB - 1 if steady else -1.0
        value = float(HUSH) if not -0.5 < level < VOCAB - 0.5 else level
        if value != HUSH and frames and frames[-1] == HUSH and len(frames) % 2:
            frames.append(float(HUSH))
        frames.append(value)
    return np.array(frames, dtype=np.float32)


class HearingRenderer(Renderer):
    """Labels as text, with a space for silence; segments end at pauses. In English everything is in capitals."""

    def __init__(self, task: TranscriptionTask):
        self.task = task

    def feed(self, event: Emit) -> Iterable[Delta]:
        said = ""
        for start, end, ids in _segments(list(event.data)):
            text = decode(_spaced(ids))
            text = text.upper() if self.task.translate else text
            yield TextDelta(text if not said else " " + text, tuple(i for i in ids if i != HUSH), (), event.stream)
            said += text
            if self.task.timestamps:
                words = tuple(_words(text, start)) if "word" in self.task.timestamps else ()
                yield SegmentDelta(start * LABEL_S, end * LABEL_S, text, words, self.task.language, tuple(ids))


def _spaced(ids: Sequence[int]) -> list[int]:
    return [VOCAB - 2 if label == HUSH else label for label in ids]


def _segments(labels: Sequence[int]) -> Iterable[tuple[int, int, list[int]]]:
    """(first label, last label + 1, labels) of each stretch between pauses."""
    start, last = -1, -1
    for at, label in enumerate([*labels, *[HUSH] * PAUSE]):
        if label != HUSH:
            start, last = (at if start < 0 else start), at
        elif start >= 0 and at - last >= PAUSE:
            yield start, last + 1, list(labels[start : last + 1])
            start = -1


def _words(text: str, start: int) -> Iterable[Word]:
    at = 0
    for word in text.split(" "):
        if word:
            yield Word(word, (start + at) * LABEL_S, (start + at + len(word)) * LABEL_S)
        at += len(word) + 1


class ScribeProcessor(MiniProcessor):
    """Hears the request's stream ``audio``, or the clip that it brings."""

    reads = (Audio,)

    def inputs(self, task: Task) -> dict[str, Any]:
        if task.live:
            return {}
        clip = next((part for part in task.media if isinstance(part, Audio)), None)
        if clip is None:
            raise RequestError("the request has no audio", param="files")
        return {"clip": _at_rate(clip)}

    def prepare(self, task: Task, request_id: str) -> Prepared:
        if task.logprobs is not None:
            raise RequestError("'include': this model has no log-probabilities", param="include")
        return super().prepare(task, request_id)

    def prompt_tokens(self, task: Task) -> int:
        return 0

    def push(self, stream: str, part: Any, request_id: str, end: bool = False) -> Push:
        if isinstance(part, Audio):
            if part.rate != RATE:
                raise RequestError(f"{stream!r} is heard at {RATE} Hz, not {part.rate}", param=stream)
            part = np.asarray(part.samples, np.float32)
        return super().push(stream, part, request_id, end)


def _at_rate(clip: Audio) -> np.ndarray:
    """*clip* at the model's rate. Levels are the same at any rate, so the nearest samples do."""
    samples = np.asarray(clip.samples, dtype=np.float32)
    return samples[np.arange(len(samples) * RATE // clip.rate) * clip.rate // RATE]

"""The miniatures' processors, where one input is not enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mstar.processing.sentences import sentence_pieces
from mstar.spec.errors import RequestError
from mstar.spec.processor import Delta, FramesDelta, Prepared, Renderer, Voice
from mstar.spec.request import Emit, Push
from mstar.spec.tasks import Audio, ChatTask, ImageTask, SpeechTask, Task, VideoTask
from mstar.testing.miniatures.catalog import (
    LOUDNESS,
    PATCHES,
    PIECE,
    VIDEO_SIZE,
    canvas_for,
    latent_for,
    picture_of,
    picture_size,
    pictures,
    voice_ids,
)
from mstar.testing.miniatures.common import MiniProcessor, MiniRenderer, encode, text_of

__all__ = [
    "DenoiseProcessor",
    "DuplexProcessor",
    "IdFramesProcessor",
    "LiveProcessor",
    "LookProcessor",
    "Seq2SeqProcessor",
    "SpeechProcessor",
    "UnifiedProcessor",
    "VideoProcessor",
    "VoiceProcessor",
]


class Seq2SeqProcessor(MiniProcessor):
    def inputs(self, task: Task) -> dict[str, Any]:
        return {**super().inputs(task), "start": np.zeros(1, dtype=np.int64)}


class LookProcessor(MiniProcessor):
    """Capital letters are pictures."""

    def inputs(self, task: Task) -> dict[str, Any]:
        ids = super().inputs(task)["prompt"]
        sizes = [picture_size(int(token)) for token in ids]
        letters = [(int(token), size) for token, size in zip(ids, sizes, strict=True) if size]
        if not letters:
            return {"prompt": ids}
        shown = [np.full(size, -1 - token) if size else [token] for token, size in zip(ids, sizes, strict=True)]
        patches = [token + np.resize((-1, 1), PATCHES * size) for token, size in letters]
        return {
            "prompt": np.concatenate(shown),
            "patches": np.concatenate(patches).astype(np.uint8),
            "pieces": np.array([(PATCHES * size, size, token, token) for token, size in letters], np.int64),
        }


class IdFramesProcessor(MiniProcessor):
    def inputs(self, task: Task) -> dict[str, Any]:
        return {"frames": super().inputs(task)["prompt"].astype(np.float32)}


class LiveProcessor(MiniProcessor):
    """Everything arrives in the knobs or during the request."""

    def inputs(self, task: Task) -> dict[str, Any]:
        return {}


class DuplexProcessor(LiveProcessor):
    """A talk's audio, which arrives on the stream ``audio`` at any rate, is heard sample by sample."""

    def prepare(self, task: Task, request_id: str) -> Prepared:
        live = tuple("audio_in" if name == "audio" else name for name in task.live)
        return super().prepare(replace(task, live=live), request_id)

    def push(self, stream: str, part: Any, request_id: str, end: bool = False) -> Push:
        if stream == "audio":
            samples = np.asarray(part.samples, np.float32) if isinstance(part, Audio) else part
            return Push(id=request_id, stream="audio_in", data=samples, end=end)
        return super().push(stream, part, request_id, end)


class DenoiseProcessor(MiniProcessor):
    """Images add their mean colour to the latent; what a mask keeps is the first image's own."""

    def inputs(self, task: Task) -> dict[str, Any]:
        images = pictures(task.media)
        latent = latent_for(text_of(task), self._size(task), task.knobs.seed or 0, images)
        return {**super().inputs(task), "negative": np.array([1], dtype=np.int64), "latent": latent}

    def _size(self, task: Task) -> tuple[int, int]:
        if isinstance(task, ImageTask) and task.size is not None:
            return task.size
        if isinstance(task, ImageTask) and task.images:
            height, width = task.images[0].pixels.shape[:2]
            if task.mask is None and self.context.spec.canvas is not None:
                return self.context.spec.canvas.sizes.nearest((width, height))
            return width, height
        return task.knobs.size, task.knobs.size

    def prepare(self, task: Task, request_id: str) -> Prepared:
        if isinstance(task, ImageTask) and task.mask is not None:
            height, width = task.mask.shape
            if task.size not in (None, (width, height)):
                raise RequestError("'size': with a mask the answer has the first image's size", param="size")
        return super().prepare(task, request_id)

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        renderer = super().renderer(task, prepared)
        if isinstance(task, ImageTask) and task.mask is not None:
            return _Kept(renderer, task.images[0].pixels, task.mask == 255)
        return renderer


class _Kept(Renderer):
    """Puts back the pixels that a mask keeps."""

    def __init__(self, inner: Renderer, pixels: Any, kept: Any):
        self.inner, self.pixels, self.kept = inner, pixels, kept

    def feed(self, event: Emit) -> Iterable[Delta]:
        for delta in self.inner.feed(event):
            if isinstance(delta, FramesDelta):
                delta = replace(delta, frames=np.where(self.kept[None, :, :, None], self.pixels, delta.frames))
            yield delta


class VideoProcessor(MiniProcessor):
    """An image is the first frame."""

    def inputs(self, task: Task) -> dict[str, Any]:
        super().inputs(task)  # refuses empty text
        size = (task.size if isinstance(task, VideoTask) else None) or VIDEO_SIZE
        return {"canvas": picture_of(text_of(task), size, task.knobs.seed or 0, pictures(task.media))}

    def params(self, task: Task) -> dict[str, Any]:
        values = super().params(task)
        canvas = self.context.spec.canvas
        if isinstance(task, VideoTask) and task.seconds is not None and canvas is not None and canvas.lengths:
            values["frames"] = canvas.lengths.frames(task.seconds)
        return values


class UnifiedProcessor(MiniProcessor):
    def inputs(self, task: Task) -> dict[str, Any]:
        ids = np.array(encode(text_of(task)), dtype=np.int64)
        return {**super().inputs(task), "prompt": ids, "canvas": canvas_for(task.knobs.points)}


class VoiceProcessor(MiniProcessor):
    """Speaks with three voices, and blends of them (``ann+bob``)."""

    def voices(self) -> Sequence[Voice]:
        return (
            Voice("ann", "Ann", "en", "female"),
            Voice("bob", "Bob", "en", "male"),
            Voice("chloé", "Chloé", "fr", "female", "Speaks from the nose."),
        )

    def knows_voice(self, voice: str) -> bool:
        return all(super(VoiceProcessor, self).knows_voice(name) for name in voice.split("+"))

    def inputs(self, task: Task) -> dict[str, Any]:
        found = super().inputs(task)
        if isinstance(task, SpeechTask | ChatTask):
            sample = task.sample.audio.samples if isinstance(task, SpeechTask) and task.sample is not None else None
            found["prompt"] = np.array([*voice_ids(task.voice, sample), *found["prompt"]], dtype=np.int64)
        return found

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        from mstar.testing.miniatures import miniature

        loudness = LOUDNESS if isinstance(task, SpeechTask | ChatTask) else 1.0
        return MiniRenderer(miniature(self.context.spec.key).streams, task, prepared.state, loudness)


class SpeechProcessor(VoiceProcessor):
    """Speaks a few words at a time."""

    def pieces(self, task: SpeechTask) -> Sequence[SpeechTask]:
        return [replace(task, text=piece) for piece in sentence_pieces(task.text, PIECE, first=PIECE // 2)]

    def prepare(self, task: Task, request_id: str) -> Prepared:
        if isinstance(task, SpeechTask) and task.instructions:
            message = "this model takes no instructions"
            raise RequestError(message, param="instructions", code="unsupported_parameter")
        return super().prepare(task, request_id)

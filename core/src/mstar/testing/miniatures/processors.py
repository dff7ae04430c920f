"""The miniatures' processors, where one input is not enough."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from mstar.spec.errors import RequestError
from mstar.spec.processor import Delta, FramesDelta, Prepared, Renderer
from mstar.spec.request import Emit
from mstar.spec.tasks import ImageTask, Task, VideoTask
from mstar.testing.miniatures.catalog import (
    VIDEO_SIZE,
    canvas_for,
    frames_for,
    latent_for,
    picture_of,
    pictures,
)
from mstar.testing.miniatures.common import MiniProcessor, encode, text_of

__all__ = [
    "DenoiseProcessor",
    "FramesProcessor",
    "IdFramesProcessor",
    "LiveProcessor",
    "Seq2SeqProcessor",
    "UnifiedProcessor",
    "VideoProcessor",
]


class Seq2SeqProcessor(MiniProcessor):
    def inputs(self, task: Task) -> dict[str, Any]:
        return {**super().inputs(task), "start": np.zeros(1, dtype=np.int64)}


class FramesProcessor(MiniProcessor):
    def inputs(self, task: Task) -> dict[str, Any]:
        super().inputs(task)  # refuses empty text
        return {"frames": frames_for(text_of(task))}


class IdFramesProcessor(MiniProcessor):
    def inputs(self, task: Task) -> dict[str, Any]:
        return {"frames": super().inputs(task)["prompt"].astype(np.float32)}


class LiveProcessor(MiniProcessor):
    """Everything arrives in the knobs or during the request."""

    def inputs(self, task: Task) -> dict[str, Any]:
        return {}


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

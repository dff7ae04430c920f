"""The miniatures' processors, where one input is not enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mstar.spec.processor import Prepared
from mstar.spec.request import Push
from mstar.spec.tasks import Audio, Task
from mstar.testing.miniatures.catalog import canvas_for, latent_for
from mstar.testing.miniatures.common import MiniProcessor, encode, text_of

__all__ = [
    "DenoiseProcessor",
    "DuplexProcessor",
    "IdFramesProcessor",
    "LiveProcessor",
    "Seq2SeqProcessor",
    "UnifiedProcessor",
]


class Seq2SeqProcessor(MiniProcessor):
    def inputs(self, task: Task) -> dict[str, Any]:
        return {**super().inputs(task), "start": np.zeros(1, dtype=np.int64)}


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
    def inputs(self, task: Task) -> dict[str, Any]:
        latent = latent_for(text_of(task), task.knobs.size)
        return {**super().inputs(task), "negative": np.array([1], dtype=np.int64), "latent": latent}


class UnifiedProcessor(MiniProcessor):
    def inputs(self, task: Task) -> dict[str, Any]:
        ids = np.array(encode(text_of(task)), dtype=np.int64)
        return {**super().inputs(task), "prompt": ids, "canvas": canvas_for(task.knobs.points)}

"""The miniatures' processors, where one input is not enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mstar.processing.sentences import sentence_pieces
from mstar.spec.errors import RequestError
from mstar.spec.processor import Prepared, Renderer, Voice
from mstar.spec.tasks import ChatTask, SpeechTask, Task
from mstar.testing.miniatures.catalog import LOUDNESS, PIECE, canvas_for, frames_for, latent_for, voice_ids
from mstar.testing.miniatures.common import MiniProcessor, MiniRenderer, encode, text_of

__all__ = [
    "DenoiseProcessor",
    "FramesProcessor",
    "IdFramesProcessor",
    "LiveProcessor",
    "Seq2SeqProcessor",
    "SpeechProcessor",
    "UnifiedProcessor",
    "VoiceProcessor",
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
    def inputs(self, task: Task) -> dict[str, Any]:
        latent = latent_for(text_of(task), task.knobs.size)
        return {**super().inputs(task), "negative": np.array([1], dtype=np.int64), "latent": latent}


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

"""A plugin whose model is shown videos: how many frames there were, of what size, and the sound, begin its prompt."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

import mstar
from mstar.spec.model import ModelSpec
from mstar.spec.processor import Prepared, Renderer
from mstar.spec.tasks import Audio, Task, Video
from mstar.testing import Example
from mstar.testing.miniatures import miniature
from mstar.testing.miniatures.common import MiniProcessor, MiniRenderer, encode


class WatchingProcessor(MiniProcessor):
    reads = (Video,)

    def prepare(self, task: Task, request_id: str) -> Prepared:
        prepared = super().prepare(task, request_id)
        for video in (part for part in task.media if isinstance(part, Video)):
            frames, height, width, _ = video.frames.shape
            assert video.audio is not None
            seen = encode(f"{frames} {height} {width} {video.fps} {len(video.audio.samples) // 1000}")
            prompt = np.array([*seen, *prepared.request.inputs["prompt"]])
            prepared.request.inputs = {"prompt": prompt}
            prepared = replace(prepared, prompt_tokens=len(prompt))
        return prepared

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return MiniRenderer({"text": "text"}, task, prepared.state)


def draw(key: str, rng: random.Random) -> Example:
    frames = np.full((rng.randint(2, 5), 16, 24, 3), rng.randrange(256), np.uint8)
    sound = Audio(np.zeros(4000, np.float32), 8000)
    return Example("what is it", {"max_tokens": 5}, parts=(Video(frames, 8.0, sound),))


@mstar.hookimpl
def mstar_models() -> list[ModelSpec]:
    more = {
        "processor": "watching:WatchingProcessor",
        "inputs": ("text", "video", "audio"),
        "examples": "watching:draw",
    }
    return [replace(miniature("mini_chat").spec, key="watcher", abilities=("generate", "chat"), **more)]

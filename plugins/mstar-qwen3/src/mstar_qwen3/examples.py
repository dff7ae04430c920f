"""Sample requests for the conformance suite."""

from __future__ import annotations

import random

import numpy as np

from mstar.spec.tasks import Image, Part, Video
from mstar.testing import Example

__all__ = ["example"]

_WORDS = ("what", "is", "on", "this", "picture", "tell", "me", "Paris", "hello", "why", "1 2 3", "?")


def example(key: str, rng: random.Random) -> Example:
    """A few words, now and then with a small picture or two, or a video of less than two seconds."""
    kinds = rng.choice(("", "", "p", "pp", "v", "vp"))
    if key == "qwen3_8_27b":
        kinds = kinds.replace("v", "")
    parts = tuple(_picture(rng) if kind == "p" else _video(rng) for kind in kinds)
    text = " ".join(rng.choices(_WORDS, k=rng.choice((1, 2, 5, 9, 17))))
    return Example(text, {"max_tokens": rng.randint(2, 8)}, parts=parts)


def _picture(rng: random.Random) -> Part:
    return Image(_noise(rng, rng.choice((16, 24, 40)), rng.choice((16, 33))))


def _video(rng: random.Random) -> Part:
    return Video(_noise(rng, rng.randint(2, 7), 16, rng.choice((16, 24))), 4.0)


def _noise(rng: random.Random, *size: int) -> np.ndarray:
    return np.random.default_rng(rng.randrange(1000)).integers(0, 256, (*size, 3), dtype=np.uint8)

"""Sample requests for the conformance suite."""

from __future__ import annotations

import random

import numpy as np

from mstar.spec.tasks import Image
from mstar.testing import Example

__all__ = ["example"]

_WORDS = ("a", "small", "red", "cat", "bird", "under", "the", "moon", "painted", "in", "oil")


def example(key: str, rng: random.Random) -> Example:
    """A small picture of a few steps; of models that take pictures, now and then with one or two of them."""
    knobs = {
        "num_inference_steps": rng.randint(1, 3),
        "width": rng.choice((64, 80)),
        "height": 64,
        "seed": rng.randrange(1000),
    }
    text = " ".join(rng.choices(_WORDS, k=rng.randint(1, 12)))
    count = rng.choice((0, 0, 1, 2)) if key.startswith("flux2") else 0
    parts = tuple(_painted(rng.choice((64, 96)), 64, rng.randrange(1000)) for _ in range(count))
    return Example(text, knobs, parts=parts)


def _painted(width: int, height: int, seed: int) -> Image:
    return Image(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))

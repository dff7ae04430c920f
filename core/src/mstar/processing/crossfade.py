"""Pieces of sound that overlap, blended into one."""

from __future__ import annotations

import numpy as np

__all__ = ["Crossfade"]


class Crossfade:
    """Joins emissions of which each ends with *overlap* samples that the next one brings again
    (:class:`mstar.spec.graph.Fresh`). The two are blended with a raised cosine, whose weights add up to one: what both
    agree on stays as it is. One a request.

    :param overlap: in samples.
    """

    def __init__(self, overlap: int):
        self.overlap = overlap
        rising = (1 - np.cos(np.pi * (np.arange(overlap) + 0.5) / max(1, overlap))) / 2
        self._rising = rising.astype(np.float32)
        self._held = np.zeros(0, np.float32)

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """What *samples* (float32 ``[samples]``) complete; their last :attr:`overlap` are held back."""
        blended = min(len(self._held), len(samples))
        if blended:
            samples = samples.copy()
            samples[:blended] += (self._held[:blended] - samples[:blended]) * (1 - self._rising[:blended])
        kept = max(0, len(samples) - self.overlap)
        self._held = samples[kept:]
        return samples[:kept]

    def finish(self) -> np.ndarray:
        """What was held back of the last emission, which nothing overlaps."""
        held, self._held = self._held, np.zeros(0, np.float32)
        return held

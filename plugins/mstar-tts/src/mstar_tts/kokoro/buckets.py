"""Sizes that texts and speech are padded to, so that several share a step, and steps a captured graph."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["bucket"]


def bucket(length: int, buckets: Sequence[int]) -> int:
    """The smallest of *buckets* (rising) that holds *length*; beyond the last one a multiple of it."""
    place = bisect_left(buckets, length)
    return buckets[place] if place < len(buckets) else -(-length // buckets[-1]) * buckets[-1]

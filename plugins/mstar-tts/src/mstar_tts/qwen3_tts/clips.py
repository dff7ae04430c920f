"""What was heard in clips, kept by their content."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

__all__ = ["Clips"]

Array = np.ndarray[Any, Any]


class Clips:
    """The last *most* results of encoding clips, of each kind, as arrays on the host: a voice's vector is some 8 kB, a
    minute's frames some 100 kB. Belongs to one worker."""

    def __init__(self, most: int):
        self._most = most
        self._known: dict[str, OrderedDict[str, Array]] = {}

    def get(self, kind: str, clip: str) -> Array | None:
        """:param kind: what was computed. :param clip: a digest of its samples."""
        known = self._known.get(kind, OrderedDict())
        if clip not in known:
            return None
        known.move_to_end(clip)
        return known[clip]

    def put(self, kind: str, clip: str, value: Array) -> None:
        known = self._known.setdefault(kind, OrderedDict())
        known[clip] = value
        while len(known) > self._most:
            known.popitem(last=False)

"""What was heard in clips, kept by their content."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

__all__ = ["Clips"]

Array = np.ndarray[Any, Any]


class Clips:
    """The last *most* results of encoding clips, as arrays on the host: a vector of a voice is some 8 kB, a minute's
    frames some 100 kB. Belongs to one worker."""

    def __init__(self, most: int):
        self._most = most
        self._known: OrderedDict[tuple[str, str], Array] = OrderedDict()

    def get(self, kind: str, clip: str) -> Array | None:
        """:param kind: what was computed. :param clip: a digest of its samples."""
        found = self._known.get((kind, clip))
        if found is not None:
            self._known.move_to_end((kind, clip))
        return found

    def put(self, kind: str, clip: str, value: Array) -> None:
        self._known[kind, clip] = value
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def __len__(self) -> int:
        return len(self._known)

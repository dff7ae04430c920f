"""A loop's progress, and what there is to see of it, as deltas: for the renderers of pictures and videos."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mstar.spec.processor import ProgressDelta
from mstar.spec.request import Emit

__all__ = ["ProgressReport"]


class ProgressReport:
    """Joins a preview with the step that it shows.

    :param progress: the stream of :attr:`mstar.spec.graph.Loop.progress`. :param preview: the stream of what there is
        to see, uint8 ``[H, W, 3]`` an item, which comes before its step's progress.
    """

    def __init__(self, progress: str = "progress", preview: str = "preview"):
        self._progress, self._preview = progress, preview
        self._seen: Any = None

    def hears(self, event: Emit) -> bool:
        """Whether *event* is of one of the two streams: then :meth:`feed` it."""
        return event.stream in (self._progress, self._preview)

    def feed(self, event: Emit) -> Iterable[ProgressDelta]:
        if event.stream == self._preview:
            self._seen = np.asarray(event.data, np.uint8)[-1]
            return
        seen, self._seen = self._seen, None
        step, total = (int(number) for number in np.asarray(event.data)[-1])
        yield ProgressDelta(step, total, seen, event.stream)

"""Free numbers of a range, kept as maximal runs. No torch."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["FreeRuns"]


class FreeRuns:
    """The free numbers among ``0 … size - 1``. Adding costs O(1); claiming looks at the runs, of which there are few
    while allocation prefers whole runs."""

    def __init__(self, size: int):
        self._end: dict[int, int] = {0: size} if size else {}  # start -> end of each maximal run
        self._start: dict[int, int] = {size: 0} if size else {}

    def __iter__(self) -> Iterator[int]:
        for start, end in self._end.items():
            yield from range(start, end)

    def add(self, numbers: range) -> None:
        """Give *numbers* back, joined with the free runs that they touch."""
        if not numbers:
            return
        start, end = numbers.start, numbers.stop
        if start in self._start:
            before = self._start.pop(start)
            del self._end[before]
            start = before
        if end in self._end:
            after = self._end.pop(end)
            del self._start[after]
            end = after
        self._end[start], self._start[end] = end, start

    def claim(self, wanted: int, after: int | None = None) -> range:
        """At most *wanted* numbers in one run, empty if none is free: the ones that follow *after* if they are free,
        else from the first run that holds *wanted*, else the whole longest run."""
        if not self._end:
            return range(0)
        start = -1 if after is None else after + 1
        if start not in self._end:
            start = self._find(wanted)
        end = self._end.pop(start)
        del self._start[end]
        stop = min(end, start + wanted)
        if stop < end:
            self._end[stop], self._start[end] = end, stop
        return range(start, stop)

    def _find(self, wanted: int) -> int:
        longest, best = 0, -1
        for start, end in self._end.items():
            if end - start >= wanted:
                return start
            if end - start > longest:
                longest, best = end - start, start
        return best

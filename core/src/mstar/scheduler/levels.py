"""Buckets by priority. No torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Levels"]

T = TypeVar("T")


class Levels(Generic[T]):
    """One bucket per priority that is in use; a larger number is more urgent.

    The owner drops a bucket as soon as it is empty, so that :attr:`top` always holds something and priorities that
    clients invent do not pile up.
    """

    __slots__ = ("_by_priority", "_new", "_order")

    def __init__(self, new: Callable[[], T]):
        self._new = new
        self._by_priority: dict[int, T] = {}
        self._order: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._order)

    def at(self, priority: int) -> T:
        """The bucket of *priority*, made if need be."""
        bucket = self._by_priority.get(priority)
        if bucket is None:
            bucket = self._by_priority[priority] = self._new()
            insort(self._order, priority)
        return bucket

    def drop(self, priority: int) -> None:
        """Remove the bucket of *priority*, which has become empty."""
        del self._by_priority[priority]
        del self._order[bisect_left(self._order, priority)]

    @property
    def top(self) -> T:
        """The bucket of the highest priority in use. Only when there is one."""
        return self._by_priority[self._order[-1]]

"""The parts of one file made by several threads, as far as there are idle ones.

One small pool serves the whole process. A file that comes when its threads are busy is made by its caller alone, so
many files at once take the cores that they would take anyway, and one by itself is there sooner.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

__all__ = ["HELPERS", "Helpers"]

T = TypeVar("T")
R = TypeVar("R")

_MOST = 5
"""Beyond that many a picture's dozen bands are there no sooner: what one thread does alone is most of what is left."""


class Helpers:
    """*threads* that help whoever has something to divide. None: callers do everything themselves."""

    def __init__(self, threads: int):
        self.threads = threads
        self._idle = threading.Semaphore(threads)
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="mstar-encode")

    def map(self, begin: Callable[[], Callable[[T], R]], items: Sequence[T]) -> list[R]:
        """What is made of each of *items*, in their order. No thread works for it any more when it returns or raises.

        :param begin: called once in each thread that takes part; gives the function for one item. Both should let go of
            the interpreter while they work.
        :raises Exception: what the first of them that failed raised; no item is begun after that.
        """
        results: list[Any] = [None] * len(items)
        left = deque(range(len(items)))

        def take() -> None:
            try:
                make = begin()
                while True:
                    try:
                        which = left.popleft()
                    except IndexError:
                        return
                    results[which] = make(items[which])
            except BaseException:
                left.clear()
                raise

        helping = self._ask(take, len(items) - 1)
        try:
            take()
        finally:
            for future in helping:
                if future.cancel():  # it had not begun
                    self._idle.release()
            wait(helping)
        for future in helping:
            if not future.cancelled():
                future.result()
        return results

    def _ask(self, take: Callable[[], None], most: int) -> list[Future[None]]:
        """Start *take* in at most *most* idle threads."""

        def help_out() -> None:
            try:
                take()
            finally:
                self._idle.release()

        asked: list[Future[None]] = []
        while len(asked) < most and self._idle.acquire(blocking=False):
            try:
                asked.append(self._pool.submit(help_out))
            except RuntimeError:  # the interpreter ends
                self._idle.release()
                break
        return asked


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


HELPERS = Helpers(max(0, min(_MOST, _cores() // 2 - 1)))
"""The process's. Half of the cores at most are its callers' and theirs: the others serve, and feed the device."""

"""What is made of an object once, however many ask for it, and for as long as the object lives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

__all__ = ["OncePer"]

K = TypeVar("K")
V = TypeVar("V")


class OncePer(Generic[K, V]):
    """Calls *make* once for each object. Thread-safe: who asks while it is being made waits for it.

    For what several requests share: the samples of one prompt are requests of their own with the same pictures.
    Objects are told apart by identity and need not be hashable; they must allow weak references.
    """

    def __init__(self, make: Callable[[K], V]):
        self._make = make
        self._lock = threading.Lock()
        self._made: dict[int, tuple[weakref.ref[K], Future[V]]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def __call__(self, key: K) -> V:
        """What *make* gave for *key*, or raised: then the next one who asks tries again."""
        number = id(key)
        with self._lock:
            known = self._made.get(number)
            first = known is None
            if known is None:
                known = self._made[number] = (weakref.ref(key, lambda _: self._forget(number)), Future())
        future = known[1]
        if first:
            try:
                future.set_result(self._make(key))
            except BaseException as error:
                self._forget(number)
                future.set_exception(error)
        return future.result()

    def _forget(self, number: int) -> None:
        # no lock: a reference dies in whichever thread, perhaps in the one that holds it
        self._made.pop(number, None)

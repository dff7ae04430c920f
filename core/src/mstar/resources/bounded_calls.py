"""Calls of a library that nothing can stop, and that must not keep everyone waiting."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ["BoundedCalls"]

Call = tuple[Callable[[], None], "Future[None]"]


class BoundedCalls:
    """Runs one call at a time in a thread of its own, and waits for it for a while. One that takes longer is given up:
    its thread goes on to its end, and the next call gets another. Good only for calls that let other threads run.

    Used by one thread at a time. :ivar lost: calls that were given up and have not ended.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Call | None] | None = None

    def run(self, call: Callable[[], None], seconds: float) -> bool:
        """Whether *call* has ended within *seconds*. Raises what it raises."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name="bounded-calls", daemon=True).start()
        future: Future[None] = Future()
        self._calls.put((call, future))
        try:
            future.result(timeout=seconds)
        except TimeoutError:
            if future.done():  # just now, or it raised such an error itself
                future.result()
                return True
            with self._lock:
                self.lost += 1
            future.add_done_callback(self._found)
            self._calls.put(None)  # the thread ends with this call
            self._calls = None
            return False
        return True

    def _found(self, future: Future[None]) -> None:
        with self._lock:
            self.lost -= 1


def _serve(calls: queue.SimpleQueue[Call | None]) -> None:
    while (item := calls.get()) is not None:
        call, future = item
        try:
            call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del item, call, future

"""How the code of plugins is run: what it does to the process must not cost the command or the other plugins."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interrupted", "guest", "quiet"]


class Interrupted(KeyboardInterrupt):
    """The user's own Ctrl-C while a plugin's code ran; any other ``KeyboardInterrupt`` is the plugin's own."""


@contextlib.contextmanager
def guest() -> Iterator[None]:
    """Run a plugin's code inside: what it prints goes to standard error, ``sys.stdout`` is put back afterwards, and a
    Ctrl-C raises :class:`Interrupted`.

    Only in the main thread: both belong to the whole process, and no other thread gets a Ctrl-C.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        try:
            if callable(before):
                before(number, frame)
        except KeyboardInterrupt:
            raise Interrupted from None

    with quiet():
        if callable(before):
            signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            if before is not None:  # a handler that C code installed cannot be put back
                signal.signal(signal.SIGINT, before)


def quiet() -> contextlib.AbstractContextManager[object]:
    """Standard output is for a command's answer: what models and plugins print goes to standard error."""
    return contextlib.redirect_stdout(sys.stderr)

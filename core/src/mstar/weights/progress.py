"""A progress bar on the terminal for what :mod:`mstar.weights` does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from mstar.weights.sources import Progress

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(file: TextIO | None = None) -> Iterator[Progress]:
    """A :data:`~mstar.weights.sources.Progress` that draws on *file* (standard error) while the context lasts.

    The bar of one piece of work makes room for that of the next. Nothing is drawn before the first call, so that other
    output is not disturbed, and nothing at all if *file* is no terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Display

    console = Console(file=file or sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    display = Display(*columns, console=console, transient=True)
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in tasks:
            for old in tasks.values():
                display.remove_task(old)
            tasks.clear()
            tasks[what] = display.add_task(what, total=total or None)
            if console.is_terminal:
                display.start()  # does nothing when it is running already
        display.update(tasks[what], completed=done, total=total or None)

    try:
        yield show
    finally:
        if console.is_terminal:  # elsewhere it never began, and stopping it would print an empty line
            display.stop()

"""Processes that compute one model together, for tests: gloo on the CPU of one machine.

::

    with Ranks(4) as ranks:
        answers = ranks.run(compute, folder, tp=2)     # compute(world, folder, tp=2) on ranks 0 to 3, as a list

Functions are found again by their file and name, so that those of test modules will do.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

__all__ = ["RankFailure", "Ranks"]

_PATIENCE_S = 60.0
"""After which ranks that wait for one that does not come give up."""


class RankFailure(AssertionError):
    """A function raised on a rank; with that rank's traceback."""


class Ranks:
    """*count* processes, joined by gloo. They are started when they are first needed, and anew after a failure."""

    def __init__(self, count: int):
        self.count = count
        self._folder = tempfile.TemporaryDirectory(prefix="mstar-ranks-")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._started = 0

    def run(self, function: Callable[..., Any], *args: Any, ranks: int | None = None, **named: Any) -> list[Any]:
        """``function(world, *args, **named)`` on the first *ranks* processes (default: all) at once; what it returned
        on each. *world*: a :class:`mstar.nn.mesh.World`. Arguments and results are pickled.

        :raises RankFailure: it raised on one of them. The processes are ended then, and started anew for the next.
        """
        if not self._processes:
            self._start()
        pipes = self._pipes[:ranks]
        for pipe in pipes:
            pipe.send((inspect.getfile(function), function.__qualname__, args, named))
        results: dict[int, Any] = {}
        while len(results) < len(pipes):
            for ready in wait([pipe for i, pipe in enumerate(pipes) if i not in results]):
                number = pipes.index(ready)  # type: ignore[arg-type]
                try:
                    fault, results[number] = pipes[number].recv()
                except EOFError:
                    fault = "the process ended"
                if fault is not None:
                    self._stop()
                    raise RankFailure(f"rank {number} of {self.count}:\n{fault}")
        return [results[number] for number in range(len(pipes))]

    def close(self) -> None:
        self._stop()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["mstar.testing.drive", "mstar.nn.mesh"])  # torch is imported once, then
        self._started += 1
        meeting = str(Path(self._folder.name, f"store-{self._started}"))
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, meeting, rank, self.count), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _stop(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
            process.close()
        self._processes, self._pipes = [], []


def _serve(pipe: Connection, meeting: str, rank: int, count: int) -> None:
    """In a child: run what comes down the pipe until it is closed."""
    import os

    import torch

    from mstar.nn.mesh import World

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a test machine's own name may lead nowhere
    torch.set_num_threads(1)
    patience = timedelta(seconds=_PATIENCE_S)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count, timeout=patience
    )
    world = World(torch.device("cpu"))
    while True:
        try:
            file, name, args, named = pipe.recv()
        except EOFError:
            return
        answer: tuple[str | None, Any]
        try:
            answer = (None, getattr(_module(file), name)(world, *args, **named))
        except Exception:
            answer = (traceback.format_exc(), None)
        try:
            pipe.send(answer)
        except OSError:  # another rank's failure was told first
            return


@cache
def _module(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_ranks_{Path(file).stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

"""Processes that compute one model together, for tests: gloo on the CPU of one machine.

::

    with Ranks() as ranks:
        answers = ranks.run(2, compute, folder)     # compute(world, folder) on ranks 0 and 1, as a list

Functions are found again by their file and name, so that those of test modules will do.
"""

from __future__ import annotations

import importlib
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
    """Worlds of any number of processes, joined by gloo. Each is started when it is first needed, and anew after a
    failure."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mstar-ranks-")
        self._worlds: dict[int, list[tuple[Any, Connection]]] = {}
        self._started = 0

    def run(self, count: int, function: Callable[..., Any], *args: Any, **named: Any) -> list[Any]:
        """``function(world, *args, **named)`` in *count* processes at once; what it returned in each. *world*: a
        :class:`mstar.nn.mesh.World`. Arguments and results are pickled.

        :raises RankFailure: it raised in one of them. The processes are ended then.
        """
        if count not in self._worlds:
            self._worlds[count] = self._start(count)
        pipes = [pipe for _, pipe in self._worlds[count]]
        for pipe in pipes:
            pipe.send((function.__module__, inspect.getfile(function), function.__qualname__, args, named))
        results: dict[int, Any] = {}
        while len(results) < count:
            for ready in wait([pipe for i, pipe in enumerate(pipes) if i not in results]):
                number = pipes.index(ready)  # type: ignore[arg-type]
                try:
                    fault, results[number] = pipes[number].recv()
                except EOFError:
                    fault = "the process ended"
                if fault is not None:
                    self._stop(count)
                    raise RankFailure(f"rank {number} of {count}:\n{fault}")
        return [results[number] for number in range(count)]

    def close(self) -> None:
        for count in list(self._worlds):
            self._stop(count)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self, count: int) -> list[tuple[Any, Connection]]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["mstar.testing.drive", "mstar.nn.mesh"])  # torch is imported once, then
        self._started += 1
        meeting = str(Path(self._folder.name, f"store-{self._started}"))
        started = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, meeting, rank, count), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        return started

    def _stop(self, count: int) -> None:
        members = self._worlds.pop(count)
        for process, pipe in members:
            with suppress(OSError):
                pipe.close()
            process.terminate()
        for process, _ in members:
            process.join()
            process.close()


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
            module, file, name, args, named = pipe.recv()
        except EOFError:
            return
        answer: tuple[str | None, Any]
        try:
            answer = (None, getattr(_module(module, file), name)(world, *args, **named))
        except Exception:
            answer = (traceback.format_exc(), None)
        try:
            pipe.send(answer)
        except OSError:  # another rank's failure was told first
            return


@cache
def _module(name: str, file: str) -> ModuleType:
    """By its name, if that is how it can be had; else from its file, as test modules."""
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

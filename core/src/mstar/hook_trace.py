"""``MSTAR_TRACE_PLUGINS=1``: each hook call on one line, with its plugins, arguments, result and time."""

from __future__ import annotations

import reprlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import pluggy

from mstar.spec.origin import describe

__all__ = ["trace_hooks"]


def trace_hooks(manager: pluggy.PluginManager, stream: TextIO) -> Callable[[], None]:
    """Write every hook call of *manager* to *stream* until the returned function is called.

    A line reads ``hook: NAME(ARGUMENTS) [PLUGINS] -> RESULT, 0.12 ms``. Plugins stand in the order in which they are
    called; a call that no plugin implements is not shown; values are shortened.
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    began = threading.local()  # hooks call hooks, and the server's and a worker's threads call them at once

    def before(name: str, impls: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]) -> None:
        began.__dict__.setdefault("times", []).append(time.perf_counter())

    def after(
        outcome: pluggy.Result[Any], name: str, impls: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]
    ) -> None:
        took = (time.perf_counter() - began.times.pop()) * 1e3
        if not impls:
            return
        given = ", ".join(f"{key}={short.repr(value)}" for key, value in arguments.items())
        who = ", ".join(impl.plugin_name for impl in reversed(impls))
        error = outcome.exception
        result = short.repr(outcome.get_result()) if error is None else f"raised {describe(error)}"
        stream.write(f"hook: {name}({given}) [{who}] -> {result}, {took:.2f} ms\n")
        stream.flush()

    undo: Callable[[], None] = manager.add_hookcall_monitoring(before, after)
    return undo

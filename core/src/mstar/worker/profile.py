"""What a worker counts: the steps of every entry, and, for a request that asks for it, where its time went."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from mstar.graph.program import CallOp, Plan
from mstar.spec.graph import Times
from mstar.spec.request import Profile, Stage

__all__ = ["ROW_BUCKETS", "RequestProfile", "StepTotals", "device_memory"]

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper ends of the classes in which the sizes of steps are counted; a last class has no end."""


class StepTotals:
    """Sums over all steps of a worker, by node and entry; read when somebody asks for the worker's status."""

    def __init__(self, plan: Plan):
        self._totals: dict[tuple[str, str], _Total] = {}
        self._counted = _counted_loops(plan)

    def add(self, node: str, entry: str, rows: int, tokens: int, seconds: float) -> None:
        """One step has run; the arguments are those of the hook ``mstar_step_done``."""
        total = self._totals.get((node, entry))
        if total is None:
            total = self._totals[node, entry] = _Total()
        total.steps += 1
        total.rows += rows
        total.tokens += tokens
        total.seconds += seconds
        total.sizes[min((rows - 1).bit_length(), len(ROW_BUCKETS))] += 1

    def report(self) -> list[dict[str, Any]]:
        """Plain data, one item an entry. ``sizes`` are pairs: the upper end of a class (``None``: no end) and the steps
        of so many rows; ``counted_loop`` tells entries that loops of a set number of rounds call."""
        return [
            {
                "node": node,
                "entry": entry,
                "steps": total.steps,
                "rows": total.rows,
                "tokens": total.tokens,
                "seconds": total.seconds,
                "sizes": list(zip((*ROW_BUCKETS, None), total.sizes, strict=True)),
                "counted_loop": (node, entry) in self._counted,
            }
            for (node, entry), total in self._totals.items()
        ]


class _Total:
    __slots__ = ("rows", "seconds", "sizes", "steps", "tokens")

    def __init__(self) -> None:
        self.steps = self.rows = self.tokens = 0
        self.seconds = 0.0
        self.sizes = [0] * (len(ROW_BUCKETS) + 1)


def _counted_loops(plan: Plan) -> set[tuple[str, str]]:
    """The entries that are called by a loop whose rounds are counted, as those of denoising are."""
    return {
        (op.call.node, op.entry.name)
        for program in plan.programs.values()
        for op in program
        if isinstance(op, CallOp) and op.loops and all(isinstance(stop, Times) for stop in op.loops[-1].stops)
    }


class RequestProfile:
    """The stages of one request, told call by call.

    :param arrival: of the request, in monotonic seconds.
    """

    def __init__(self, arrival: float):
        self._arrival, self._arrived = arrival, time.time() - (time.monotonic() - arrival)
        self._stages: dict[tuple[str, str], Stage] = {}

    def launched(self, node: str, entry: str, tokens: int, rows: int, now: float) -> None:
        """A call of the request, or a piece of one, has been launched in a step of *rows*."""
        stage = self._stages.get((node, entry))
        if stage is None:
            stage = self._stages[node, entry] = Stage(node=node, entry=entry, first=now - self._arrival)
        stage.calls += 1
        stage.tokens += tokens
        stage.rows += rows

    def landed(self, node: str, entry: str) -> None:
        self._stages[node, entry].last = time.monotonic() - self._arrival

    def done(self, started: float | None) -> Profile:
        """The whole of it. *started*: when the request was admitted, in monotonic seconds."""
        for stage in self._stages.values():
            stage.last = max(stage.last, stage.first)
        return Profile(
            arrived=self._arrived,
            queued_s=None if started is None else started - self._arrival,
            ended_s=time.monotonic() - self._arrival,
            stages=list(self._stages.values()),
        )


def device_memory(device: torch.device) -> Mapping[str, int]:
    """Bytes: ``resident`` of this process; on a GPU ``allocated`` and ``reserved`` by torch here, ``used`` by everyone,
    and the device's ``total``."""
    report = {"resident": psutil.Process().memory_info().rss}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        report |= {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "used": total - free,
            "total": total,
        }
    return report

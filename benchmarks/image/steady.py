"""Times as work goes on: call after call without a wait, for as long as a picture takes, several pictures one after the
other.

A call that is timed by itself begins on a device that has just rested: its clock is higher than the one that the card's
power lets it keep, so products are a third faster than they are in a picture.
"""

from __future__ import annotations

import atexit
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

__all__ = ["captured", "seconds", "steady"]

_WARM_S = 0.6
"""So long a GPU works before the clock runs: its clocks have settled then."""
_MEASURED_S = 1.0
_SAMPLE_MS = 20


def seconds(function: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """The median time of one call of *function*, each of them waited for."""
    function()
    found = []
    for _ in range(rounds):
        _wait(device)
        began = time.perf_counter()
        function()
        _wait(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def steady(function: Callable[[], Any], device: torch.device, rounds: int, times: int, name: str) -> dict[str, float]:
    """``NAME_s``: the median, over *rounds* or as many as fit into a second, of the time of a call when *times* calls
    follow one another. On a GPU also ``NAME_mhz`` and ``NAME_watts``, of its processors, meanwhile."""
    found: list[float] = []
    gpu = device.type == "cuda"
    watch = _watch(device) if gpu else None

    def one_round() -> float:
        _wait(device)
        began = time.perf_counter()
        for _ in range(times):
            function()
        _wait(device)
        return (time.perf_counter() - began) / times

    until = time.perf_counter() + (_WARM_S if gpu else 0.0)
    one_round()
    while time.perf_counter() < until:
        one_round()
    began = time.monotonic()
    while len(found) < rounds and (len(found) < 2 or time.monotonic() < began + _MEASURED_S):
        found.append(one_round())
    facts = watch.since(began) if watch is not None else {}
    return {f"{name}_s": statistics.median(found)} | {f"{name}_{what}": value for what, value in facts.items()}


def captured(function: Callable[[], Any], device: torch.device) -> tuple[Callable[[], Any], Any]:
    """What repeats *function*, as one graph where there are graphs, and what it returned, which is filled anew each
    time. *function* is warm."""
    if device.type != "cuda":
        return function, function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph.replay, out


class _Watch:
    """Clock and power of a GPU's processors, all the time: ``nvidia-smi`` takes a second to begin."""

    def __init__(self, number: int):
        self._seen: list[tuple[float, float, float]] = []
        asked = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", str(_SAMPLE_MS)]
        self._process = subprocess.Popen(["nvidia-smi", "-i", str(number), *asked], stdout=subprocess.PIPE, text=True)
        atexit.register(self._process.kill)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if len(row := _numbers(line)) == 2:
                self._seen.append((time.monotonic(), row[0], row[1]))

    def since(self, began: float) -> dict[str, float]:
        """Medians since *began* (monotonic seconds); empty where nothing was seen."""
        seen = [sample for sample in self._seen if sample[0] >= began]
        if not seen:
            return {}
        return {"mhz": statistics.median(s[1] for s in seen), "watts": statistics.median(s[2] for s in seen)}


@cache
def _watch(device: torch.device) -> _Watch | None:
    if shutil.which("nvidia-smi") is None:
        return None
    return _Watch(device.index if device.index is not None else torch.cuda.current_device())


def _numbers(line: str) -> list[float]:
    try:
        return [float(word) for word in line.split(",")]
    except ValueError:  # what the driver does not tell, or a line that was cut off
        return []


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

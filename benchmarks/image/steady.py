"""Times as work goes on: call after call without a wait, for as long as a picture takes, several pictures one after the
other.

A call that is timed by itself begins on a device that has just rested: its clock is higher than the one that the card's
power lets it keep, so products are a third faster than they are in a picture.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["captured", "seconds", "steady"]

_WARM_S = 1.0
"""So long a GPU works before the clock runs: its clocks have settled then."""
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
    """``NAME_s``: the median, over *rounds*, of the time of a call when *times* calls follow one another. On a GPU also
    ``NAME_mhz`` and ``NAME_watts``, of its processors, meanwhile."""
    found: list[float] = []

    def one_round() -> float:
        _wait(device)
        began = time.perf_counter()
        for _ in range(times):
            function()
        _wait(device)
        return (time.perf_counter() - began) / times

    with _sampled(device) as samples:
        until = time.perf_counter() + (_WARM_S if device.type == "cuda" else 0.0)
        one_round()
        while time.perf_counter() < until:
            one_round()
        found += [one_round() for _ in range(rounds)]
    return {f"{name}_s": statistics.median(found)} | {f"{name}_{what}": value for what, value in samples.items()}


def captured(function: Callable[[], Any], device: torch.device) -> tuple[Callable[[], Any], Any]:
    """What repeats *function*, as one graph where there are graphs, and what it returned, which is filled anew each
    time. *function* is warm."""
    if device.type != "cuda":
        return function, function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph.replay, out


@contextmanager
def _sampled(device: torch.device) -> Iterator[dict[str, float]]:
    """Filled at the end with the medians of clock and power in the last half of the time; empty where nobody knows."""
    found: dict[str, float] = {}
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        yield found
        return
    number = device.index if device.index is not None else torch.cuda.current_device()
    asked = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", str(_SAMPLE_MS)]
    with subprocess.Popen(["nvidia-smi", "-i", str(number), *asked], stdout=subprocess.PIPE, text=True) as watcher:
        try:
            yield found
        finally:
            watcher.terminate()
            said, _ = watcher.communicate()
    rows = [row for line in said.splitlines() if len(row := _numbers(line)) == 2]
    late = rows[len(rows) // 2 :]
    if late:
        found["mhz"] = statistics.median(row[0] for row in late)
        found["watts"] = statistics.median(row[1] for row in late)


def _numbers(line: str) -> list[float]:
    try:
        return [float(word) for word in line.split(",")]
    except ValueError:  # what the driver does not tell, or a line that was cut off
        return []


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""The steps of many pictures at once: which rows share one, what a row costs in it, and how busy the device is."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mstar
from image.engine import PROMPT, deployment, settings_of
from image.shapes import Shape
from image.timeline import read_trace
from mstar.worker.trace_file import DEVICE

__all__ = ["load", "steps_of"]


def load(shape: Shape, folder: Path, at_once: Sequence[int], args: argparse.Namespace, trace: Path) -> dict[str, Any]:
    """:func:`steps_of` for each number of requests at once, as the engine's own timeline has it."""
    fields = deployment(shape, "graphs", args.device, at_once)
    fields["engine"]["trace"] = str(trace)
    knobs = {"width": shape.size, "height": shape.size, "num_inference_steps": shape.steps}
    times: dict[int, tuple[float, float]] = {}
    with mstar.load(shape.key, weights=str(folder), device=args.device, settings=settings_of(), **fields) as model:

        async def some(count: int) -> None:
            await asyncio.gather(*(model.agenerate(PROMPT, seed=seed, **knobs) for seed in range(count)))

        for count in at_once:
            asyncio.run(some(count))
            began = time.monotonic()
            asyncio.run(some(count))
            times[count] = began, time.monotonic()
    events = read_trace(trace)
    return {str(count): steps_of(events, *between) for count, between in times.items()}


def steps_of(events: Sequence[Mapping[str, Any]], began: float, ended: float) -> dict[str, Any]:
    """The device's steps between two moments of the monotonic clock, in seconds: ``steps``, one row for those that are
    alike, and the share of the time in which the device was ``busy``."""
    alike: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
    for event in events:
        begins = event.get("ts", 0.0) / 1e6
        if event.get("ph") != "X" or event.get("tid") != DEVICE or not began <= begins <= ended:
            continue
        said = event["args"]
        name = event["name"] if said["entry"] == "forward" else f"{event['name']}.{said['entry']}"
        alike[name, said["rows"], said["captured"]].append(event["dur"] / 1e3)
    steps = []
    for (name, rows, captured), spans in alike.items():
        ms = statistics.median(spans)
        more = {"times": len(spans), "ms": ms, "ms_a_row": ms / rows}
        steps.append({"step": name, "rows": rows, "captured": captured, **more})
    busy = sum(sum(spans) for spans in alike.values()) / 1e3 / (ended - began)
    return {"total_ms": (ended - began) * 1e3, "busy": busy, "steps": steps}

"""Runs some parts in a process of its own, and writes each one's result as a line of JSON as soon as it is known.

A part that breaks the device breaks this process only; a part that hangs is killed with it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT

__all__ = ["PARTS", "Job", "failure"]


@dataclass(frozen=True)
class Job:
    """What a child does. *folder*: where checkpoints are. *out*: the file that results are appended to.

    :param batches: those of ``decode`` and ``floors``; empty: the shape's own.
    :param deployment: fields of the deployment that are given otherwise.
    """

    shape: str
    parts: Sequence[str]
    device: str
    folder: str
    out: str
    batches: Sequence[int] = ()
    deployment: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def weights(self) -> Path:
        return Path(self.folder) / self.shape

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def weights(job: Job, state: dict[str, Any]) -> dict[str, Any]:
    from gpu.checkpoints import publish, size_on_disk
    from gpu.shapes import SHAPES

    there = job.weights.is_dir()
    folder = publish(SHAPES[job.shape], job.weights, job.device)
    return {"bytes": size_on_disk(folder), "written": not there}


def _lazy(module: str, function: str) -> Callable[[Job, dict[str, Any]], dict[str, Any]]:
    def run(job: Job, state: dict[str, Any]) -> dict[str, Any]:
        import importlib

        found: dict[str, Any] = getattr(importlib.import_module(module), function)(job, state)
        return found

    return run


PARTS: Mapping[str, Callable[[Job, dict[str, Any]], dict[str, Any]]] = {
    "weights": weights,
    "check": _lazy("gpu.check", "check"),
    "floors": _lazy("gpu.floors", "floors"),
    "decode": _lazy("gpu.decode", "decode"),
    "prefill": _lazy("gpu.prefill", "prefill"),
    "host": _lazy("gpu.host", "host"),
    "load": _lazy("gpu.decode", "load"),
    "timeline": _lazy("gpu.decode", "timeline"),
    "static": _lazy("gpu.peer", "static"),
    "continuous": _lazy("gpu.peer", "continuous"),
}
"""Each takes the job and what earlier parts of this process left behind (a loaded engine)."""


def failure(error: BaseException) -> dict[str, Any]:
    """What results say of *error*: with paths from the checkout on, not of the machine."""
    said, text = (
        part.replace(f"{ROOT}/", "")
        for part in (f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
    )
    return {"failed": said[:2000], "traceback": text[-8000:]}


def device_is_broken(device: str) -> bool:
    """Whether the device answers no more: after an illegal access every later call fails."""
    if device == "cpu" or "torch" not in sys.modules:
        return False
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def run(job: Job, say: Callable[[str, dict[str, Any]], None]) -> bool:
    """Run *job*'s parts in order; whether all were run (each may have failed)."""
    state: dict[str, Any] = {}
    for part in job.parts:
        began = time.perf_counter()
        print(f"[{job.shape}] {part} …", flush=True)
        try:
            found = PARTS[part](job, state)
        except Exception as error:
            found = failure(error)
            _drop_engine(state)  # nobody knows what it holds
        found["part_seconds"] = time.perf_counter() - began
        say(part, found)
        if "failed" in found and device_is_broken(job.device):
            return False
    return True


def _drop_engine(state: dict[str, Any]) -> None:
    if engine := state.pop("engine", None):
        try:
            engine.close()
        except Exception as error:
            print(f"  the engine could not be closed: {error}", flush=True)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    with Path(job.out).open("a", encoding="utf-8") as out:

        def say(part: str, found: dict[str, Any]) -> None:
            out.write(json.dumps({"part": part, "found": found}) + "\n")
            out.flush()

        complete = run(job, say)
    sys.stdout.flush()
    os._exit(0 if complete else 75)  # libraries' threads must not hold up the next part


if __name__ == "__main__":
    main()

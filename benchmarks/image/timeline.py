"""Where the time of one picture goes: what the host does before, each step on the device, the gaps between them and
what the host does meanwhile, and the way out.

All of it is in the engine's own timeline (``engine.trace``), which costs a step a few microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.worker.trace_file import DEVICE, HOST

__all__ = ["Asked", "digest", "read_trace", "stages"]

_STAGE = {"text_encoder": "text", "dit.prepare": "text", "vae_decoder": "decode"}
"""Node, or node and entry, of a step → what it is of a picture. Everything else of the denoiser is ``denoise``."""
_ALL = "step"
"""The host's span that has all stages of a pass of its loop."""


@dataclass(frozen=True)
class Asked:
    """One request: from when to when (seconds of the monotonic clock), and how long of it the processor prepared it."""

    began: float
    ended: float
    prepared_s: float


@dataclass(frozen=True)
class _Span:
    """Milliseconds of the monotonic clock."""

    name: str
    began: float
    ended: float
    said: Mapping[str, Any]

    def within(self, began: float, ended: float) -> float:
        return max(0.0, min(ended, self.ended) - max(began, self.began))


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a timeline that has been closed."""
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def digest(events: Sequence[Mapping[str, Any]], asked: Asked) -> dict[str, Any]:
    """What happened to the one request that ran in the time of *asked*, in milliseconds.

    ``before``: until the worker had it (``prepare`` of it in the processor); ``wait``: until the device began;
    ``steps``: each with the ``gap`` before it and, in ``host``, what the worker did in the gap; ``out``: from the
    device's last step until the caller had the picture. ``stages``: sums of the steps by kind, their gaps apart.
    """
    began, ended = asked.began * 1e3, asked.ended * 1e3
    spans = [
        (event["tid"], _span(event)) for event in events if event["ph"] == "X" and began <= event["ts"] / 1e3 <= ended
    ]
    device = sorted((span for track, span in spans if track == DEVICE), key=lambda span: span.began)
    host = [span for track, span in spans if track == HOST and span.name != _ALL]
    taken = [event["ts"] / 1e3 for event in events if event["ph"] == "b" and event["name"] == "request"]
    submitted = next((at for at in taken if began <= at <= ended), None)
    if not device or submitted is None:
        raise RuntimeError("the timeline has no step of this request")
    steps, before = [], submitted
    for span in device:
        idle = {"gap": max(0.0, span.began - before), "host": _host(host, before, span.began)}
        steps.append({"step": _name(span), "ms": span.ended - span.began, **idle, **_how(span)})
        before = max(before, span.ended)
    kinds: dict[str, float] = {"text": 0.0, "denoise": 0.0, "decode": 0.0}
    for step in steps:
        node = step["step"].partition(".")[0]
        kinds[_STAGE.get(step["step"], _STAGE.get(node, "denoise"))] += step["ms"]
    return {
        "total": ended - began,
        "before": submitted - began,
        "prepare": asked.prepared_s * 1e3,
        "wait": steps[0]["gap"],
        "stages": kinds,
        "gaps": sum(step["gap"] for step in steps[1:]),
        "out": ended - before,
        "steps": steps,
    }


def stages(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """:func:`digest`'s figures as lines of a table that add up to the whole."""
    parts = {"before the worker": found["before"], "before the device": found["wait"]}
    parts |= {str(name): ms for name, ms in found["stages"].items()}
    parts |= {"between steps": found["gaps"], "out": found["out"]}
    return [{"part": name, "ms": ms, "share": ms / found["total"]} for name, ms in parts.items()]


def _span(event: Mapping[str, Any]) -> _Span:
    began = event["ts"] / 1e3
    return _Span(event["name"], began, began + event["dur"] / 1e3, event.get("args", {}))


def _name(span: _Span) -> str:
    entry = span.said.get("entry", "forward")
    return span.name if entry == "forward" else f"{span.name}.{entry}"


def _how(span: _Span) -> dict[str, Any]:
    return {name: span.said.get(name) for name in ("rows", "captured", "ahead")}


def _host(spans: Sequence[_Span], began: float, ended: float) -> dict[str, float]:
    """Milliseconds that the worker spent on each stage in a stretch of time; what is left it was waiting for commands
    or marked nothing."""
    found: dict[str, float] = {}
    for span in spans:
        if (ms := span.within(began, ended)) > 0:
            found[span.name] = found.get(span.name, 0.0) + ms
    return found

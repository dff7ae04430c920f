"""``--log-stats``: one line for each request to a model, with where its time went. Nothing that a client wrote."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mstar.runtime.watch import Outcome
from mstar.spec.request import Profile

if TYPE_CHECKING:
    from mstar_server.observe.watching import RequestWatch

__all__ = ["log_stats", "stats_of"]

log = logging.getLogger("mstar.stats")


def stats_of(watch: RequestWatch, outcome: Outcome, reason: str, profile: Profile | None) -> dict[str, Any]:
    """The figures of one request: times in seconds, ``None`` for what has not happened."""
    usage = outcome.usage
    figures: dict[str, Any] = {
        "request_id": watch.exchange_id,
        "answer": watch.id,
        "model": watch.model,
        "route": watch.route,
        "reason": reason,
        "prompt_tokens": outcome.prompt_tokens,
        "tokens": outcome.tokens,
        "cached": 0 if usage is None else usage.cached,
        "prepare_s": _between(watch.asked, watch.submitted),
        "queued_s": None if profile is None or profile.queued_s is None else round(profile.queued_s, 6),
        "first_output_s": _between(watch.arrived, watch.first),
        "first_audio_s": _between(watch.arrived, watch.first_audio),
        "total_s": _between(watch.arrived, outcome.ended),
        "outputs": watch.outputs,
    }
    if usage is not None:
        figures |= {f"in_{unit}": amount for unit, amount in usage.input.items() if unit != "tokens"}
        figures |= {f"out_{unit}": amount for unit, amount in usage.output.items() if unit != "tokens"}
    for stage in () if profile is None else profile.stages:
        figures[f"{stage.node}.{stage.entry}"] = {
            "calls": stage.calls,
            "tokens": stage.tokens,
            "mean_rows": round(stage.rows / stage.calls, 2),
            "first_s": round(stage.first, 6),
            "last_s": round(stage.last, 6),
        }
    return figures


def log_stats(watch: RequestWatch, outcome: Outcome, reason: str, profile: Profile | None) -> None:
    """Write the line of a request that has ended (``--log-stats``)."""
    figures = stats_of(watch, outcome, reason, profile)
    log.info("%s", _line(figures), extra={"fields": figures})


def _between(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)


def _line(figures: Mapping[str, Any]) -> str:
    """``name=value`` pairs; a stage as ``decoder.step=42x3.10[0.02…0.91s]``: calls, mean rows, from first to last."""
    words = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            span = f"{value['first_s']:.3f}…{value['last_s']:.3f}s"
            words.append(f"{name}={value['calls']}x{value['mean_rows']:g}[{span}]")
        elif value is not None:
            words.append(f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}")
    return " ".join(words)

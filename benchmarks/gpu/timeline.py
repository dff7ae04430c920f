"""What the device did in a window: kernels, their times, and how long it did nothing."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Span", "busy", "digest", "gaps", "profile_run", "profile_steps", "show_timeline"]

TOP = 14
_NAME_LENGTH = 120
_SHORT = 20_000
"""Nanoseconds below which a gap is one between kernels, and not one in which the host is waited for."""


class Span(NamedTuple):
    """One kernel or copy: name, and nanoseconds on the device's clock."""

    name: str
    begin: int
    end: int


def busy(spans: Iterable[Span]) -> int:
    """Nanoseconds in which at least one of *spans* ran."""
    total, until = 0, None
    for span in sorted(spans, key=lambda s: s.begin):
        if until is None or span.begin > until:
            total, until = total + span.end - span.begin, span.end
        elif span.end > until:
            total, until = total + span.end - until, span.end
    return total


def gaps(spans: Iterable[Span]) -> list[tuple[int, str, str]]:
    """When nothing ran: nanoseconds, what ran before and what behind; the longest first."""
    found, last = [], None
    for span in sorted(spans, key=lambda s: s.begin):
        if last is not None and span.begin > last.end:
            found.append((span.begin - last.end, last.name, span.name))
        if last is None or span.end > last.end:
            last = span
    return sorted(found, reverse=True)


def digest(spans: Sequence[Span], steps: int) -> dict[str, Any]:
    """Figures of *spans* that *steps* steps launched; times in µs a step.

    ``idle_share``: of the time from the first kernel's begin to the last one's end. A profiler lengthens gaps: it is an
    upper bound. ``gaps``: the longest ones, each by itself; ``short_gaps_us_per_step``: those below 20 µs, together.
    """
    if not spans:
        return {"steps": steps, "kernels_per_step": 0.0}
    begin, end = min(s.begin for s in spans), max(s.end for s in spans)
    working = busy(spans)
    times: dict[str, list[int]] = defaultdict(list)
    for span in spans:
        times[span.name].append(span.end - span.begin)
    slowest = sorted(times.items(), key=lambda item: -sum(item[1]))[:TOP]
    idle = gaps(spans)
    return {
        "steps": steps,
        "kernels_per_step": len(spans) / steps,
        "kinds": len(times),
        "span_us_per_step": (end - begin) / steps / 1e3,
        "busy_us_per_step": working / steps / 1e3,
        "idle_share": 1 - working / (end - begin) if end > begin else 0.0,
        "short_gaps_us_per_step": sum(ns for ns, _, _ in idle if ns < _SHORT) / steps / 1e3,
        "gaps": [
            {"us": ns / 1e3, "after": before[:_NAME_LENGTH], "before": behind[:_NAME_LENGTH]}
            for ns, before, behind in idle[:TOP]
        ],
        "top": [
            {
                "name": name[:_NAME_LENGTH],
                "per_step": len(each) / steps,
                "us_per_step": sum(each) / steps / 1e3,
                "us_median": statistics.median(each) / 1e3,
            }
            for name, each in slowest
        ],
    }


def profile_steps(run: Callable[[int, Callable[[], None]], Any], warm: int, steps: int) -> dict[str, Any]:
    """The :func:`digest` of *steps* steps under torch's profiler, which *warm* steps before them let settle.

    :param run: ``run(count, after)`` makes *count* steps and calls *after* at the end of each.
    """
    from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():
        raise RuntimeError("this PyTorch cannot profile a GPU")
    found: list[Any] = []
    plan = schedule(wait=0, warmup=warm, active=steps, repeat=1)
    with profile(
        activities=[ProfilerActivity.CUDA],
        schedule=plan,
        on_trace_ready=lambda p: found.extend(p.profiler.kineto_results.events()),
    ) as profiler:
        run(warm + steps, profiler.step)
    return digest(_spans(found), steps)


def profile_run(run: Callable[[], Any]) -> list[Span]:
    """What the device did while *run* ran, which waits for it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    return _spans(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]


def _spans(events: Iterable[Any]) -> list[Span]:
    from torch.autograd import DeviceType

    return [
        Span(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation() and not _is_marker(event.name())
    ]


def show_timeline(found: Mapping[str, Any]) -> None:
    """Print what :func:`digest` gave, a kernel a line: µs a step, launches a step, name."""
    if "top" not in found:
        return
    busy_us, span_us = found["busy_us_per_step"], found["span_us_per_step"]
    print(f"    busy {busy_us:.0f} of {span_us:.0f} us a step, {found['kernels_per_step']:.0f} kernels")
    for kernel in found["top"]:
        print(f"    {kernel['us_per_step']:9.1f} us {kernel['per_step']:7.1f}  {kernel['name'][:90]}", flush=True)
    print(f"    gaps below 20 us: {found['short_gaps_us_per_step']:.0f} us a step; the longest of all:")
    for gap in found["gaps"]:
        print(f"    {gap['us']:9.1f} us after {gap['after'][:50]}, before {gap['before'][:50]}", flush=True)


def _is_marker(name: str) -> bool:
    """Events on the device's track that are no work of it."""
    return name.startswith(("ProfilerStep", "Context Sync", "Stream Sync", "Event Sync", "Stream Wait"))

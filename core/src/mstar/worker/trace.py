"""The timeline of a worker (``engine.trace``): host stages, device steps, requests and counters, for Perfetto.

- The *host* track has one span for each pass of the worker's loop, and in it the stages: admit, schedule, plan, launch,
  commit, land (wait for the results), route, foresee.
- The *device* track has each step as the device ran it. On CUDA the times come from a pair of events for each step,
  read when both are done. On a CPU the launch computes, and its span is the device's.
- Each request has a track: queued, prefill (until its first token or other output), decode.
- Instants: cancels, retracts, failures. Counters: requests, rows, tokens/s, units of each pool.

Beside the clock and a few tuples nothing is made in the worker's thread; :mod:`mstar.worker.trace_file` writes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mstar.engine.engine import Flight
from mstar.engine.step import Work
from mstar.engine.trace import Trace
from mstar.resources.base import Resource
from mstar.spec.request import Done, EngineRequest, Failed
from mstar.worker.trace_file import DEVICE, HOST, Counters, Device, Info, Note, Stages, TraceFile

__all__ = ["DeviceClock", "Timeline", "open_trace"]

log = logging.getLogger(__name__)

_SAMPLE_NS = 50_000_000
"""Counters are written at most this often."""
_now = time.monotonic_ns


def open_trace(path: str | None, key: str, device: torch.device, resources: Mapping[str, Resource]) -> Trace:
    """The timeline of a worker of model *key* in file *path*; what does nothing, if there is none or it cannot be
    written."""
    if path is None:
        return Trace()
    try:
        file = TraceFile(Path(path), f"mstar worker of {key}", {HOST: "host", DEVICE: f"device {device}"})
    except OSError as error:
        log.warning("the timeline %s cannot be written (%s); serving goes on without", path, error.strerror or error)
        return Trace()
    log.info("writing a timeline to %s", path)
    return Timeline(file, resources, DeviceClock(device) if device.type == "cuda" else None)


class DeviceClock:
    """When steps ran on a CUDA device, in nanoseconds of the host's clock.

    CUDA tells the time between two events of a stream, to half a microsecond. Steps follow each other in one stream,
    so each is placed relative to the end of the one before. What the host knows corrects the sum of the roundings: no
    step begins before the host asked for it, or ends after the host saw that it had.

    :param event: makes an event that takes the time; for tests.
    """

    def __init__(self, device: torch.device, event: Callable[[], Any] | None = None):
        self._device = device
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._stream: Any = None
        self._spare: list[Any] = []
        self._open: tuple[Any, Any, int] | None = None
        self._pending: deque[tuple[Info, Any, Any, int]] = deque()
        self._last: tuple[Any, int] | None = None

    def begin(self, now: int) -> None:
        """The host will now tell the device what to do."""
        if self._stream is None and self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        spare = self._spare
        begin, end, _ = self._open or (
            spare.pop() if spare else self._event(),
            spare.pop() if spare else self._event(),
            0,
        )
        begin.record(self._stream)
        self._open = (begin, end, now)

    def end(self) -> None:
        """The host has done so."""
        if self._open is not None:
            self._open[1].record(self._stream)

    def keep(self, info: Info) -> None:
        """What was begun and ended last is *info*."""
        if self._open is not None:
            begin, end, asked = self._open
            self._pending.append((info, begin, end, asked))
            self._open = None

    def done(self, now: int) -> list[Device]:
        """The steps that the device has finished since the last call. Does not wait."""
        found = []
        while self._pending and self._pending[0][2].query():
            info, begin, end, asked = self._pending.popleft()
            found.append(self._place(info, begin, end, asked, now))
            self._spare.append(begin)
        return found

    def _place(self, info: Info, begin: Any, end: Any, asked: int, now: int) -> Device:
        earliest, began = 0, asked
        if self._last is not None:
            last, earliest = self._last
            began = earliest + int(last.elapsed_time(begin) * 1e6)
            self._spare.append(last)
        took = int(begin.elapsed_time(end) * 1e6)
        ended = min(max(began, asked) + took, now)
        began = max(ended - took, earliest)
        self._last = (end, ended)
        return Device(info, min(began, ended), ended)


class Timeline(Trace):
    """Writes what it is told to *file*. Also listens as observers do, to follow the requests.

    :param clock: of a device that runs beside the host.
    """

    def __init__(self, file: TraceFile, resources: Mapping[str, Resource], clock: DeviceClock | None):
        self._file, self._put, self._resources, self._clock = file, file.put, resources, clock
        self._began = 0
        self._marks: list[tuple[str, int, Info | int]] = []
        self._run = (0, 0)  # when the last launch began and ended
        self._landed = 0
        self._phases: dict[str, str] = {}
        self._prefilling: dict[str, None] = {}
        self._sampled = _now()
        self._rows = self._tokens = 0
        self._changed = self._rested = True

    # --- the loop -----------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        self._marks = []
        self._began = _now()

    def stage(self, name: str) -> None:
        self._marks.append((name, _now(), 0))

    def planned(self) -> None:
        now = _now()
        self._marks.append(("plan", now, 0))
        self._run = (now, now)
        if self._clock is not None:
            self._clock.begin(now)

    def ran(self) -> None:
        if self._clock is not None:
            self._clock.end()
        now = _now()
        self._marks.append(("launch", now, 0))
        self._run = (self._run[0], now)

    def launched(self, flight: Flight, captured: bool) -> None:
        work, number = flight.work, flight.number
        op = work[0].call.op
        tokens = sum([w.tokens for w in work])
        ahead = number > self._landed + 1
        info = Info(number, op.call.node, op.entry.name, len(work), tokens, captured, ahead)
        self._marks[-1] = ("launch", self._marks[-1][1], info)
        self._marks.append(("commit", _now(), number))
        if self._clock is not None:
            self._clock.keep(info)
        else:
            self._put(Device(info, *self._run))
        self._rows = len(work)
        self._tokens += tokens

    def failed(self, work: Sequence[Work], error: Exception) -> None:
        now = _now()
        self._marks.append(("failed", now, 0))
        op = work[0].call.op
        said = f"{type(error).__name__}: {error}"
        args = {"node": op.call.node, "entry": op.entry.name, "rows": len(work), "error": said[:500]}
        self._put(Note("i", "step failed", now, args=args))

    def landed(self, flight: Flight) -> None:
        self._landed = max(self._landed, flight.number)
        self._marks.append(("land", _now(), flight.number))

    def routed(self, flight: Flight) -> None:
        self._marks.append(("route", _now(), flight.number))

    def retracted(self, flight: Flight, request: str) -> None:
        self._put(Note("i", "retract", _now(), args={"request": request, "step": flight.number}))

    def end(self, running: int, waiting: int, answering: Callable[[str], bool]) -> None:
        now = _now()
        self._put(Stages(self._began, self._marks))
        if self._prefilling:
            for request in [request for request in self._prefilling if answering(request)]:
                self._enter(request, "decode", now)
        if self._clock is not None:
            self._read_clock(now)
        if self._rested:
            self._rested, self._sampled = False, self._began
        self._changed = True
        if now - self._sampled >= _SAMPLE_NS:
            self._sample(now, running, waiting)

    def rest(self, running: int, waiting: int) -> None:
        if self._clock is not None:
            self._read_clock(_now())
        if self._changed:
            self._rows = 0
            self._sample(_now(), running, waiting)
            self._changed = False
        self._rested = True

    def close(self) -> None:
        self._file.close()

    def _read_clock(self, now: int) -> None:
        assert self._clock is not None
        try:
            steps = self._clock.done(now)
        except RuntimeError as error:  # the device is lost: the worker will see for itself
            log.debug("the device's times cannot be read", exc_info=error)
            self._clock = None
            return
        for step in steps:
            self._put(step)

    def _sample(self, now: int, running: int, waiting: int) -> None:
        since = max(now - self._sampled, 1)
        speed = round(self._tokens * 1e9 / since, 1)
        self._sampled, self._tokens = now, 0
        values: dict[str, dict[str, float]] = {
            "requests": {"running": running, "waiting": waiting},
            "rows": {"rows": self._rows},
            "tokens/s": {"tokens/s": speed},
        }
        for name, resource in self._resources.items():
            used, total, cached = resource.usage()
            if total:
                values[f"{name} in use"] = {"used": used, "cached": cached}
        self._put(Counters(now, values))

    # --- requests -----------------------------------------------------------------------------------------------------
    def mstar_request_submitted(self, request: EngineRequest) -> None:
        now = _now()
        self._changed = True
        self._put(Note("b", "request", now, request.id, {"request": request.id, "tenant": request.tenant}))
        self._enter(request.id, "queued", now)

    def mstar_request_started(self, request: EngineRequest, queued_s: float) -> None:
        self._enter(request.id, "prefill", _now())

    def mstar_request_refused(self, request: EngineRequest, event: Failed) -> None:
        args = {"request": request.id, "code": event.code, "message": event.message}
        self._put(Note("i", "refuse", _now(), args=args))

    def mstar_request_ended(self, request: EngineRequest, event: Done | Failed) -> None:
        now = _now()
        self._changed = True
        phase = self._phases.pop(request.id)
        self._prefilling.pop(request.id, None)
        if isinstance(event, Failed):
            args: dict[str, Any] = {"reason": event.code, "message": event.message}
            self._put(Note("i", "fail", now, args={"request": request.id, **args}))
        else:
            args = {"reason": event.reason, "usage": event.usage}
            if event.reason == "cancelled":
                self._put(Note("i", "cancel", now, args={"request": request.id}))
        self._put(Note("e", phase, now, request.id))
        self._put(Note("e", "request", now, request.id, args))

    def _enter(self, request: str, phase: str, now: int) -> None:
        before = self._phases.get(request)
        if before is not None:
            self._put(Note("e", before, now, request))
        self._phases[request] = phase
        self._put(Note("b", phase, now, request))
        self._prefilling.pop(request, None)
        if phase == "prefill":
            self._prefilling[request] = None

"""The loop that drives one worker, whatever carries its messages: commands in, one step, events out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mstar.cluster.transport import Ack, AskStatus, Report, StatusReport, Stop, UnlinkRank
from mstar.spec.request import Cancel, EngineRequest, Event, Push

__all__ = ["Channel", "Linked", "Pulse", "Steppable", "run_worker"]


@dataclass(frozen=True)
class Linked:
    """Another rank is ready, and *peer* is the way to it (:class:`mstar.worker.ranks.Peer`)."""

    rank: int
    peer: Any
    facts: dict[str, Any]


class Steppable(Protocol):
    """What the loop needs of a worker (:class:`mstar.worker.core.Worker`); one thread calls it."""

    def submit(self, request: EngineRequest) -> None: ...
    def push(self, push: Push) -> None: ...
    def cancel(self, cancel: Cancel) -> None: ...
    def ack(self, request: str, stream: str, items: int) -> None: ...
    def step(self) -> bool: ...
    def next_deadline(self) -> float | None: ...
    def events(self) -> list[Event]: ...
    def status(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Channel(Protocol):
    """The worker's end of a connection to its executor."""

    def receive(self, timeout: float | None) -> Sequence[Any]:
        """All commands that have come, in order, and what other ranks have sent. Waits up to *timeout* seconds (0: not
        at all; ``None``: for ever) for the first."""

    def send(self, reports: list[Report]) -> None:
        """Send *reports* in order, as one message."""


class Pulse:
    """When the step that runs now began (monotonic seconds); ``None`` between steps. Read by other threads."""

    def __init__(self) -> None:
        self.since: float | None = None

    def age(self) -> float:
        """Seconds that the current step has run, 0 when none does."""
        since = self.since
        return 0.0 if since is None else time.monotonic() - since


def run_worker(worker: Steppable, channel: Channel, pulse: Pulse) -> None:
    """Drive *worker* until :class:`~mstar.cluster.transport.Stop` comes. Whatever a step raises ends the loop."""
    busy = False
    while True:
        reports: list[Report] = []
        for command in channel.receive(0.0 if busy else _sleep(worker.next_deadline())):
            if type(command) is Stop:
                return
            _apply(worker, command, reports)
        pulse.since = time.monotonic()
        busy = worker.step()
        pulse.since = None
        reports.extend(worker.events())
        if reports:
            channel.send(reports)


def _sleep(deadline: float | None) -> float | None:
    """Seconds to wait for a command; at least a millisecond, so that a deadline just passed is not polled for, and at
    most an hour: a wait of millions of years overflows the clocks of operating systems."""
    return None if deadline is None else min(max(deadline - time.monotonic(), 0.001), 3600.0)


def _apply(worker: Any, command: Any, reports: list[Report]) -> None:
    """What *command* asks of *worker*, a :class:`Steppable`; of a layout's ranks, also what they send each other."""
    match command:
        case Ack():
            worker.ack(command.request, command.stream, command.items)
        case EngineRequest():
            worker.submit(command)
        case Cancel():
            worker.cancel(command)
        case Push():
            worker.push(command)
        case AskStatus():
            reports.append(StatusReport(number=command.number, status=worker.status()))
        case Linked():
            worker.link(command.rank, command.peer, command.facts)
        case UnlinkRank():
            worker.unlink(command.rank, command.reason)
        case _:
            worker.take(command)

"""What the worker and its engine tell of where a step's time goes. Here nobody listens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mstar.engine.engine import Flight
    from mstar.engine.step import Work

__all__ = ["Trace"]


class Trace:
    """Takes marks on the way of a step and does nothing with them; :class:`mstar.worker.trace.Timeline` writes them.

    A mark says what the host has done since the mark before, so that stages follow each other without gaps. Called by
    the worker's thread alone.
    """

    def begin(self) -> None:
        """The worker looks for a step to do."""

    def stage(self, name: str) -> None:
        """Since the last mark the host was busy with *name*."""

    def planned(self) -> None:
        """The step's inputs are on their way; what runs it is called next."""

    def ran(self) -> None:
        """The device has been told all of the step."""

    def launched(self, flight: Flight, captured: bool) -> None:
        """The step is committed. *captured*: by a captured graph."""

    def failed(self, work: Sequence[Work], error: Exception) -> None:
        """A launch failed: it is run in halves, or its only request fails."""

    def landed(self, flight: Flight) -> None:
        """The host knows the results of *flight*."""

    def routed(self, flight: Flight) -> None:
        """Its requests have gone on."""

    def retracted(self, flight: Flight, request: str) -> None:
        """*request* had ended before *flight*, which ran it once more."""

    def end(self, running: int, waiting: int, answering: Callable[[str], bool]) -> None:
        """The step is done. *running* and *waiting*: requests now. *answering*: whether a request has a first token or
        other output."""

    def rest(self, running: int, waiting: int) -> None:
        """There was nothing to do."""

    def close(self) -> None:
        """The worker ends."""

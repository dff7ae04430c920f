"""Who watches the requests of a service: for metrics, traces and logs. Called on the service's event loop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mstar.spec.processor import Delta
from mstar.spec.request import Done, EngineRequest, Event, Failed, Profile, Usage

if TYPE_CHECKING:
    from mstar.spec.model import ModelSpec
    from mstar.spec.tasks import Task

__all__ = ["Outcome", "Watch", "Watched", "Watcher"]


@dataclass(frozen=True)
class Outcome:
    """What became of a request.

    :param reason: its finish reason; ``None`` if it failed or nobody wanted the rest.
    :param error: why it failed. :param usage: if it ended well.
    :param tokens: generated, as far as they were taken. :param ended: when its reader was done, monotonic seconds.
    """

    reason: str | None = None
    error: BaseException | None = None
    usage: Usage | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    ended: float = field(default_factory=time.monotonic)


class Watch(Protocol):
    """What is told of one request. Nothing of it may raise or take long: it runs between the events of all requests.

    Every watch gets exactly one :meth:`ended`, whatever becomes of the request.
    """

    def prepared(self, request: EngineRequest) -> None:
        """The processor is done, the worker gets *request* next. May set its ``profile`` and ``traceparent``."""

    def heard(self, event: Event) -> None:
        """*event* has come from the worker; it is not rendered yet. Called for every one: it must be quick."""

    def made(self, delta: Delta) -> None:
        """*delta* has been rendered. Not called for text."""

    def ended(self, outcome: Outcome, profile: Profile | None) -> None:
        """The last call: reader and worker are both done with it. *profile*: the worker's, if one was asked for."""


class Watcher(Protocol):
    """Watches a service."""

    def begin(self, spec: ModelSpec, task: Task, request_id: str) -> Watch:
        """A request is about to be prepared. Called in the task, and so in the context, of whoever asks."""


class Watched:
    """The ends of a watched request. Its reader may be done before the worker is (a stop string, a client that left)
    or after it (a slow client); the watch is told when both are."""

    def __init__(self, watch: Watch):
        self.watch = watch
        self._outcome: Outcome | None = None
        self._last: Done | Failed | None = None
        self._told = False

    def refused(self, error: BaseException) -> None:
        """It never reached the worker."""
        self._tell(Outcome(error=error), None)

    def worker_ended(self, event: Done | Failed) -> None:
        self._last = self._last or event
        if self._outcome is not None:
            self._tell(self._outcome, self._last.profile)

    def reader_ended(self, outcome: Outcome) -> None:
        self._outcome = self._outcome or outcome
        if self._last is not None:
            self._tell(self._outcome, self._last.profile)

    def _tell(self, outcome: Outcome, profile: Profile | None) -> None:
        if not self._told:
            self._told = True
            self.watch.ended(outcome, profile)

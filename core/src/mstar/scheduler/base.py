"""The scheduler's contract. Plain data in, plain data out; no torch.

The worker tells the scheduler what is waiting and what is ready; the scheduler answers with which requests may start
and with the next batch. It never looks inside a request.

Cost: ``start`` and ``next`` may cost time proportional to what they return, never to what is waiting (promise P9).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mstar.spec.deployment import SchedulerOptions

__all__ = ["Batch", "Item", "Scheduler", "Ticket"]


@dataclass(slots=True)
class Ticket:
    """A request that waits for admission. *arrival* in seconds on the worker's monotonic clock. A larger *priority* is
    more urgent."""

    request: str
    tenant: str = ""
    priority: int = 0
    arrival: float = 0.0
    payload: Any = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Item:
    """A call that is ready to run for one request.

    :param group: items of one group may share a step: (node, entry, shape key). :param tokens: length along the packed
        inputs still to run (1 for calls without). :param chunkable: may be cut into several steps.
    :param decode: a step of a loop that is already running for this request: it goes before new work.
    :param deadline: monotonic seconds by which the result should be there (playback), or ``None``.
    :param priority: a larger number is more urgent. :param cancelled: the item is dropped instead of run.
    :param rest: the call has more tokens, which are for a later step. :param patient: nothing but its deadline asks for
        the result, so the item may wait for company.
    :param rows: of a step that it takes. More than one: calls of so many requests that go on together, a *cohort*. It
        is nobody's (*request* is empty), has the priority that all of them have and the earliest of their deadlines;
        some of its requests may end before it runs. :param apart: of a cohort, an item for each of its calls.
    """

    request: str
    group: tuple[Any, ...]
    tokens: int = 1
    chunkable: bool = False
    decode: bool = False
    deadline: float | None = None
    priority: int = 0
    payload: Any = None
    cancelled: bool = False
    rest: bool = False
    patient: bool = False
    rows: int = 1
    apart: Callable[[], Sequence[Item]] | None = None


@dataclass(slots=True)
class Batch:
    """One step: items of one group and how many tokens of each. Decodes come first."""

    group: tuple[Any, ...]
    items: list[Item] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class Scheduler(abc.ABC):
    """A scheduling policy.

    :param options: in a worker with the numbers that its device has where the deployment says nothing.
    :param group_limits: the most rows of one step of a group (:attr:`mstar.spec.graph.NodeSpec.max_rows`), or ``None``.
    """

    cohorts: bool = False
    """Whether it takes cohorts: items of several rows. Such an item runs whole, in a step that has room for all of its
    rows and tokens, or the items that it stands for are put in its place (:attr:`Item.apart`). Others get an item for
    each call, which costs the host more."""

    @abc.abstractmethod
    def __init__(self, options: SchedulerOptions, group_limits: Callable[[tuple[Any, ...]], int | None]): ...

    @abc.abstractmethod
    def submit(self, ticket: Ticket) -> None:
        """Queue a request. Raises :class:`mstar.spec.errors.TooBusy` (with ``retry_after``) when the queue is full."""

    @abc.abstractmethod
    def start(self, admit: Callable[[Ticket], bool]) -> Sequence[Ticket]:
        """The requests that start now. *admit* tries to reserve everything that a request needs; when it says no, the
        request stays first in its line, so that a large request is not starved by small ones behind it."""

    @abc.abstractmethod
    def ready(self, item: Item) -> None:
        """*item* may run. After a step that leaves part of a call undone, the worker hands the rest in again, with the
        same group and payload; it keeps its place."""

    @abc.abstractmethod
    def forget(self, request: str) -> Ticket | None:
        """The request ended: drop its ticket (returned if it was still waiting) and all of its ready items."""

    @abc.abstractmethod
    def drop(self, item: Item) -> None:
        """*item*, which is ready, is not to run after all."""

    @abc.abstractmethod
    def next(self, now: float, may_run: Callable[[tuple[Any, ...]], bool] | None = None) -> Batch | None:
        """The next step's batch, removed from the ready items; ``None`` when nothing is ready.

        :param may_run: whether a group's step can begin now; others keep their place. Given where several ranks run
            steps: some of them may be busy. ``None``: every group can."""

    @property
    @abc.abstractmethod
    def idle(self) -> bool:
        """Whether no item is ready."""

    @property
    @abc.abstractmethod
    def waiting(self) -> int:
        """Requests that wait for admission."""

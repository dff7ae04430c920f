"""Running answers: start them, merge what they say, and end them when nobody listens any more.

:func:`start` is the one way from a route to the engine. What it starts belongs to the exchange that it is called in
(:mod:`mstar_server.exchange`): it carries the caller's name and the time that is left, and it is cancelled when the
client leaves or cancels, whatever the route does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from mstar.spec.processor import Delta
from mstar.spec.tasks import Task
from mstar_server.exchange import current
from mstar_server.protocols import Answer, Generates, Service, Takeable

__all__ = ["Merged", "begin", "cancel", "release", "start"]

QUEUED_DELTAS = 64
"""Deltas that wait for a slow client before its request stops being drained (the engine's back-pressure takes over)."""


async def start(
    service: Generates, tasks: Sequence[Task], request_id: str, samples: int | None = None, *, outlives: bool = False
) -> list[Answer]:
    """Start *tasks*; all of them or none.

    :param samples: so many tasks in a row (default: all) are samples of one prompt, which is computed once.
    :param outlives: for work that goes on when its exchange has ended (a job that is asked for later): the caller keeps
        its own books, and cancels.
    """
    answers: list[Answer] = []
    try:
        for number, task in enumerate(tasks):
            first = number - number % (samples or len(tasks))
            name = request_id if len(tasks) == 1 else f"{request_id}-{number}"
            sibling_of = None if first == number else answers[first].id
            answers.append(await _start_one(service, task, name, sibling_of, outlives))
    except BaseException:
        cancel(answers)
        raise
    return answers


async def _start_one(service: Generates, task: Task, name: str, sibling_of: str | None, outlives: bool) -> Answer:
    exchange = current()
    if exchange is None:
        return await service.generate(task, name, sibling_of)
    if outlives:
        return await service.generate(replace(task, tenant=exchange.tenant), name, sibling_of)
    exchange.enter()
    task = replace(task, tenant=exchange.tenant, timeout=exchange.remaining())
    answer = await service.generate(task, name, sibling_of)
    exchange.adopt(answer)
    return answer


def release(answer: Answer) -> None:
    """*answer*, one of very many that follow one another, has ended and has been read: nothing keeps it any longer."""
    exchange = current()
    if exchange is not None:
        exchange.release(answer)


def cancel(answers: Sequence[Answer]) -> None:
    """Cancel those of *answers* that have not ended."""
    for answer in answers:
        if answer.finish_reason is None:
            answer.cancel("cancelled")


class _Pumped:
    """The deltas of an answer that can only be iterated, taken without waiting."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._room = asyncio.Event()
        self._wake: Callable[[], None] | None = None
        self._task = asyncio.ensure_future(self._pump())

    async def _pump(self) -> None:
        try:
            async for delta in self._answer:
                self._deltas.append(delta)
                self._call()
                if len(self._deltas) >= QUEUED_DELTAS:
                    self._room.clear()
                    await self._room.wait()
        except Exception as error:  # carried over to the reader
            self._error = error
        self._call()

    def _call(self) -> None:
        if self._wake is not None:
            self._wake()

    def take_now(self) -> list[Delta] | None:
        if deltas := self._deltas:
            self._deltas = []
            self._room.set()
            return deltas
        if self._error is not None:
            raise self._error
        return None if self._task.done() else []

    def listen(self, wake: Callable[[], None] | None) -> None:
        self._wake = wake
        if wake is None:
            self._task.cancel()


class Merged:
    """The deltas of one or more answers as pairs (which answer, delta), in order of arrival; what has come of one
    answer since the last look stays together.

    An answer's end is the pair (which, ``None``). An answer that fails raises its error and ends them all. Close it
    when done: what still runs is cancelled.
    """

    def __init__(self, answers: Sequence[Answer]):
        self.answers = answers
        self._loop = asyncio.get_running_loop()
        self._head: list[tuple[int, Delta | None]] = []
        self._error: Exception | None = None
        self._open = len(answers)
        self._ready: dict[int, None] = {}  # answers that may have something, in the order in which they said so
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._until = 0.0
        self._sources = [each if isinstance(each, Takeable) else _Pumped(each) for each in answers]
        for which, source in enumerate(self._sources):
            source.listen(partial(self._wake, which))

    def _wake(self, which: int) -> None:
        self._ready[which] = None
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def begin(self, seconds: float) -> None:
        """Wait until every answer has said something, at most *seconds*; raises the error of one that failed."""
        silent = set(range(len(self.answers)))
        until = self._loop.time() + seconds
        while True:
            self._collect()
            silent.difference_update(which for which, _ in self._head)
            if silent and self._error is not None:
                raise self._error
            if not silent or len(self._head) >= QUEUED_DELTAS or not await self._wait(until):
                return

    @property
    def done(self) -> bool:
        """Every answer has ended and all of it has been taken."""
        return self._open == 0

    async def next_batch(self, seconds: float | None) -> list[tuple[int, Delta | None]]:
        """All pairs that are there by now, after waiting for the first; none after a silence of *seconds*.

        In batches, so that whoever sends them yields to the event loop, and learns of a disconnect, between two sends.
        """
        self._collect()
        if not (self._head or self._error):
            until = None if seconds is None else self._loop.time() + seconds
            while not (self._head or self._error):
                if not await self._wait(until):
                    return []
                self._collect()
        batch, self._head = self._head, []
        if not batch and self._error is not None:
            raise self._error  # what came before it has been delivered
        for _, delta in batch:
            if delta is None:
                self._open -= 1
        return batch

    def _collect(self) -> None:
        """Take what is there. Rendering happens here, and what has been rendered is acknowledged to the worker: so
        nothing is taken for a client that is not ready for more."""
        while self._ready and self._error is None:
            which = next(iter(self._ready))
            try:
                deltas = self._sources[which].take_now()
            except Exception as error:
                self._error = error
                return
            if deltas:
                self._head += [(which, delta) for delta in deltas]
                continue  # perhaps that was all of it
            del self._ready[which]
            if deltas is None:
                self._head.append((which, None))
                self._sources[which].listen(None)

    async def _wait(self, until: float | None) -> bool:
        """Until an answer may have something; false if that was not before *until*, in the loop's time."""
        if self._ready:
            return True
        self._until = math.inf if until is None else until
        if until is not None and (self._timer is None or self._timer.when() > until):
            self._stop_timer()
            self._timer = self._loop.call_at(until, self._on_time)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        return bool(self._ready)

    def _on_time(self) -> None:
        """One timer serves many waits, each of which only moves its end: most are over long before."""
        self._timer = None
        if self._waiter is None or self._until == math.inf:
            return
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._on_time)
        elif not self._waiter.done():
            self._waiter.set_result(None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Cancel what has not ended. May be called more than once."""
        self._stop_timer()
        for source in self._sources:
            source.listen(None)
        cancel(self.answers)


async def begin(
    service: Service, tasks: Sequence[Task], request_id: str, seconds: float, samples: int | None = None
) -> Merged:
    """:func:`start`, then wait for first events, at most *seconds*, so that a refusal still has its status line."""
    merged = Merged(await start(service, tasks, request_id, samples))
    try:
        await merged.begin(seconds)
    except BaseException:
        merged.close()
        raise
    return merged

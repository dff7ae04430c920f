"""Running answers: start them, merge what they say, and end them when nobody listens any more.

:func:`start` is the one way from a route to the engine. What it starts belongs to the exchange that it is called in
(:mod:`mstar_server.exchange`): it carries the caller's name and the time that is left, and it is cancelled when the
client leaves or cancels, whatever the route does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mstar.spec.processor import Delta
from mstar.spec.tasks import Task
from mstar_server.exchange import current
from mstar_server.protocols import Answer, Service

__all__ = ["Merged", "begin", "cancel", "start"]

QUEUED_DELTAS = 64
"""Deltas that wait for a slow client before its request stops being drained (the engine's back-pressure takes over)."""


async def start(
    service: Service, tasks: Sequence[Task], request_id: str, samples: int | None = None, *, outlives: bool = False
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


async def _start_one(service: Service, task: Task, name: str, sibling_of: str | None, outlives: bool) -> Answer:
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


def cancel(answers: Sequence[Answer]) -> None:
    """Cancel those of *answers* that have not ended."""
    for answer in answers:
        if answer.finish_reason is None:
            answer.cancel("cancelled")


class Merged:
    """The deltas of one or more answers in order of arrival, as pairs (which answer, delta).

    An answer's end is the pair (which, ``None``). An answer that fails raises its error and ends them all. Close it
    when done: what still runs is cancelled.
    """

    def __init__(self, answers: Sequence[Answer]):
        self.answers = answers
        self._head: deque[tuple[int, Any]] = deque()
        self._queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(QUEUED_DELTAS)
        self._open = len(answers)
        self._pumps = [asyncio.ensure_future(self._pump(i, answer)) for i, answer in enumerate(answers)]

    async def _pump(self, which: int, answer: Answer) -> None:
        put = self._queue.put
        try:
            async for delta in answer:
                await put((which, delta))
        except Exception as error:  # carried over to the consumer, which raises it
            await put((which, error))
        else:
            await put((which, None))

    async def begin(self, seconds: float) -> None:
        """Wait until every answer has said something, at most *seconds*; raises the error of one that failed."""
        silent = set(range(len(self.answers)))
        try:
            async with asyncio.timeout(seconds):
                while silent and len(self._head) < QUEUED_DELTAS:
                    which, item = await self._queue.get()
                    if isinstance(item, Exception):
                        raise item
                    self._head.append((which, item))
                    silent.discard(which)
        except TimeoutError:
            return

    @property
    def done(self) -> bool:
        """Every answer has ended and all of it has been taken."""
        return self._open == 0

    async def next_batch(self, seconds: float) -> list[tuple[int, Delta | None]]:
        """All pairs that are there by now, after waiting for the first; none after a silence of *seconds*.

        In batches, so that whoever sends them yields to the event loop, and learns of a disconnect, between two sends.
        """
        head, queue = self._head, self._queue
        if not head and queue.empty():
            try:
                async with asyncio.timeout(seconds):
                    head.append(await queue.get())
            except TimeoutError:
                return []
        while not queue.empty():
            head.append(queue.get_nowait())
        batch: list[tuple[int, Delta | None]] = []
        while head:
            pair = head[0]
            if isinstance(pair[1], Exception):
                if batch:
                    break  # what came before the error is delivered first
                raise pair[1]
            batch.append(head.popleft())
            if pair[1] is None:
                self._open -= 1
        return batch

    def close(self) -> None:
        """Cancel what has not ended. May be called more than once."""
        for pump in self._pumps:
            pump.cancel()
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

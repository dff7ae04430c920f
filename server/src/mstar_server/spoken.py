"""A text in pieces as one answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from mstar.spec.errors import RequestError, TooBusy
from mstar.spec.processor import AudioDelta, Delta
from mstar.spec.request import Usage
from mstar.spec.tasks import SpeechTask
from mstar_server.answers import cancel, start
from mstar_server.protocols import Answer, Service

__all__ = ["Spoken"]

BUSY_S = 60.0
"""How long a piece waits for room while the queue is full. The first one does not: its client can be told so."""


class Spoken:
    """The sounds of *tasks*, one after the other, as one :class:`~mstar_server.protocols.Answer`.

    While one piece is heard the next one is made already; there are never more than two. An error of one ends them all.
    They are one request to a server that stops: it lets them end.
    """

    def __init__(self, service: Service, tasks: Sequence[SpeechTask], answer_id: str):
        self.id, self._hold, self._tasks = answer_id, service.hold(), tasks
        self._answers: list[Answer] = []
        self._ahead: asyncio.Task[Answer] | None = None
        self._cancelled: str | None = None
        self._ended = False

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self._answers)

    @property
    def completion_tokens(self) -> int:
        return sum(answer.completion_tokens for answer in self._answers)

    @property
    def usage(self) -> Usage | None:
        return self._answers[0].usage if len(self._answers) == 1 else None

    @property
    def finish_reason(self) -> str | None:
        """``length`` if any piece was cut short: the pieces after it do not make that good."""
        if self._cancelled is not None:
            return self._cancelled
        if not self._ended:
            return None
        reasons = [answer.finish_reason or "stop" for answer in self._answers]
        return "length" if "length" in reasons else reasons[-1]

    async def begin(self) -> None:
        """Hand in the first piece; what is wrong with the request is raised here."""
        try:
            self._answers.append(await self._start(0))
        except BaseException:
            self._hold.close()
            raise

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            async for delta in self._deltas():
                yield delta
        finally:
            self._hold.close()

    async def _deltas(self) -> AsyncIterator[Delta]:
        if not self._answers:
            await self.begin()
        for number in range(len(self._tasks)):
            if number:
                self._answers.append(await self._begun(number))
            async for delta in self._answers[number]:
                if self._cancelled is not None:
                    return
                if isinstance(delta, AudioDelta):
                    self._begin_next(number)
                    yield delta
            if self._cancelled is None and self._answers[number].finish_reason == "cancelled":
                self.cancel()  # by whoever knows the piece by its id
            if self._cancelled is not None:
                return
        self._ended = True

    @property
    def follow(self) -> None:
        """Nothing: all pieces are known from the start."""

    @property
    def heard(self) -> Mapping[str, int]:
        return {}

    async def push(self, stream: str, part: Any, end: bool = False) -> range:
        raise RequestError("speech takes nothing while it runs", param=stream)

    def cancel(self, reason: str = "cancelled") -> None:
        if self._ended or self._cancelled is not None:
            return
        self._cancelled = reason
        self._hold.close()
        if self._ahead is not None:
            self._ahead.add_done_callback(_discard)
            self._ahead.cancel()
            self._ahead = None
        cancel(self._answers)

    def close(self) -> None:
        self.cancel()
        for answer in self._answers:
            answer.close()

    def _begin_next(self, number: int) -> None:
        if self._ahead is None and len(self._answers) == number + 1 < len(self._tasks):
            self._ahead = asyncio.ensure_future(self._start(number + 1))

    async def _begun(self, number: int) -> Answer:
        """Piece *number*, which was begun ahead if there was room for it."""
        deadline = time.monotonic() + BUSY_S
        while True:
            if self._ahead is None:
                self._ahead = asyncio.ensure_future(self._start(number))
            try:
                answer = await self._ahead
            except TooBusy as error:
                self._ahead = None
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(min(error.retry_after or 1.0, 1.0))
            else:
                self._ahead = None
                return answer

    async def _start(self, number: int) -> Answer:
        name = self.id if len(self._tasks) == 1 else f"{self.id}-{number}"
        (answer,) = await start(self._hold, [self._tasks[number]], name)
        return answer


def _discard(ahead: asyncio.Task[Answer]) -> None:
    """Nobody will hear it."""
    if not ahead.cancelled() and ahead.exception() is None:
        cancel([ahead.result()])

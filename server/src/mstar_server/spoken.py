"""A text in pieces as one answer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from mstar.spec.errors import RequestError, TooBusy
from mstar.spec.processor import AudioDelta, Delta
from mstar.spec.request import Usage
from mstar.spec.tasks import SpeechTask
from mstar_server.answers import cancel, release, start
from mstar_server.protocols import Answer, Service

__all__ = ["Spoken"]

BUSY_S = 60.0
"""How long a piece waits for room while the queue is full. The first one does not: its client can be told so."""


class Spoken:
    """The sounds of *tasks*, one after the other, as one :class:`~mstar_server.protocols.Answer`.

    While one piece is heard, from its first sound on, the next ones are made already. The next one is handed in
    whatever else runs, those behind it only while less than half of the model's places are taken: who listens to
    something else is not to wait for them. An error of one ends them all, once what comes before it has been heard.
    They are one request to a server that stops: it lets them end.

    :param ahead: pieces that are made beside the one that is heard, at most; with 0 each begins when the one before
        has ended.
    """

    def __init__(self, service: Service, tasks: Sequence[SpeechTask], answer_id: str, ahead: int = 2):
        self.id, self._service, self._hold = answer_id, service, service.hold()
        self._tasks, self._most = tasks, ahead
        self._begun = 0
        self._running: deque[Answer] = deque()  # in order; the first is the one that is heard
        self._beginning: asyncio.Task[None] | None = None
        self._fault: Exception | None = None  # of the next piece, for when its turn has come
        self._heard_tokens = [0, 0]  # of prompts and answers of the pieces that have ended
        self._usage: Usage | None = None
        self._reason: str | None = None
        self._cancelled: str | None = None
        self._ended = False

    @property
    def prompt_tokens(self) -> int:
        return self._heard_tokens[0] + sum(answer.prompt_tokens for answer in self._running)

    @property
    def completion_tokens(self) -> int:
        return self._heard_tokens[1] + sum(answer.completion_tokens for answer in self._running)

    @property
    def usage(self) -> Usage | None:
        return self._usage if len(self._tasks) == 1 else None

    @property
    def finish_reason(self) -> str | None:
        """``length`` if any piece was cut short: the pieces after it do not make that good."""
        if self._cancelled is not None:
            return self._cancelled
        return self._reason if self._ended else None

    async def begin(self) -> None:
        """Hand in the first piece; what is wrong with the request is raised here."""
        try:
            await self._begin_one()
        except BaseException:
            self._hold.close()
            raise

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            async for delta in self._deltas():
                yield delta
        finally:
            self._hold.close()
            self._drop()

    async def _deltas(self) -> AsyncIterator[Delta]:
        if not self._begun:
            await self.begin()
        while self._running:
            answer = self._running[0]
            async for delta in answer:
                if self._cancelled is not None:
                    return
                if isinstance(delta, AudioDelta):
                    self._look_ahead()
                    yield delta
            self._note_end(self._running.popleft())
            if self._cancelled is None and answer.finish_reason == "cancelled":
                self.cancel()  # by whoever knows the piece by its id
            if self._cancelled is not None:
                return
            await self._next()
        self._ended = self._cancelled is None

    def _note_end(self, answer: Answer) -> None:
        """Of a text of ten thousand pieces only those that run are kept."""
        release(answer)
        self._heard_tokens[0] += answer.prompt_tokens
        self._heard_tokens[1] += answer.completion_tokens
        self._usage = answer.usage
        if self._reason != "length":
            self._reason = answer.finish_reason or "stop"

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
        self._drop()

    def close(self) -> None:
        self.cancel()
        for answer in self._running:
            answer.close()

    def _drop(self) -> None:
        """Nobody will hear what runs still."""
        if self._beginning is not None:
            self._beginning.cancel()
        cancel(self._running)

    # --- the next pieces ----------------------------------------------------------------------------------------------
    def _look_ahead(self) -> None:
        if (self._beginning is None or self._beginning.done()) and self._may_begin():
            self._beginning = asyncio.ensure_future(self._begin_ahead(self._turn))

    @property
    def _turn(self) -> int:
        """The number of the piece that is heard."""
        return self._begun - len(self._running)

    def _may_begin(self) -> bool:
        """Whether one more piece may be made beside the one that is heard."""
        if self._begun == len(self._tasks) or len(self._running) > self._most or self._fault is not None:
            return False
        places = self._service.limits.get("max_concurrent_requests")
        return len(self._running) == 1 or places is None or 2 * self._service.open_requests < places

    async def _begin_ahead(self, turn: int) -> None:
        """One after the other, so that they are in the queue in the order in which they are heard."""
        try:
            while self._cancelled is None and self._turn == turn and self._may_begin():
                await self._begin_one()
        except TooBusy:
            pass  # at the next sound, or when its turn has come
        except Exception as error:
            self._fault = error

    async def _next(self) -> None:
        """Until the next piece runs, which was begun ahead if there was room for it; or there is none."""
        deadline = time.monotonic() + BUSY_S
        while not self._running and self._begun < len(self._tasks) and self._cancelled is None:
            if self._beginning is not None and not self._beginning.done():
                await asyncio.wait((self._beginning,))
                continue
            if self._fault is not None:
                raise self._fault
            try:
                await self._begin_one()
            except TooBusy as error:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(min(error.retry_after or 1.0, 1.0))

    async def _begin_one(self) -> None:
        number = self._begun
        name = self.id if len(self._tasks) == 1 else f"{self.id}-{number}"
        (answer,) = await start(self._hold, [self._tasks[number]], name)
        self._begun += 1
        self._running.append(answer)

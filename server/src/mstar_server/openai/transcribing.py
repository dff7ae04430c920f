"""A clip's windows, heard at once by one model and told in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from mstar.processing.speech.transcript import Segment, TranscriptBuilder
from mstar.spec.errors import FaultFound, RequestError, TooBusy
from mstar.spec.processor import TextDelta
from mstar.spec.request import TokenLogprob
from mstar.spec.tasks import TranscriptionTask
from mstar_server.answers import QUEUED_DELTAS, cancel, start
from mstar_server.protocols import Answer, Service

__all__ = ["WindowRun", "heard"]

AT_ONCE = 8
"""Windows of one clip that are with the model at the same time."""

_RETRIES = 60
_LONGEST_WAIT_S = 2.0
_SAME_PLACE = 16
"""How often a window may be heard again before it has to go on."""


class _End:
    """A window's answer has ended; it goes on with *follow*."""

    def __init__(self, answer: Answer, task: TranscriptionTask, follow: TranscriptionTask | None):
        self.answer = answer
        again = follow is not None and follow.offset < _end(task)
        #: what counts of the window's answer; ``None`` where the window, or its rest, is heard again
        self.finish_reason = None if again else answer.finish_reason


def _end(task: TranscriptionTask) -> float:
    """Where a window ends in its clip, in seconds."""
    assert task.audio is not None
    return task.offset + len(task.audio.samples) / task.audio.rate


class WindowRun:
    """Runs *tasks*, the windows of one clip, a few at a time. Iterate it for what they say, window after window: each
    begins with its task, then come its deltas, then its :class:`_End`.

    The first window is refused as any request is. Later ones wait when the model is too busy for them: a clip that is
    half told is worth waiting for. They are one request to a server that stops: it lets them end. A window that is
    cancelled ends them all. Close it when done: what still runs is cancelled.

    :ivar prompt_tokens: and *completion_tokens*: of the windows that have ended. :ivar cancelled: one was cancelled, by
        its client's wish.
    """

    def __init__(self, service: Service, tasks: Sequence[TranscriptionTask], request_id: str):
        most = service.limits.get("max_concurrent_requests") or AT_ONCE
        self._spec, self._hold, self._id = service.spec, service.hold(), request_id
        self._turns = asyncio.Semaphore(max(1, min(AT_ONCE, most)))
        self._queues = [asyncio.Queue[Any](QUEUED_DELTAS) for _ in tasks]
        self._running: set[Answer] = set()
        self._head: deque[Any] = deque()
        self.cancelled = False
        self.prompt_tokens = self.completion_tokens = 0
        self._pumps = [asyncio.ensure_future(self._pump(i, task)) for i, task in enumerate(tasks)]

    async def begin(self, seconds: float) -> None:
        """Wait until the first window has said something, at most *seconds*; raises its error if it failed."""
        try:
            async with asyncio.timeout(seconds):
                while self._queues and len(self._head) < 2:
                    item = await self._queues[0].get()
                    if isinstance(item, Exception):
                        raise item
                    self._head.append(item)
        except TimeoutError:
            return

    async def next(self, number: int, seconds: float | None = None) -> Any:
        """What window *number* says next; ``None`` at its end. Raises :class:`TimeoutError` after a silence of
        *seconds*, and the window's error."""
        if number == 0 and self._head:
            item = self._head.popleft()
        else:
            async with asyncio.timeout(seconds):
                item = await self._queues[number].get()
        if isinstance(item, Exception):
            raise item
        if isinstance(item, _End):
            self.prompt_tokens += item.answer.prompt_tokens
            self.completion_tokens += item.answer.completion_tokens
        return item

    @property
    def windows(self) -> int:
        return len(self._queues)

    def close(self) -> None:
        """Cancel what has not ended. May be called more than once."""
        for pump in self._pumps:
            pump.cancel()
        cancel(list(self._running))
        self._hold.close()

    async def _pump(self, number: int, task: TranscriptionTask) -> None:
        put = self._queues[number].put
        name = self._id if len(self._queues) == 1 else f"{self._id}-{number}"
        try:
            async with self._turns:
                place, asked, offset, turn = name, 0, task.offset, 0
                follow: TranscriptionTask | None = task
                while follow is not None and not self.cancelled:
                    asked = 1 if follow.offset > offset else asked + 1
                    if asked > _SAME_PLACE:
                        where = f"the second {follow.offset:.2f} of a clip is heard again and again"
                        raise FaultFound(f"{self._spec.key!r} does not go on: {where} ({self._spec.processor})")
                    offset = follow.offset
                    follow = await self._hear(number, follow, place, patient=number > 0 or turn > 0)
                    turn += 1
                    place = f"{name}.{turn}"
        except Exception as error:  # carried over to the reader, which raises it
            await put(error)
        else:
            await put(None)

    async def _hear(
        self, number: int, task: TranscriptionTask, name: str, *, patient: bool
    ) -> TranscriptionTask | None:
        """Pass on what is said in *task*'s window, and return what goes on with it. *patient*: wait for room."""
        put = self._queues[number].put
        await put(task)
        for attempt in range(_RETRIES + 1):
            silent = True
            try:
                (answer,) = await start(self._hold, [task], name if not attempt else f"{name}~{attempt}")
                self._running.add(answer)
                try:
                    async for delta in answer:
                        silent = False
                        await put(delta)
                    self.cancelled = self.cancelled or answer.finish_reason == "cancelled"
                    follow = answer.follow
                    if follow is not None and not isinstance(follow, TranscriptionTask):
                        raise TypeError(f"a transcription is followed by one, not by {type(follow).__name__}")
                    await put(_End(answer, task, follow))
                finally:
                    cancel([answer])
                    self._running.discard(answer)
            except TooBusy as error:
                if not patient or not silent or attempt == _RETRIES:
                    raise
                await asyncio.sleep(min(error.retry_after, _LONGEST_WAIT_S))
            except RequestError as error:
                if not patient or error.code != "request_cancelled":
                    raise
                self.cancelled = True  # between two windows: what was said in those before it is the answer
                return None
            else:
                return follow
        raise AssertionError("the last attempt returns or raises")


async def heard(
    run: WindowRun, builder: TranscriptBuilder, silence_s: float | None = None
) -> AsyncGenerator[tuple[str, Segment | None, tuple[TokenLogprob, ...]] | None, None]:
    """What *run* says, joined by *builder*: new text, a segment that is complete, log-probabilities of the text's
    tokens; ``None`` after each silence of *silence_s*."""
    for number in range(run.windows):
        while True:
            try:
                item = await run.next(number, silence_s)
            except TimeoutError:
                yield None
                continue
            if item is None:
                break
            if isinstance(item, TranscriptionTask):
                builder.open(item.offset, _end(item))
            elif isinstance(item, _End):
                yield "", builder.close(item.finish_reason), ()
            else:
                text, segment = builder.feed(item)
                yield text, segment, item.logprobs if isinstance(item, TextDelta) else ()
    if run.cancelled:
        yield "", builder.close("cancelled"), ()

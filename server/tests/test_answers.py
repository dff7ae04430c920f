"""Answers read together: order, silence, faults, ends."""

from __future__ import annotations

import asyncio

import pytest

from mstar.spec.errors import RequestError
from mstar.spec.processor import TextDelta
from mstar_server.answers import QUEUED_DELTAS, Merged
from mstar_server.protocols import Takeable

LIMIT_S = 5.0


class Told:
    """An answer that the test tells what to say; it can be taken without waiting, as the engine's can."""

    id, prompt_tokens, completion_tokens, usage, follow = "told", 1, 0, None, None

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.cancelled: str | None = None
        self._parts: list[object] = []
        self._wake = None

    def say(self, *parts: object) -> None:
        """Texts, an error, or ``None`` for the end."""
        self._parts += parts
        if self._wake is not None:
            self._wake()

    def take_now(self) -> list[TextDelta] | None:
        deltas = []
        while self._parts and isinstance(self._parts[0], str):
            deltas.append(TextDelta(self._parts.pop(0)))
        if deltas or not self._parts:
            return deltas
        if isinstance(self._parts[0], Exception):
            raise self._parts[0]
        self.finish_reason = "stop"
        return None

    def listen(self, wake) -> None:
        self._wake = wake
        if wake is not None and self._parts:
            wake()

    def cancel(self, reason: str = "cancelled") -> None:
        self.cancelled = reason


async def texts(merged: Merged, seconds: float | None = LIMIT_S) -> list[tuple[int, str | None]]:
    return [(which, delta and delta.text) for which, delta in await merged.next_batch(seconds)]


def test_the_engines_answers_can_be_taken_without_waiting(kit):
    from mstar.runtime.answer import Answer

    assert issubclass(Answer, Takeable)
    assert not isinstance(kit.Service(kit.HELLO), Takeable)


async def test_what_is_there_at_once_is_one_batch_and_the_end_comes_with_it():
    answers = Told(), Told()
    merged = Merged(answers)
    answers[1].say("x")
    answers[0].say("a", "b")
    answers[1].say("y", None)
    assert await texts(merged) == [(1, "x"), (1, "y"), (1, None), (0, "a"), (0, "b")]
    assert not merged.done
    waiting = asyncio.ensure_future(texts(merged))
    await asyncio.sleep(0)
    answers[0].say(None)
    assert await waiting == [(0, None)]
    assert merged.done


async def test_a_silence_gives_an_empty_batch_and_loses_nothing():
    answer = Told()
    merged = Merged([answer])
    assert await texts(merged, 0.01) == []
    assert await texts(merged, 0.01) == []  # one timer serves both
    waiting = asyncio.ensure_future(texts(merged, LIMIT_S))  # … and gives way to a longer patience
    await asyncio.sleep(0.02)
    assert not waiting.done()
    answer.say("late")
    assert await waiting == [(0, "late")]
    merged.close()


async def test_a_shorter_patience_than_the_one_before():
    merged = Merged([Told()])
    waiting = asyncio.ensure_future(texts(merged, 60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    async with asyncio.timeout(LIMIT_S):
        assert await texts(merged, 0.01) == []
    merged.close()


async def test_a_fault_comes_after_what_was_said_before_it():
    answers = Told(), Told()
    merged = Merged(answers)
    answers[0].say("a", RequestError("broken"))
    answers[1].say("b")
    assert (0, "a") in await texts(merged)
    with pytest.raises(RequestError, match="broken"):
        await texts(merged)
    merged.close()
    assert [answer.cancelled for answer in answers] == ["cancelled", "cancelled"]


async def test_begin_raises_unless_all_have_spoken():
    silent, failing = Told(), Told()
    merged = Merged([silent, failing])
    failing.say("a", RequestError("broken"))
    with pytest.raises(RequestError, match="broken"):
        await merged.begin(LIMIT_S)
    merged.close()
    spoken = Told()
    spoken.say("a", RequestError("broken"))
    merged = Merged([spoken])
    await merged.begin(LIMIT_S)
    assert await texts(merged) == [(0, "a")]
    merged.close()


async def test_an_answer_that_can_only_be_iterated_is_not_drained_for_a_slow_client(kit):
    script = [TextDelta(str(number)) for number in range(3 * QUEUED_DELTAS)]
    service = kit.Service(script)
    merged = Merged([await service.generate(None)])
    await merged.begin(LIMIT_S)
    for _ in range(3):
        await asyncio.sleep(0)
    assert service.answers[0].said <= 2 * QUEUED_DELTAS  # those that it began with, and as many again
    said = []
    async with asyncio.timeout(LIMIT_S):
        while not merged.done:
            said += await texts(merged)
    assert said == [*((0, str(number)) for number in range(len(script))), (0, None)]


async def test_a_closed_one_listens_no_more():
    answer = Told()
    merged = Merged([answer])
    merged.close()
    merged.close()
    answer.say("unheard")
    assert await texts(merged, 0.0) == []
    merged.close()

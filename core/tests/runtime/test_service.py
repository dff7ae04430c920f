"""From task to deltas, over a scripted worker."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import fakes
import numpy as np
import pytest
from fakes import SPEC, FakeProcessor, FakeRegistry, FakeRenderer, counting, fake_config, live

from mstar.runtime.answer import Answer
from mstar.runtime.service import Service
from mstar.spec.errors import FaultFound, NotReady, RequestError, SetupError, TooBusy
from mstar.spec.processor import ArrayDelta, TextDelta
from mstar.spec.tasks import Audio


def build(**layer: Any) -> Service:
    return Service(SPEC, fake_config(**layer), FakeRegistry())  # type: ignore[arg-type]


@asynccontextmanager
async def running(**layer: Any) -> AsyncIterator[Service]:
    service = build(**layer)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def text(answer: Answer) -> str:
    return "".join([delta.text async for delta in answer if isinstance(delta, TextDelta)])


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.001)


async def nothing_runs(service: Service) -> None:
    async def idle() -> bool:
        running: list[str] = (await service.status())["running"]
        return not running

    await until(idle)


@pytest.mark.parametrize("executor", ["inline", "processes"])
async def test_an_answer_from_start_to_end(executor: str) -> None:
    async with running(executor=executor) as service:
        answer = await service.generate(counting(5), "mine")
        assert (answer.id, answer.prompt_tokens, answer.finish_reason, answer.usage) == ("mine", 7, None, None)
        deltas = [delta async for delta in answer]
        assert deltas == [TextDelta("0 1 ", (0, 1)), TextDelta("2 3 ", (2, 3)), TextDelta("4 ", (4,))]
        assert (answer.finish_reason, answer.completion_tokens) == ("stop", 5)
        assert answer.usage is not None
        assert answer.usage.output == {"tokens": 5}
        assert [delta async for delta in answer] == []


@pytest.mark.parametrize(("executor", "warmed"), [("inline", 0), ("processes", 1)])
async def test_a_processor_warms_up_beside_a_worker_in_its_own_process(
    executor: str, warmed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm: list[FakeProcessor] = []
    monkeypatch.setattr(FakeProcessor, "warm", lambda self: warm.append(self))
    async with running(executor=executor) as service:
        assert warm == [service.processor] * warmed


async def test_answers_do_not_mix() -> None:
    async with running() as service:
        answers = await asyncio.gather(*(service.generate(counting(n)) for n in range(20)))
        texts = await asyncio.gather(*(text(answer) for answer in answers))
        assert texts == ["".join(f"{i} " for i in range(n)) for n in range(20)]


async def test_take_joins_what_is_there() -> None:
    async with running() as service:
        answer = await service.generate(counting(100))
        await nothing_runs(service)  # all of it has arrived
        deltas = await answer.take()
        assert len(deltas) == 50
        assert await answer.take() == []
        assert answer.finish_reason == "stop"


async def test_take_gives_what_came_before_a_fault_first(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = FakeRenderer.feed

    def faulty(self: FakeRenderer, event: Any) -> Any:
        if event.seq == 2:
            raise ZeroDivisionError
        return feed(self, event)

    monkeypatch.setattr(FakeRenderer, "feed", faulty)
    async with running() as service:
        answer = await service.generate(counting(100))
        await nothing_runs(service)
        assert len(await answer.take()) == 1  # two numbers a piece
        with pytest.raises(ZeroDivisionError):
            await answer.take()
        assert await answer.take() == []


async def test_a_listener_is_told_of_what_is_there_and_of_what_comes() -> None:
    async with running() as service:
        answer = await service.generate(live())
        woken = asyncio.Event()
        answer.listen(woken.set)
        assert not woken.is_set()
        assert answer.take_now() == []
        await answer.push("in", np.arange(2), end=True)
        said = []
        async with asyncio.timeout(10):
            while (deltas := answer.take_now()) is not None:
                said += deltas
                if not deltas:
                    woken.clear()
                    await woken.wait()
        assert [list(delta.data) for delta in said if isinstance(delta, ArrayDelta)] == [[0, 1]]
        woken.clear()
        answer.listen(woken.set)
        assert woken.is_set()  # at its end: there is something to learn


async def test_first_waits_and_loses_nothing() -> None:
    async with running() as service:
        answer = await service.generate(counting(4))
        await answer.first()
        assert await text(answer) == "0 1 2 3 "


async def test_a_read_that_times_out_loses_nothing() -> None:
    async with running() as service:
        answer = await service.generate(live())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(answer), 0.01)
        await answer.push("in", np.arange(2), end=True)
        (delta,) = [delta async for delta in answer]
        assert isinstance(delta, ArrayDelta)
        assert list(delta.data) == [0, 1]


async def test_a_client_that_does_not_read_slows_its_request() -> None:
    async with running(model_kwargs={"window": 4}) as service:
        slow = await service.generate(counting(50), "slow")
        assert await text(await service.generate(counting(50))) != ""  # the other one is not held up
        assert (await service.status())["sent"] == {"slow": 4}
        assert (await text(slow)).split() == [str(i) for i in range(50)]


async def test_what_is_taken_fast_is_acknowledged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstar.runtime.answer._ACK_DELAY_S", 3600.0)
    async with running(model_kwargs={"window": 32}) as service, asyncio.timeout(10):
        assert len((await text(await service.generate(counting(320)))).split()) == 320


async def test_a_stop_string_ends_the_answer_and_the_request() -> None:
    async with running(model_kwargs={"window": 8}) as service:
        answer = await service.generate(counting(10_000, stop=("5",)), "a")
        assert await text(answer) == "0 1 2 3 4 "  # what was held back comes, the stop string does not
        assert answer.finish_reason == "stop"
        assert answer.completion_tokens == 6
        assert answer.usage is not None
        assert answer.usage.output == {"tokens": 6}
        await nothing_runs(service)
        assert "cancel a stop" in (await service.status())["log"]


async def test_cancel_ends_with_its_reason() -> None:
    async with running(model_kwargs={"window": 2}) as service:
        answer = await service.generate(counting(1000))
        await answer.first()
        answer.cancel("cancelled")
        await text(answer)
        assert answer.finish_reason == "cancelled"
        answer.cancel()  # harmless


async def leave_by_aclose(answer: Answer) -> None:
    await answer.aclose()
    assert [delta async for delta in answer] == []


async def leave_by_exception(answer: Answer) -> None:
    async def consume() -> None:
        async with answer:
            async for _ in answer:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consume()


@pytest.mark.parametrize("leave", [leave_by_aclose, leave_by_exception])
async def test_leaving_early_cancels(leave: Callable[[Answer], Awaitable[None]]) -> None:
    async with running(model_kwargs={"window": 2}) as service:
        await leave(await service.generate(counting(1000), "a"))
        await nothing_runs(service)
        assert "cancel a cancelled" in (await service.status())["log"]


async def test_an_answer_that_nobody_holds_is_cancelled() -> None:
    async with running(model_kwargs={"window": 2}) as service:
        answer = await service.generate(counting(1000), "a")
        async for _ in answer:
            break
        del answer
        gc.collect()
        await nothing_runs(service)
        assert "cancel a cancelled" in (await service.status())["log"]


async def test_a_full_queue_is_too_busy_before_the_first_delta() -> None:
    async with running(model_kwargs={"window": 1, "limit": 1}) as service:
        holder = await service.generate(counting(100))
        await holder.first()
        refused = await service.generate(counting(1))
        with pytest.raises(TooBusy) as caught:
            await refused.first()
        assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "queue_full", 3.0)
        await holder.aclose()


async def test_a_bare_next_in_a_processor_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as service:
        monkeypatch.setattr(service.processor, "prepare", lambda task, request_id: next(iter(())))
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            await asyncio.wait_for(service.generate(counting(5)), 10)
        monkeypatch.undo()
        assert await text(await service.generate(counting(2))) == "0 1 "


async def test_more_requests_than_can_wait_are_refused_at_once() -> None:
    async with running(max_concurrent_requests=1, scheduler={"max_queue": 1}) as service:
        held = [await service.generate(live()) for _ in range(2)]
        with pytest.raises(TooBusy):
            await service.generate(counting())
        await held[0].aclose()
        await until(lambda: _accepts(service))


async def _accepts(service: Service) -> bool:
    try:
        await text(await service.generate(counting()))
    except TooBusy:
        return False
    return True


async def test_a_refusal_of_the_processor_reaches_the_caller() -> None:
    async with running() as service:
        with pytest.raises(RequestError, match="no such voice") as caught:
            await service.generate(counting(misbehave="refuse"), "a")
        assert caught.value.param == "voice"
        assert await text(await service.generate(counting(1), "a")) == "0 "  # the id is free again


async def test_an_id_in_use_is_refused() -> None:
    async with running() as service:
        first = await service.generate(live(), "a")
        with pytest.raises(RequestError, match="'a' is in use"):
            await service.generate(counting(), "a")
        await first.aclose()


async def test_a_renderer_that_fails_ends_the_request() -> None:
    async with running(model_kwargs={"window": 2}) as service:
        answer = await service.generate(counting(1000, "render"))
        with pytest.raises(FaultFound) as caught:
            await text(answer)
        assert isinstance(caught.value.__cause__, ValueError)
        await nothing_runs(service)


def _line(of: Any, code: str) -> int:
    lines, first = inspect.getsourcelines(of)
    return first + next(number for number, line in enumerate(lines) if code in line)


async def test_a_fault_of_the_family_names_its_file_and_line() -> None:
    async with running(model_kwargs={"window": 2}) as service:
        with pytest.raises(FaultFound) as prepare:
            await service.generate(counting(1, "prepare"))
        answer = await service.generate(counting(9, "render"))
        with pytest.raises(FaultFound) as render:
            await text(answer)
        held = await service.generate(live())
        with pytest.raises(FaultFound) as push:
            await held.push("in", {"no": "array"})
        await held.aclose()
    said = [str(caught.value) for caught in (prepare, render, push)]
    places = [
        _line(FakeProcessor.prepare, 'int("no number")'),
        _line(FakeRenderer.feed, "cannot spell"),
        _line(FakeProcessor.push, "part["),
    ]
    assert said[0].startswith(
        "'fake' could not prepare a request: ValueError: invalid literal for int() with base 10: "
    )
    assert said[1].startswith("'fake' could not render an answer: ValueError: cannot spell (at ")
    assert said[2].startswith("'fake' could not take what a client sent: KeyError: 'data' (at ")
    for sentence, line in zip(said, places, strict=True):
        assert f"(at {fakes.__file__}:{line})" in sentence


async def test_pushes_keep_their_order_and_end_with_the_request() -> None:
    async with running() as service:
        answer = await service.generate(live())
        pushes = [answer.push("in", np.full(3, i), end=i == 9) for i in range(10)]
        await asyncio.gather(*pushes)
        assert [int(delta.data[0]) async for delta in answer if isinstance(delta, ArrayDelta)] == list(range(10))
        with pytest.raises(RequestError, match="has ended"):
            await answer.push("in", np.zeros(3))


async def test_an_intake_remembers_what_came_before() -> None:
    async with running() as service:
        first, second = [await service.generate(live("remember")) for _ in range(2)]
        for number in (1, 2, 3):
            await first.push("in", np.full(2, number), end=number == 3)
        await second.push("in", np.ones(1), end=True)
        for answer, sums in ((first, [2.0, 6.0, 12.0]), (second, [1.0])):
            assert [float(delta.data[0]) async for delta in answer if isinstance(delta, ArrayDelta)] == sums


async def test_live_sound_counts_as_input() -> None:
    async with running() as service:
        answer = await service.generate(live("remember"))
        for end in (False, True):
            await answer.push("in", Audio(np.zeros(8000, np.float32), 16_000), end=end)
        assert [delta async for delta in answer]
        assert answer.usage is not None
        assert answer.usage.input["audio_seconds"] == 1.0


async def test_a_worker_that_dies_fails_its_requests_and_readiness(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mstar.runtime.service")
    async with running(executor="processes", model_kwargs={"window": 1}) as service:
        running_on = await service.generate(counting(1000))
        await running_on.first()
        killer = await service.generate(counting(misbehave="exit"))
        for answer in (running_on, killer):
            with pytest.raises(NotReady) as caught:
                await text(answer)
            assert (caught.value.code, caught.value.status) == ("worker_died", 503)
        with pytest.raises(NotReady, match=r"exit status 7|starting"):
            await service.generate(counting())
        again = f"{service.spec.key!r} is whole again"
        assert again not in caplog.messages
        await until(lambda: _is_ready(service))
        assert await text(await service.generate(counting(1))) == "0 "
        assert caplog.messages.count(again) == 1


async def _is_ready(service: Service) -> bool:
    return service.phase.name == "ready"


async def test_a_service_is_not_ready_before_its_start_and_after_its_stop() -> None:
    service = build()
    with pytest.raises(NotReady, match="starting"):
        await service.generate(counting())
    await service.start()
    assert service.phase.name == "ready"
    await service.stop()
    with pytest.raises(NotReady, match="stopped"):
        await service.generate(counting())


async def test_stop_fails_what_runs() -> None:
    async with running(model_kwargs={"window": 1}) as service:
        answer = await service.generate(counting(1000))
        await answer.first()
        reading = asyncio.ensure_future(text(answer))
        await service.stop()
        with pytest.raises(NotReady) as caught:
            await reading
        assert caught.value.code == "shutting_down"
        with pytest.raises(RequestError):
            await answer.push("in", np.zeros(1))


async def test_stop_while_a_request_is_prepared() -> None:
    async with running() as service:
        preparing = asyncio.ensure_future(service.generate(counting(misbehave="slow")))
        await asyncio.sleep(0.01)
        await service.stop()
        with pytest.raises(NotReady, match="stopped"):
            await preparing


async def test_a_live_answer_cannot_be_fed_after_the_stop() -> None:
    async with running() as service:
        answer = await service.generate(live())
        await service.stop()
        with pytest.raises(NotReady, match="stopped"):
            await answer.push("in", np.zeros(1))


async def test_drain_refuses_new_requests_and_waits_for_the_running_ones() -> None:
    async with running() as service:
        answer = await service.generate(live())
        assert await service.drain(0.01) is False
        assert service.phase.name == "draining"
        with pytest.raises(NotReady, match="draining"):
            await service.generate(counting())
        draining = asyncio.ensure_future(service.drain(10))
        await answer.push("in", None, end=True)
        assert await draining is True
        assert [delta async for delta in answer] == []


async def test_what_is_held_goes_on_while_the_service_drains() -> None:
    async with running() as service:
        hold = service.hold()
        assert await text(await hold.generate(counting())) != ""
        assert service.open_requests == 1, "between two of its requests"
        assert await service.drain(0.01) is False
        with pytest.raises(NotReady, match="draining"):
            await service.generate(counting())
        with pytest.raises(NotReady, match="draining"):
            service.hold()
        draining = asyncio.ensure_future(service.drain(10))
        answer = await hold.generate(counting())
        assert service.open_requests == 1
        assert await text(answer) != ""
        assert not draining.done()
        hold.close()
        hold.close()
        assert await draining is True
        assert service.open_requests == 0
        with pytest.raises(NotReady, match="draining"):
            await hold.generate(counting())


async def test_two_services_at_once() -> None:
    async with running() as one, running(executor="processes") as two:
        answers = [await service.generate(counting(9), "same") for service in (one, two)]
        assert await asyncio.gather(*map(text, answers)) == ["0 1 2 3 4 5 6 7 8 "] * 2


@pytest.mark.parametrize("options", [{"setup_error": "no room for it"}, {"bad_tokenizer": "tokenizer.json"}])
async def test_a_start_that_fails_says_why_and_leaves_nothing(options: dict[str, str]) -> None:
    service = build(model_kwargs=options)
    (sentence,) = options.values()
    with pytest.raises(SetupError, match=sentence):
        await service.start()
    assert service.phase.name == "failed"
    assert sentence in service.phase.detail


@pytest.mark.parametrize(("asked", "deployed"), [(0.1, None), (None, 0.1), (100.0, 0.1), (0.1, 100.0)])
async def test_a_request_ends_in_time_whatever_its_worker_does(
    monkeypatch: pytest.MonkeyPatch, asked: float | None, deployed: float | None
) -> None:
    """This worker knows no time limits."""
    monkeypatch.setattr("mstar.runtime.service._LATE_S", 0.05)
    async with running(request_timeout_s=deployed) as service:
        answer = await service.generate(counting(10**9, timeout=asked))
        with pytest.raises(RequestError, match=r"longer than 0\.1 s") as caught:
            await asyncio.wait_for(text(answer), 10)
        assert (caught.value.status, caught.value.code) == (504, "timeout")
        assert answer.ended
        await nothing_runs(service)

        async def closed() -> bool:
            return service.open_requests == 0

        await until(closed)
        assert await text(await service.generate(counting(3))) == "0 1 2 "


async def test_preparing_counts_as_time() -> None:
    async with running() as service:
        with pytest.raises(RequestError, match=r"longer than 0\.05 s"):
            await service.generate(counting(3, "slow", timeout=0.05))
        assert service.open_requests == 0
        assert not service._limits


async def test_a_tenant_is_kept_apart_whatever_the_family_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as service:
        sent: list[Any] = []
        submit = service._executor.submit
        monkeypatch.setattr(service._executor, "submit", lambda request: (sent.append(request), submit(request)))
        await text(await service.generate(counting(1, tenant="alice")))
    assert (sent[0].tenant, sent[0].cache_salt) == ("alice", "alice")

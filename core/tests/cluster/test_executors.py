"""What every executor of one worker promises."""

from __future__ import annotations

import asyncio
import gc
import os

import numpy as np
import pytest
from driver import Driver, fake_config

from mstar.spec.errors import FaultFound, SetupError
from mstar.spec.request import Cancel, Done, EngineRequest, Failed, Push

HOW = pytest.mark.parametrize("how", ["inline", "processes"])


@HOW
async def test_events_arrive_in_order_and_requests_do_not_mix(how: str) -> None:
    async with Driver(how, fake_config()) as driver:
        for name, count in (("a", 50), ("b", 3), ("c", 0)):
            driver.executor.submit(EngineRequest(id=name, params={"count": count}))
        for name, count in (("a", 50), ("b", 3), ("c", 0)):
            end = await driver.end(name)
            assert isinstance(end, Done)
            assert end.usage.output == {"tokens": count}
            assert driver.data(name) == [[i] for i in range(count)]
            assert [event.seq for event in driver.events[name][:-1]] == list(range(count))  # type: ignore[union-attr]


@HOW
async def test_commands_arrive_in_order(how: str) -> None:
    async with Driver(how, fake_config()) as driver:
        driver.executor.submit(EngineRequest(id="a", client_streams=("in",)))
        driver.executor.push(Push(id="a", stream="in", data=np.arange(3)))
        driver.executor.push(Push(id="a", stream="in", data=np.arange(4.0), end=True))
        await driver.end("a")
        assert [list(d) for d in driver.data("a")] == [[0, 1, 2], [0.0, 1.0, 2.0, 3.0]]
        assert (await driver.executor.status())["log"] == ["submit a", "push a in", "push a in"]


@HOW
async def test_phases_of_a_start(how: str) -> None:
    driver = Driver(how, fake_config())
    async with driver:
        assert driver.executor.phase.name == "ready"
        assert driver.phase_names[-3:] == ["weights", "warmup", "ready"]
        assert driver.phases[-3].progress == 0.5
    assert driver.phase_names[-1] == "stopped"


@HOW
async def test_cancel_ends_a_running_request(how: str) -> None:
    async with Driver(how, fake_config(window=2)) as driver:
        driver.executor.submit(EngineRequest(id="a", params={"count": 1000}))
        await driver.until(lambda: driver.data("a"))
        driver.executor.cancel(Cancel(id="a", reason="stop"))
        end = await driver.end("a")
        assert isinstance(end, Done)
        assert end.reason == "stop"
        assert len(driver.data("a")) <= 2


@HOW
async def test_the_worker_waits_for_acks(how: str) -> None:
    async with Driver(how, fake_config(window=3)) as driver:
        driver.executor.submit(EngineRequest(id="a", params={"count": 8}))
        await driver.until(lambda: len(driver.data("a")) == 3)
        assert (await driver.executor.status())["sent"] == {"a": 3}
        driver.executor.ack("a", "out", 2)
        await driver.until(lambda: len(driver.data("a")) == 5)
        driver.executor.ack("a", "out", 3)
        await driver.end("a")
        assert len(driver.data("a")) == 8


@HOW
async def test_commands_for_a_request_that_has_ended_are_dropped(how: str) -> None:
    async with Driver(how, fake_config()) as driver:
        driver.executor.submit(EngineRequest(id="a"))
        await driver.end("a")
        driver.executor.cancel(Cancel(id="a"))
        driver.executor.push(Push(id="a", stream="in"))
        assert (await driver.executor.status())["log"] == ["submit a"]


@HOW
async def test_stop_with_work_in_flight_fails_it(how: str) -> None:
    driver = Driver(how, fake_config(window=1))
    async with driver:
        driver.executor.submit(EngineRequest(id="a", params={"count": 1000}))
        await driver.until(lambda: driver.data("a"))
    end = await driver.end("a")
    assert isinstance(end, Failed)
    assert (end.code, end.status) == ("shutting_down", 503)
    await driver.executor.stop()  # a second stop is harmless


@HOW
async def test_a_request_after_the_stop_fails(how: str) -> None:
    driver = Driver(how, fake_config())
    async with driver:
        pass
    driver.executor.submit(EngineRequest(id="late"))
    end = await driver.end("late")
    assert isinstance(end, Failed)
    assert (end.code, end.status) == ("not_ready", 503)


@HOW
async def test_a_setup_error_reaches_the_caller_word_for_word(how: str) -> None:
    driver = Driver(how, fake_config(setup_error="the pool of 12 pages cannot hold one request of 40"))
    with pytest.raises(SetupError, match=r"^the pool of 12 pages cannot hold one request of 40$") as caught:
        await driver.executor.start()
    assert not isinstance(caught.value, FaultFound), "the operator can mend it"
    assert driver.executor.phase.name == "failed"
    assert "12 pages" in driver.executor.phase.detail
    await driver.executor.stop()


@HOW
async def test_a_bug_in_the_setup_is_reported_as_one(how: str) -> None:
    driver = Driver(how, fake_config(bug_in_setup=True))
    with pytest.raises(FaultFound, match="'fake' could not be built: ZeroDivisionError: one over nothing"):
        await driver.executor.start()
    await driver.executor.stop()


@HOW
async def test_an_exception_in_a_step_fails_what_runs(how: str) -> None:
    async with Driver(how, fake_config(window=1)) as driver:
        driver.executor.submit(EngineRequest(id="a", params={"count": 1000}))
        await driver.until(lambda: driver.data("a"))
        driver.executor.submit(EngineRequest(id="b", params={"raise": True}))
        for name in ("a", "b"):
            end = await driver.end(name)
            assert isinstance(end, Failed)
            assert (end.code, end.status) == ("worker_died", 503)
        assert "failed" in driver.phase_names
        failed = next(phase for phase in driver.phases if phase.name == "failed")
        assert "RuntimeError: the step failed" in failed.detail


@HOW
async def test_two_executors_at_once(how: str) -> None:
    async with Driver(how, fake_config("one")) as one, Driver(how, fake_config("two")) as two:
        for driver in (one, two):
            driver.executor.submit(EngineRequest(id="same", params={"count": 5}))
        await asyncio.gather(one.end("same"), two.end("same"))
        assert one.data("same") == two.data("same") == [[0], [1], [2], [3], [4]]
        if how == "processes":
            pids = {(await driver.executor.status())["pid"] for driver in (one, two)}
            assert len(pids | {os.getpid()}) == 3


@HOW
async def test_a_worker_process_spares_the_collector_what_it_loaded(how: str) -> None:
    before = gc.get_freeze_count()
    async with Driver(how, fake_config()) as driver:
        frozen = (await driver.executor.status())["frozen"]
    if how == "processes":
        assert frozen > 1000
    else:  # the process is its caller's
        assert frozen == before


async def test_stopping_twice_at_once() -> None:
    """A start that is cancelled stops the worker, and whoever started it stops it again."""
    driver = Driver("inline", fake_config())
    await driver.executor.start()
    await asyncio.gather(driver.executor.stop(), driver.executor.stop())
    assert driver.phase_names[-1] == "stopped"

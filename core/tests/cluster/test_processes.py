"""Worker processes: their death, their memory, and what they leave behind (nothing)."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import Driver, fake_config

from mstar.cluster import launch, shm
from mstar.cluster.processes import ProcessesExecutor
from mstar.spec.errors import SetupError
from mstar.spec.request import Done, EngineRequest, Failed


@pytest.fixture(autouse=True)
def arena_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own for shared buffers, empty at the end."""
    root = tmp_path / "s"
    root.mkdir()
    monkeypatch.setattr(shm, "_ROOT", root)
    return root


def stored(root: Path) -> list[str]:
    """Shared buffers that exist now."""
    return sorted(path.name for path in root.glob("*/*") if path.name != "socket")


def pid(driver: Driver) -> int:
    assert isinstance(driver.executor, ProcessesExecutor)
    assert driver.executor.pid is not None
    return driver.executor.pid


def lives(process: int) -> bool:
    """Whether *process* runs. An orphan that nobody reaps, as in a container without init, does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def restarted(driver: Driver, old: int) -> None:
    await driver.until(lambda: driver.executor.phase.name == "ready" and pid(driver) != old)
    driver.executor.submit(EngineRequest(id="again", params={"count": 1}))
    assert isinstance(await driver.end("again"), Done)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (300, 300), ()])
async def test_arrays_travel_both_ways_unchanged(shape: tuple[int, ...], arena_root: Path) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype("float32")
    async with Driver("processes", fake_config()) as driver:
        driver.executor.submit(EngineRequest(id="a", inputs={"echo": array}))
        await driver.end("a")
        (echo,) = driver.data("a")
        assert echo.dtype == array.dtype
        np.testing.assert_array_equal(echo, array)
        echo.fill(1)  # the receiver owns it
        assert stored(arena_root) == []
    assert list(arena_root.iterdir()) == []
    assert echo.sum() == echo.size  # mapped memory outlives the executor


async def test_a_value_that_cannot_travel_fails_its_request_only() -> None:
    async with Driver("processes", fake_config()) as driver:
        driver.executor.submit(EngineRequest(id="good", params={"count": 2}))
        driver.executor.submit(EngineRequest(id="bad", inputs={"x": np.array(["text", None], dtype=object)}))
        driver.executor.submit(EngineRequest(id="worse", params={"object": True}))
        driver.executor.submit(EngineRequest(id="huge", params={"seed": 2**64}))
        driver.executor.submit(EngineRequest(id="half", session="\ud800"))
        assert isinstance(await driver.end("good"), Done)
        for name, said in (
            ("bad", "dtype object"),
            ("worse", "dtype object"),
            ("huge", "serialize ints"),
            ("half", "surrogates"),
        ):
            end = await driver.end(name)
            assert isinstance(end, Failed)
            assert said in end.message
        status = await driver.executor.status()
        assert status["running"] == []


async def test_a_crash_fails_what_runs_and_the_worker_comes_back(arena_root: Path) -> None:
    async with Driver("processes", fake_config(window=1)) as driver:
        old = pid(driver)
        driver.executor.submit(EngineRequest(id="a", params={"count": 1000}))
        await driver.until(lambda: driver.data("a"))
        driver.executor.submit(EngineRequest(id="b", inputs={"x": np.zeros(100_000)}, params={"exit": True}))
        assert await driver.executor.status() == {}  # asked of the worker that is about to die
        for name in ("a", "b"):
            end = await driver.end(name)
            assert isinstance(end, Failed)
            assert (end.code, end.status) == ("worker_died", 503)
            assert "exit status 7" in end.message
        assert driver.executor.phase.name == "failed"
        await restarted(driver, old)
        assert not lives(old)
        assert len(list(arena_root.iterdir())) == 1  # the dead worker's folder is gone
    assert list(arena_root.iterdir()) == []


async def test_a_killed_worker_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    async with Driver("processes", fake_config()) as driver:
        old = pid(driver)
        os.kill(old, signal.SIGKILL)
        await driver.until(lambda: driver.executor.phase.name == "failed")
        assert "SIGKILL (out of memory?)" in driver.phases[-1].detail
        await restarted(driver, old)
        assert caplog.text.count("SIGKILL") == 1  # the cause is logged once


async def test_workers_that_did_their_work_are_replaced_without_growing_pauses() -> None:
    async with Driver("processes", fake_config()) as driver:
        for _ in range(3):
            old = pid(driver)
            os.kill(old, signal.SIGKILL)
            await driver.until(lambda: driver.executor.phase.name == "failed")
            await restarted(driver, old)
            assert driver.executor._failures == 0  # type: ignore[attr-defined]
            driver.events.clear()


async def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    async with Driver("processes", fake_config(fail_second_start=str(tmp_path / "marker"))) as driver:
        old = pid(driver)
        os.kill(old, signal.SIGKILL)
        await restarted(driver, old)
        details = [phase.detail for phase in driver.phases if phase.name == "failed"]
        assert "SIGKILL" in details[0]
        assert details[1] == "the weights are gone for a moment; it is started again"


async def test_a_stopped_worker_counts_as_dead() -> None:
    async with Driver("processes", fake_config(), silence_limit_s=0.6) as driver:
        old = pid(driver)
        os.kill(old, signal.SIGSTOP)
        await driver.until(lambda: driver.executor.phase.name == "failed")
        assert "no sign of life" in driver.phases[-1].detail
        await restarted(driver, old)


async def test_a_step_that_hangs_counts_as_dead() -> None:
    async with Driver("processes", fake_config(), step_limit_s=0.3) as driver:
        old = pid(driver)
        driver.executor.submit(EngineRequest(id="a", params={"hang": 3600}))
        end = await driver.end("a")
        assert isinstance(end, Failed)
        assert "one step has been running" in end.message
        await restarted(driver, old)


async def test_a_worker_that_ends_while_starting_is_a_setup_error(arena_root: Path) -> None:
    driver = Driver("processes", fake_config(exit_in_setup=True))
    with pytest.raises(SetupError, match="'fake' ended while starting: exit status 9"):
        await driver.executor.start()
    assert list(arena_root.iterdir()) == []
    await driver.executor.stop()


async def test_a_cancelled_start_leaves_nothing(arena_root: Path) -> None:
    driver = Driver("processes", fake_config())
    task = asyncio.ensure_future(driver.executor.start())
    await driver.until(lambda: driver.phases)
    child = pid(driver)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not lives(child)
    assert list(arena_root.iterdir()) == []
    await driver.executor.stop()


async def test_stop_kills_a_worker_in_a_long_step_and_leaves_nothing(arena_root: Path) -> None:
    async with Driver("processes", fake_config(), stop_grace_s=0.05) as driver:
        child = pid(driver)
        driver.executor.submit(EngineRequest(id="a", inputs={"x": np.zeros(100_000)}, params={"hang": 3600}))
        driver.executor.submit(EngineRequest(id="b", inputs={"x": np.zeros(100_000)}))
        await asyncio.sleep(0)
    assert not lives(child)
    assert list(arena_root.iterdir()) == []
    assert isinstance(await driver.end("a"), Failed)


async def test_a_message_that_cannot_be_read_restarts_the_worker(arena_root: Path) -> None:
    async with Driver("processes", fake_config(), stop_grace_s=5.0) as driver:
        old = pid(driver)
        take = shm.Arena.take

        def someone_removed_it(arena: shm.Arena, name: str, size: int) -> Any:
            arena.discard(name)
            return take(arena, name, size)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shm.Arena, "take", someone_removed_it)
            driver.executor.submit(EngineRequest(id="a", inputs={"echo": np.zeros(100_000)}))
            assert isinstance(await driver.end("a"), Failed)
        await restarted(driver, old)
    assert list(arena_root.iterdir()) == []


async def test_a_start_without_descriptors_is_a_setup_error(monkeypatch: pytest.MonkeyPatch, arena_root: Path) -> None:
    def no_more(*arguments: Any, **options: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", no_more)
    driver = Driver("processes", fake_config())
    with pytest.raises(SetupError, match=r"'fake' cannot be started: .*Too many open files"):
        await driver.executor.start()
    assert list(arena_root.iterdir()) == []


async def test_large_arrays_still_travel_when_shared_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm.Arena, "write", lambda self, data: None)
    array = np.arange(100_000)
    async with Driver("processes", fake_config()) as driver:
        driver.executor.submit(EngineRequest(id="a", inputs={"echo": array}))
        await driver.end("a")
        np.testing.assert_array_equal(driver.data("a")[0], array)


async def test_without_ipc_the_two_ends_talk_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.zmq, "has", lambda capability: capability != "ipc")
    addresses: list[str] = []
    plain = launch.Start

    def start(**fields: Any) -> launch.Start:
        addresses.append(fields["address"])
        return plain(**fields)

    monkeypatch.setattr(launch, "Start", start)
    async with Driver("processes", fake_config()) as driver:
        driver.executor.submit(EngineRequest(id="a", params={"count": 3}))
        assert isinstance(await driver.end("a"), Done)
        assert driver.data("a") == [[0], [1], [2]]
    assert addresses[0].startswith("tcp://127.0.0.1:")


async def test_without_shared_memory_arrays_go_through_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "_ROOT", tmp_path / "absent")
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setattr(shm.tempfile, "gettempdir", lambda: str(temporary))
    array = np.arange(100_000)
    async with Driver("processes", fake_config()) as driver:
        assert len(list(temporary.iterdir())) == 1
        driver.executor.submit(EngineRequest(id="a", inputs={"echo": array}))
        await driver.end("a")
        np.testing.assert_array_equal(driver.data("a")[0], array)
    assert list(temporary.iterdir()) == []


_PARENT = """
    import asyncio, json, sys
    sys.path.append(sys.argv[1])
    from pathlib import Path
    import numpy as np
    from mstar.cluster import shm
    from mstar.spec.request import EngineRequest
    shm._ROOT = Path(sys.argv[2])
    from driver import Driver, fake_config

    async def main():
        driver = Driver("processes", fake_config())
        await driver.executor.start()
        driver.executor.submit(EngineRequest(id="a", inputs={"x": np.zeros(100_000)}, params={"hang": 3600}))
        await asyncio.sleep(0)  # one turn of the loop, in which the command is sent
        await asyncio.sleep(0)
        print(json.dumps(driver.executor.pid), flush=True)
        await asyncio.sleep(3600)

    asyncio.run(main())
"""


def test_the_worker_ends_with_its_parent_and_clears_shared_memory(arena_root: Path) -> None:
    arguments: list[Any] = [sys.executable, "-c", textwrap.dedent(_PARENT), str(Path(__file__).parent), str(arena_root)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = json.loads(parent.stdout.readline())
        assert lives(child)
        parent.kill()
    deadline = time.monotonic() + 10
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lives(child)
    assert list(arena_root.iterdir()) == []


def test_the_folder_of_a_killed_owner_is_swept_and_that_of_a_living_one_is_not(arena_root: Path) -> None:
    living = shm.Arena.create(arena_root)
    dead, somebodys = arena_root / "mstar-arena-dead", arena_root / "mstar-weights"
    dead.mkdir()
    somebodys.mkdir()
    (dead / "o1").write_bytes(b"left behind")
    young, late = arena_root / "mstar-arena-new-young", arena_root / "mstar-arena-new-late"
    for path in (young, late):
        path.mkdir()
    old = time.time() - 3600
    for path in (living.path, late, somebodys):
        os.utime(path, (old, old))
    another = shm.Arena.create(arena_root)
    assert set(arena_root.iterdir()) == {living.path, young, somebodys, another.path}
    living.remove()
    another.remove()


def test_a_full_file_system_is_told_from_other_faults(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = shm.Arena.create(arena_root)

    def no_more_files(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(shm.os, "open", no_more_files)
        assert arena.write(memoryview(b"x")) is None
    arena.remove()
    with pytest.raises(FileNotFoundError):
        arena.write(memoryview(b"x"))

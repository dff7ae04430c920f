"""The timeline: what is in it agrees with what the worker did, and no disk or kill makes it unreadable."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from mstar.engine.trace import Trace
from mstar.registry import Registry
from mstar.spec.request import Done, Failed
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.faults import doom
from mstar.testing.miniatures import MINIATURES, Example, Miniature, miniature
from mstar.worker import trace_file
from mstar.worker.trace import DeviceClock, Timeline
from mstar.worker.trace_file import Info, Note, Stages, TraceFile

ALL = pytest.mark.parametrize("mini", MINIATURES, ids=lambda m: m.key)
STAGES = {"admit", "schedule", "plan", "launch", "commit", "land", "route", "foresee", "failed"}
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture(autouse=True)
def no_stage_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "_LEAST_NS", 0)


def traced(key: str | Miniature, registry: Registry, file: Path, **overrides: Any) -> Driver:
    driver = Driver(key, registry, engine={"trace": str(file)}, **overrides)
    assert isinstance(driver.worker.engine.trace, Timeline)
    return driver


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def spans(events: Events, track: int) -> list[tuple[int, int, dict[str, Any]]]:
    found = [e for e in events if e["ph"] == "X" and e["tid"] == track]
    return sorted(((ns(e["ts"]), ns(e["ts"] + e["dur"]), e) for e in found), key=lambda span: (span[0], -span[1]))


def requests(events: Events) -> dict[str, list[tuple[str, str]]]:
    """id → (begin or end, name) in order."""
    found = defaultdict(list)
    for event in events:
        if event.get("cat") == "request":
            found[event["id"]].append((event["ph"], event["name"]))
    return dict(found)


def counters(events: Events, name: str) -> list[dict[str, float]]:
    return [e["args"] for e in events if e["ph"] == "C" and e["name"] == name]


def assert_nested(events: Events) -> None:
    """Host stages lie within their step without overlap, device steps follow each other, requests' phases lie in
    their request."""
    step_end = last = 0
    for began, ended, event in spans(events, trace_file.HOST):
        if event["name"] == "step":
            assert began >= step_end
            step_end, last = ended, began
        else:
            assert event["name"] in STAGES
            assert last <= began <= ended <= step_end
            last = ended
    last = 0
    for began, ended, _ in spans(events, trace_file.DEVICE):
        assert last <= began <= ended
        last = ended
    for steps in requests(events).values():
        assert steps[0] == ("b", "request")
        assert steps[-1] == ("e", "request")
        phases = [name for kind, name in steps[1:-1] if kind == "b"]
        assert phases == ["queued", "prefill", "decode"][: len(phases)]
        assert steps[1:-1] == [(kind, name) for name in phases for kind in "be"]


@ALL
@pytest.mark.usefixtures("loop")
def test_agrees_with_the_worker(mini: Miniature, registry: Registry, file: Path) -> None:
    """Arrivals beyond what may run at once, a cancel and a failure, then rest."""
    driver = traced(mini, registry, file, max_concurrent_requests=4)
    doomed = {"r3"}
    doom(driver, doomed)
    rng = random.Random(7)
    names = [f"r{i}" for i in range(8)]
    for name in names:
        driver.submit(name, mini.example(rng))
    for _ in range(3):
        driver.worker.step()
    driver.cancel("r1")
    driver.take()
    driver.run()
    driver.worker.step()
    status = driver.worker.status()
    driver.worker.close()

    events: Events = json.loads(file.read_text())
    assert_nested(events)
    assert requests(events).keys() == set(names)
    assert len(spans(events, trace_file.DEVICE)) == status["steps"]
    launches = [e for _, _, e in spans(events, trace_file.HOST) if e["name"] == "launch" and "args" in e]
    assert [e["args"] for e in launches] == [e["args"] for _, _, e in spans(events, trace_file.DEVICE)]
    assert [e["args"]["step"] for e in launches] == list(range(1, status["steps"] + 1))
    landed = [e["args"]["step"] for _, _, e in spans(events, trace_file.HOST) if e["name"] == "land" and "args" in e]
    assert landed == list(range(1, status["steps"] + 1))
    assert counters(events, "requests")[-1] == {"running": status["running"], "waiting": status["waiting"]}
    for name, usage in status["resources"].items():
        if usage["total"]:
            assert counters(events, f"{name} in use")[-1] == {"used": usage["used"], "cached": usage["cached"]}
    assert status["observer_failures"] == {}
    ends = {e["id"]: e["args"] for e in events if e["ph"] == "e" and e["name"] == "request"}
    for name, end in driver.ended.items():
        assert ends[name]["reason"] == (end.reason if isinstance(end, Done) else end.code)
        if isinstance(end, Done):
            assert ends[name]["usage"]["output"] == end.usage.output
    instants = [(e["name"], e["args"].get("request")) for e in events if e["ph"] == "i"]
    assert [request for name, request in instants if name == "cancel"] == [
        name for name, end in driver.ended.items() if isinstance(end, Done) and end.reason == "cancelled"
    ]
    assert [request for name, request in instants if name == "fail"] == [
        name for name, end in driver.ended.items() if isinstance(end, Failed)
    ]
    assert isinstance(driver.ended["r3"], Failed)


def test_phases_of_a_chat(registry: Registry, file: Path) -> None:
    """The prompt is cut into chunks: prefill takes the steps until the first token goes out, decode the others."""
    mini = miniature("mini_chat")
    driver = traced(
        mini,
        registry,
        file,
        max_concurrent_requests=1,
        scheduler={"max_step_tokens": 3},
        resources={"kv": {"prefix_cache": False}},
    )
    example = Example("Hello there, you and you and you", {"max_tokens": 5, "ignore_eos": True})
    length = sum(len(ids) for ids in driver.prepare("r", example).request.inputs.values())
    for name in ("r0", "r1"):
        driver.submit(name, example)
    driver.run()
    driver.worker.close()
    events: Events = json.loads(file.read_text())
    at = {(e["id"], e["ph"], e["name"]): ns(e["ts"]) for e in events if e.get("cat") == "request"}
    steps = [(began, e["args"]) for began, _, e in spans(events, trace_file.DEVICE)]
    for name in ("r0", "r1"):
        inside = [a for began, a in steps if at[name, "b", "prefill"] <= began < at[name, "e", "prefill"]]
        assert sum(a["tokens"] for a in inside) == length > 3
        assert all(a["tokens"] == 3 for a in inside[:-1])
        after = [a for began, a in steps if at[name, "b", "decode"] <= began < at[name, "e", "decode"]]
        assert [a["tokens"] for a in after] == [1] * 4
    assert at["r1", "b", "prefill"] >= at["r0", "e", "request"]  # it waited until the other was done


@pytest.mark.parametrize("lookahead", [False, True])
def test_looking_ahead_shows(lookahead: bool, registry: Registry, file: Path) -> None:
    """Steps launched ahead say so, and what a stop made needless is an instant."""
    example = Example("Hello", {"max_tokens": 9})
    driver = Driver("mini_chat", registry, engine={"trace": str(file), "lookahead": lookahead})
    driver.submit("whole", example)
    driver.run()
    third = driver.result("whole")["text"][2]
    prepared = driver.prepare("stopped", example)
    for name, params in prepared.request.sampling.items():
        prepared.request.sampling[name] = msgspec.structs.replace(params, stop_token_ids=(third,))
    driver.submit_prepared(prepared, example)
    driver.run()
    assert driver.ended["stopped"].reason == "stop"  # type: ignore[union-attr]
    driver.worker.close()
    events: Events = json.loads(file.read_text())
    assert any(e["args"]["ahead"] for _, _, e in spans(events, trace_file.DEVICE)) is lookahead
    retracts = [e["args"]["request"] for e in events if e["name"] == "retract"]
    assert retracts == (["stopped"] if lookahead else [])


def test_off_does_nothing(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    driver = Driver("mini_chat", registry)
    assert type(driver.worker.engine.trace) is Trace
    assert not any("timeline" in name for name, _ in driver.worker.observers._callers["mstar_request_ended"])
    assert list(tmp_path.iterdir()) == []


def test_an_idle_worker_writes_no_more(registry: Registry, file: Path) -> None:
    driver = traced("mini_chat", registry, file)
    for _ in range(5):
        driver.worker.step()
    driver.worker.close()
    events: Events = json.loads(file.read_text())
    assert spans(events, trace_file.HOST) == []
    assert len(counters(events, "requests")) == 1


# --- the file --------------------------------------------------------------------------------------------------------

KILLED = """
import os, sys
from pathlib import Path
from mstar.worker.trace_file import Info, Stages, TraceFile
path = Path(sys.argv[1])
file, told = TraceFile(path, "p", {1: "host"}), False
while True:
    file.put(Stages(1, [("launch", 1000, Info(1, "lm", "forward", 32, 32, True, True))]))
    if not told and path.stat().st_size > 100_000:
        print("written", flush=True)
        told = True
"""


def test_a_killed_process_leaves_a_file_that_loads(file: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(file)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.kill()
    text = file.read_text()
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    events: Events = json.loads(text + "]")
    assert len(spans(events, trace_file.HOST)) > 500


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts this process's open files")
def test_no_handle_stays_open(registry: Registry, tmp_path: Path) -> None:
    before = handles()
    for i in range(3):
        traced("mini_chat", registry, tmp_path / f"{i}.json").worker.close()
    assert handles() == before


def test_a_file_that_cannot_be_opened_costs_a_warning(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver("mini_chat", registry, engine={"trace": str(tmp_path / "no folder" / "trace.json")})
    assert_serves(driver)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "serving goes on without" in caplog.text


def assert_serves(driver: Driver) -> None:
    example = miniature("mini_chat").example(random.Random(1))
    driver.submit("r", example)
    driver.run()
    assert isinstance(driver.ended["r"], Done)
    driver.worker.close()


class FullDisk:
    """Takes some bytes, part of a write last."""

    def __init__(self, file: Any, room: int):
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken: int = self.file.write(data[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_costs_a_warning(registry: Registry, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = traced("mini_chat", registry, file)
    timeline: Any = driver.worker.engine.trace
    timeline._file._file = FullDisk(timeline._file._file, 20)
    assert_serves(driver)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "No space left" in caplog.text
    assert json.loads(file.read_text() + "]")  # cut after the last whole event
    assert timeline._file._file is None
    assert not timeline._file._queue


def test_a_slow_disk_drops_steps_before_requests(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, and the file says what is missing."""
    monkeypatch.setattr(trace_file, "_QUEUE", 10)
    monkeypatch.setattr(trace_file, "_EVERY_S", 1000.0)
    out = TraceFile(file, "p", {})
    for i in range(15):
        out.put(Stages(i, [("plan", i + 1, 0)]))
    for _ in range(15):
        out.put(Note("b", "request", 1, "r"))
    assert len(out._queue) == 20
    out.close()
    events: Events = json.loads(file.read_text())
    assert [e["args"] for e in events if e["ph"] == "i"] == [{"events": 10}]
    assert len([e for e in events if e["ph"] == "b"]) == 10


def test_a_long_file_is_put_aside(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two files, each valid by itself, that go on from each other."""
    monkeypatch.setattr(trace_file, "_CHUNK", 1)
    out = TraceFile(file, "p", {1: "host"}, most_bytes=1000)
    for i in range(50):
        out.put(Note("i", f"event {i}", i))
    out.close()
    old = file.with_name("trace.old.json")
    assert set(file.parent.iterdir()) == {old, file}
    names = []
    for part in (old, file):
        events: Events = json.loads(part.read_text())
        assert [e["name"] for e in events[:2]] == ["process_name", "thread_name"]
        names += [e["name"] for e in events[2:]]
        assert part.stat().st_size < 1500
    assert names == [f"event {i}" for i in range(50 - len(names), 50)]


def test_an_earlier_file_is_put_aside(file: Path) -> None:
    """A worker that was started again does not overwrite how its predecessor ended."""
    file.write_text("[\n{}")
    TraceFile(file, "p", {}).close()
    assert file.with_name("trace.old.json").read_text() == "[\n{}"


def test_names_are_escaped(file: Path) -> None:
    out = TraceFile(file, 'a "b"', {})
    out.put(Note("b", 'x\n"', 1, 'id"', {"message": "\\"}))
    out.close()
    process, event = json.loads(file.read_text())
    assert process["args"] == {"name": 'a "b"'}
    assert (event["name"], event["id"], event["args"]) == ('x\n"', 'id"', {"message": "\\"})


# --- the device's clock ----------------------------------------------------------------------------------------------


class Gpu:
    """A stream whose work is done when the test says so. Its events tell the time as CUDA's do: in float32 ms, each
    difference by itself; its clock is fast by *drift*."""

    def __init__(self, drift: float = 0.0):
        self.now = self.finished = 0
        self.drift = drift

    def event(self) -> GpuEvent:
        return GpuEvent(self)


class GpuEvent:
    def __init__(self, gpu: Gpu):
        self.gpu, self.at = gpu, 0

    def record(self, stream: Any) -> None:
        self.at = max(self.gpu.now, self.gpu.finished)

    def query(self) -> bool:
        return self.at <= self.gpu.now

    def elapsed_time(self, later: GpuEvent) -> float:
        return float(torch.tensor((later.at - self.at) / 1e6 * (1 + self.gpu.drift), dtype=torch.float32))


def info(step: int) -> Info:
    return Info(step, "lm", "forward", 1, 1, True, False)


def run_steps(gpu: Gpu, clock: DeviceClock, takes: list[int], every: int) -> Callable[[int], list[Any]]:
    """Launch a step each *every* ns that keeps the device busy for what *takes* says."""
    for step, busy in enumerate(takes):
        clock.begin(gpu.now)
        gpu.finished = max(gpu.now, gpu.finished) + busy
        clock.end()
        clock.keep(info(step))
        gpu.now += every
    return clock.done


def test_device_steps_are_placed_on_the_hosts_clock() -> None:
    gpu = Gpu()
    gpu.now = 10**15
    clock = DeviceClock(torch.device("cpu"), gpu.event)
    done = run_steps(gpu, clock, [300_000, 100_000, 500_000], every=200_000)
    first = done(gpu.now)  # 600 µs later: the first two are done, the third ends at 900
    assert [(d.info.step, d.began - 10**15, d.ended - 10**15) for d in first] == [
        (0, 0, 300_000),
        (1, 300_000, 400_000),
    ]
    assert done(gpu.now) == []
    gpu.now = 10**15 + 900_000
    assert [(d.began - 10**15, d.ended - 10**15) for d in done(gpu.now)] == [(400_000, 900_000)]
    assert len(clock._spare) == 5  # the last end is kept: the next step is measured from it
    run_steps(gpu, clock, [1000], every=1000)
    assert len(clock._spare) == 3  # used again


@pytest.mark.parametrize("drift", [1e-4, -1e-4])
def test_clocks_that_drift_are_held_together(drift: float) -> None:
    """A device idle between steps, whose clock is off by 0.1 ms each second: after 100 s, 10 ms without correction."""
    gpu = Gpu(drift)
    clock = DeviceClock(torch.device("cpu"), gpu.event)
    last = 0
    for step in range(10_000):
        asked = gpu.now
        clock.begin(gpu.now)
        gpu.finished = gpu.now + 1_000_000
        clock.end()
        clock.keep(info(step))
        gpu.now += 1_050_000
        (device,) = clock.done(gpu.now)
        gpu.now += 8_950_000
        assert last <= device.began <= device.ended
        assert asked - 1000 <= device.began <= asked + 51_000  # as exact as the host can tell
        last = device.ended


def test_a_launch_that_failed_leaves_no_step() -> None:
    gpu = Gpu()
    clock = DeviceClock(torch.device("cpu"), gpu.event)
    clock.begin(0)  # its launch raises
    run_steps(gpu, clock, [1000], every=2000)
    assert [d.info.step for d in clock.done(gpu.now)] == [0]


def test_a_lost_device_ends_the_device_track_only(file: Path) -> None:
    class Lost(GpuEvent):
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpu = Gpu()
    clock = DeviceClock(torch.device("cpu"), lambda: Lost(gpu))
    run_steps(gpu, clock, [1000], every=2000)
    out = TraceFile(file, "p", {})
    timeline = Timeline(out, {}, clock)
    timeline.begin()
    timeline.stage("admit")
    timeline.end(0, 0, lambda request: False)
    timeline.rest(0, 0)
    timeline.close()
    events: Events = json.loads(file.read_text())
    assert [e["name"] for _, _, e in spans(events, trace_file.HOST)] == ["step", "admit"]

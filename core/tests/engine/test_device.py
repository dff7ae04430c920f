"""A lost device ends the worker; an error of one request does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from mstar.cluster.base import Phase
from mstar.cluster.inline import InlineExecutor
from mstar.engine.base import Runner
from mstar.engine.device import DeviceLost, MeshLost, is_lost, raise_if_lost
from mstar.engine.engine import Engine
from mstar.nn.node import Node, Step
from mstar.resources.base import Owner
from mstar.runtime.opening import prepare_config
from mstar.settings import Settings
from mstar.spec.errors import PeerLost, RequestError
from mstar.spec.request import Event, Failed
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.miniatures import Example, miniature
from mstar.worker.core import Worker

ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call."
ASSERTED = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(ASSERTED + ADVICE),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered" + ADVICE),
        torch.AcceleratorError("an error of an accelerator that has other words"),
        RuntimeError("CUDA error: unspecified launch failure" + ADVICE),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( … )`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("HIP error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
)
def test_errors_after_which_nothing_works(error: Exception) -> None:
    assert is_lost(error)
    with pytest.raises(DeviceLost, match="the device is lost") as caught:
        raise_if_lost(error)
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "[/build/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:53990: Connection reset by peer. This is "
            "typically caused by a remote worker hanging or bugs in the application.",
            "Read error [127.0.0.1]:53990: Connection reset by peer",
        ),
        (
            "NCCL error in: /build/NCCLUtils.hpp:121, remote process exited or there was a network error\nLast error:",
            "NCCL error in: /build/NCCLUtils.hpp:121, remote process exited or there was a network error",
        ),
    ],
)
def test_a_mesh_that_another_rank_has_left(said: str, reason: str) -> None:
    with pytest.raises(MeshLost) as caught:
        raise_if_lost(RuntimeError(said))
    assert isinstance(caught.value, PeerLost)
    assert str(caught.value) == f"another rank of its mesh is gone, or does something else ({reason})"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 131072.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory" + ADVICE),
        torch.AcceleratorError("CUDA error: invalid configuration argument" + ADVICE),
        torch.AcceleratorError("CUDA error: invalid device ordinal" + ADVICE),
        RuntimeError("CUDA error: too many resources requested for launch"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (1x2 and 3x4)"),
        ValueError(ASSERTED),
        RequestError(ASSERTED),
        MemoryError(),
    ],
)
def test_errors_of_one_request(error: Exception) -> None:
    assert not is_lost(error)
    raise_if_lost(error)


def test_an_error_that_hides_a_lost_device() -> None:
    def hides() -> None:
        try:
            raise RuntimeError(ASSERTED)
        except RuntimeError as error:
            raise ValueError("bad values") from error

    with pytest.raises(ValueError, match="bad values") as hidden:
        hides()
    assert is_lost(hidden.value)
    with pytest.raises(DeviceLost, match="device-side assert"):
        raise_if_lost(hidden.value)


def test_a_lost_device_is_told_once() -> None:
    lost = DeviceLost("gone")
    with pytest.raises(DeviceLost) as caught:
        raise_if_lost(lost)
    assert caught.value is lost


class Dying(Runner):
    """A device that dies in its *at*-th step, and says so again in every later one."""

    def __init__(self, inner: Runner, at: int, error: Exception):
        self.inner, self.left, self.error, self.tried = inner, at, error, 0

    def run(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        self.left -= 1
        if self.left > 0:
            return self.inner.run(node, entry, step, inputs)
        self.tried += 1
        raise self.error


def dying(driver: Driver, error: Exception) -> Dying:
    engine: Engine = driver.worker.engine
    engine.runner = runner = Dying(engine.runner, 2, error)
    return runner


def test_a_step_on_a_lost_device_is_not_run_in_halves() -> None:
    driver = Driver(miniature("mini_chat"))
    for name in "abcd":
        driver.submit(name, Example("hello"))
    runner = dying(driver, torch.AcceleratorError(ASSERTED + ADVICE))
    with pytest.raises(DeviceLost, match=r"the device is lost \(CUDA error: device-side assert triggered\)"):
        driver.run()
    assert runner.tried == 1
    assert driver.ended == {}, "no request is blamed"


def test_memory_that_ran_out_is_the_requests() -> None:
    driver = Driver(miniature("mini_chat"))
    for name in "ab":
        driver.submit(name, Example("hello"))
    dying(driver, torch.OutOfMemoryError("CUDA out of memory."))
    driver.run()
    assert {type(end) for end in driver.ended.values()} == {Failed}
    driver.assert_empty()


@pytest.mark.parametrize("where", ["submit", "admit", "route"])
def test_a_lost_device_is_noticed_outside_of_steps(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(miniature("mini_chat"))

    def lost(*arguments: Any, **named: Any) -> Any:
        raise torch.AcceleratorError(ASSERTED)

    if where == "admit":

        def reserve(owner: Owner, units: int) -> bool:
            return lost()  # type: ignore[no-any-return]

        monkeypatch.setattr(driver.worker.resources["sampler"], "reserve", reserve)
    elif where == "route":
        monkeypatch.setattr("mstar.graph.run.RequestRun.start", lost)
    else:
        monkeypatch.setattr("mstar.worker.arrivals.RequestRun", lost)

    def serve() -> None:
        driver.submit("a", Example("hello"))
        driver.run()

    with pytest.raises(DeviceLost):
        serve()
    assert driver.ended == {}


class DyingWorker(Worker):
    """Its device dies in the second step; its pools cannot be closed either."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.engine.runner = Dying(self.engine.runner, 2, torch.AcceleratorError(ASSERTED + ADVICE))

    def close(self) -> None:
        raise torch.AcceleratorError(ASSERTED)


async def test_all_requests_of_a_lost_device_are_told_so(caplog: pytest.LogCaptureFixture) -> None:
    registry = miniature_registry()
    events: list[Event] = []
    phases: list[Phase] = []
    ended = asyncio.Event()

    def take(new: Any) -> None:
        events.extend(new)
        if sum(isinstance(event, Failed) for event in events) == 2:
            ended.set()

    config = prepare_config(registry.model("mini_chat"), Settings(), {}, registry)
    executor = InlineExecutor(config, take, phases.append, registry, worker_factory=f"{__name__}:DyingWorker")
    await executor.start()
    driver = Driver(miniature("mini_chat"), registry)
    for name in "ab":
        executor.submit(driver.prepare(name, Example("hello")).request)
    await asyncio.wait_for(ended.wait(), 10)
    await executor.stop()
    for event in events:
        if isinstance(event, Failed):
            assert (event.status, event.code) == (503, "worker_died")
            assert "the device is lost (CUDA error: device-side assert triggered)" in event.message
    assert "failed" in [phase.name for phase in phases]
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == [
        "the worker of 'mini_chat' died",
        "the worker of 'mini_chat' could not be closed",
    ]

"""Lanes on GPUs. With one GPU: their streams, over a stand-in for the communicator, and what NCCL says of two ranks on
one device. With two: NCCL itself.

    pytest core/tests/worker/test_cuda_lanes.py
"""

from __future__ import annotations

import logging
import random
import threading
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar.cluster.base import WorkerConfig
from mstar.registry import Registry
from mstar.spec.request import Done
from mstar.testing.drive import miniature_registry
from mstar.testing.miniatures import miniature
from mstar.testing.rank_drive import RankDriver
from mstar.worker import build, lanes, tensor_channel
from mstar.worker.aside import Aside
from mstar.worker.handles import unpack
from mstar.worker.lanes import lane_store
from mstar.worker.messages import Run
from mstar.worker.tensor_channel import TensorChannel, arrived

from .test_miniatures import assert_right, examples
from .test_ranks import assert_all_right

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPUS = torch.cuda.device_count()
EAGER = {"runner": "eager"}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("mini_chat", {"lm": {"prefill": 1, "decode": 0}}),
    ("mini_chat", {"lm": {"prefill": 0, "decode": 1}}),
    ("mini_hybrid", {"lm": {"prefill": 1, "decode": 0}}),
    ("mini_seq2seq", {"encoder": 1, "decoder": 0}),
    ("mini_seq2seq", {"encoder": 0, "decoder": 1}),
    ("mini_tts", {"lm": {"prefill": 1, "decode": 2}, "codec": 0}),
]


class _Work:
    def wait(self) -> None:
        """What a stream is told to wait for has been told already."""


class StandIn:
    """A communicator of two ranks on one GPU: what one end sends is copied when the other receives. Who receives first
    is told nothing, as NCCL's kernel would find nothing."""

    sent: dict[str, deque[tuple[Tensor, Any]]] = defaultdict(deque)
    _turn = threading.Condition()

    def __init__(self, name: str):
        self.name = name

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        event = torch.cuda.Event()
        event.record()
        with self._turn:
            self.sent[self.name].append((tensors[0], event))
            self._turn.notify_all()
        return _Work()

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        with self._turn:
            assert self._turn.wait_for(lambda: self.sent[self.name], 20.0)
            data, event = self.sent[self.name].popleft()
        torch.cuda.current_stream().wait_event(event)
        assert data.shape == tensors[0].shape
        torch.cuda._sleep(2_000_000)  # a reader that does not wait finds what was there before
        tensors[0].copy_(data)
        data.record_stream(torch.cuda.current_stream())  # NCCL's end of sending comes when it has been read
        return _Work()

    def abort(self) -> None:
        self.sent.pop(self.name, None)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks on the first GPU, with tensors of any size by lanes."""

    def first(config: WorkerConfig) -> torch.device:
        return torch.device("cuda", 0)

    monkeypatch.setattr(build, "rank_device", first)
    monkeypatch.setattr(tensor_channel, "LARGE_BYTES", 1)


@pytest.fixture
def stand_in(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(store: Any, number: int, device: torch.device) -> StandIn:
        key = f"communicator-{id(StandIn)}"
        name = store.get(key).decode() if number else None
        if name is None:
            name = str(random.random())
            store.set(key, name)
        return StandIn(name)

    monkeypatch.setattr(lanes, "_nccl_group", named)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("key", "placement"), LAYOUTS, ids=str)
def test_answers_over_streams(key: str, placement: dict[str, Any], registry: Registry) -> None:
    driver = RankDriver(miniature(key), registry, seed=4, placement=placement, dtype="float32", engine=EAGER)
    assert_all_right(driver, miniature(key), 8, seed=21)
    ranks = driver.worker.status()["ranks"]
    assert {rank["way"] for rank in ranks} == {"nccl"}
    assert any(sum(rank["lane_bytes"].values()) > 0 for rank in ranks)


def test_state_leaves_beside_the_steps_that_run() -> None:
    device = torch.device("cuda", 0)
    aside = Aside(device)
    state = torch.arange(1 << 20, device=device)
    with aside.behind():
        state.flip(0).sum().item()  # room to gather in, and kernels that are loaded
    torch.cuda._sleep(20_000_000)
    state.add_(1)  # the step that made it
    mark = aside.mark()
    torch.cuda._sleep(2_000_000_000)  # a long prompt, launched behind it
    busy = aside.mark()
    with aside.behind(mark):
        gathered = state.flip(0)
        there = torch.cuda.Event()
        there.record()
        there.synchronize()
        assert int(gathered[0].cpu()) == 1 << 20
    assert not busy.query()


@pytest.mark.usefixtures("stand_in")
def test_a_rank_dies_over_streams(registry: Registry) -> None:
    mini = miniature("mini_chat")
    driver = RankDriver(mini, registry, placement={"lm": {"prefill": 1, "decode": 0}}, dtype="float32", engine=EAGER)
    cases = examples(mini, 6, seed=3)
    for name, example in cases.items():
        driver.submit(name, example)
    driver.run(until=lambda: driver.worker.status()["moves"]["done"] > 1)
    driver.kill(1)
    driver.run(until=lambda: True)
    driver.start(1)
    for name, example in examples(mini, 3, seed=9).items():
        driver.submit(f"again-{name}", example)
    driver.run()
    for name, end in driver.ended.items():
        if isinstance(end, Done):
            example = {**cases, **{f"again-{n}": e for n, e in examples(mini, 3, seed=9).items()}}[name]
            assert_right(mini, example, dict(driver.result(name)))
    assert sum(isinstance(end, Done) for end in driver.ended.values()) >= 4
    driver.assert_empty()


@pytest.mark.usefixtures("one_gpu")
def test_two_ranks_on_one_device_fall_back(
    registry: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL wants a GPU for each rank. Said once, and the answers are right."""
    monkeypatch.setattr(lanes, "_PATIENCE", lanes._PATIENCE / 4)
    mini = miniature("mini_seq2seq")
    with caplog.at_level(logging.INFO, "mstar.worker.rank_links"):
        driver = RankDriver(mini, registry, placement={"encoder": 1, "decoder": 0}, dtype="float32", engine=EAGER)
        assert_all_right(driver, mini, 3, seed=2)
    told = [record.message for record in caplog.records if record.name == "mstar.worker.rank_links"]
    assert len(told) == 1
    assert "tensors pass by messages" in told[0]
    assert {rank["way"] for rank in driver.worker.status()["ranks"]} == {"shm"}


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_nccl_between_two_gpus(tmp_path: Path) -> None:
    """What is computed just before is what arrives, both ways at once, small and large."""
    devices = [torch.device("cuda", number) for number in range(2)]
    ends = [TensorChannel(number, devices[number]) for number in range(2)]
    stores = [lane_store(str(tmp_path), first)[0] for first in (True, False)]
    for end, store in zip(ends, stores, strict=True):
        end.begin("nccl", lambda store=store: store, True)
    pause = threading.Event()
    while any(end._opened is None for end in ends):
        pause.wait(0.01)
    assert [end.opened() for end in ends] == ["", ""]
    for end in ends:
        end.use()
    for size in (128 << 10, 1 << 20, 64 << 20):
        messages, wanted = [], []
        for end, device in zip(ends, devices, strict=True):
            with torch.cuda.device(device):
                x = torch.rand(size // 16, 4, device=device)
                torch.cuda._sleep(10_000_000)
                tensor = x * 2 + device.index
                wanted.append(tensor)
                messages += end.launch([Run(step=1, rows=[], values=[end.pack(1, tensor)])])
        got = [ends[1].resolve(messages[0]), ends[0].resolve(messages[1])]
        for message, device, tensor in zip(got, (devices[1], devices[0]), wanted, strict=True):
            while not arrived(message):
                pause.wait(0.001)
            with torch.cuda.device(device):
                assert torch.equal(unpack(message.values[0], device).cpu(), tensor.cpu())
    for end in ends:
        end.step()
        assert end.on_the_way == 0
        end.close()


@pytest.mark.skipif(GPUS < 3, reason="needs three GPUs")
@pytest.mark.parametrize(("key", "placement"), LAYOUTS, ids=str)
def test_answers_by_nccl(
    key: str, placement: dict[str, Any], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_channel, "LARGE_BYTES", 1)
    driver = RankDriver(miniature(key), registry, seed=4, placement=placement, dtype="float32", engine=EAGER)
    assert_all_right(driver, miniature(key), 8, seed=21)
    assert {rank["way"] for rank in driver.worker.status()["ranks"]} == {"nccl"}

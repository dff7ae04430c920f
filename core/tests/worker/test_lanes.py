"""Large tensors by lanes of ``torch.distributed``: the same answers as by messages, and ends that are nobody else's."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mstar.registry import Registry
from mstar.spec.request import Done, Failed
from mstar.testing.drive import miniature_registry
from mstar.testing.miniatures import miniature
from mstar.testing.rank_drive import RankDriver
from mstar.worker import lanes, tensor_channel
from mstar.worker.handles import Arriving, unpack
from mstar.worker.lanes import lane_store
from mstar.worker.messages import Contents, Run
from mstar.worker.tensor_channel import TensorChannel, arrived, way_between

from .test_miniatures import assert_right, examples
from .test_places_of_walks import PLACES
from .test_ranks import assert_all_right

pytestmark = [pytest.mark.filterwarnings("error")]
CPU = torch.device("cpu")
GLOO = {"values": "gloo"}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


@pytest.fixture
def all_by_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Miniatures have no large tensors."""
    monkeypatch.setattr(tensor_channel, "LARGE_BYTES", 1)


def passed(driver: RankDriver) -> int:
    """Bytes that went by the lanes."""
    return sum(sum(rank["lane_bytes"].values()) for rank in driver.worker.status()["ranks"])


# --- one channel ------------------------------------------------------------------------------------------------------


class Pair:
    """Both ends of a channel, in one process."""

    def __init__(self, place: str):
        self.ends = TensorChannel(0, CPU), TensorChannel(1, CPU)
        store, told = lane_store(place, first=True)
        local = not place.startswith("tcp://")
        self.ends[1].begin("gloo", lambda: store, local)
        self.ends[0].begin("gloo", lambda: lane_store(told, first=False)[0], local)
        self.wait(lambda: all(end._opened is not None for end in self.ends))
        assert [end.opened() for end in self.ends] == ["", ""]
        for end in self.ends:
            end.use()

    @staticmethod
    def wait(condition: Any, seconds: float = 20.0) -> float:
        """Until *condition*; the seconds that it took."""
        began, pause = time.monotonic(), threading.Event()
        while not condition():
            assert time.monotonic() - began < seconds
            pause.wait(0.001)
        return time.monotonic() - began

    def settle(self) -> None:
        self.wait(lambda: [end.step() for end in self.ends] and not any(end.busy for end in self.ends))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(str(tmp_path))
    yield made
    for end in made.ends:
        end.close()


def run(*values: Contents) -> Run:
    return Run(step=1, rows=[], values=list(values))


TENSORS = [
    torch.arange(1 << 14, dtype=torch.float32).reshape(128, 128),
    torch.randn(400, 90).to(torch.bfloat16),
    torch.arange(40_000, dtype=torch.int64).reshape(2, -1).t(),
    torch.rand(1030, 70) > 0.5,
]


def test_tensors_come_as_they_were(pair: Pair) -> None:
    here, there = pair.ends
    for sender, receiver in ((here, there), (there, here)):
        (message,) = sender.launch([run(*(sender.pack(n, tensor) for n, tensor in enumerate(TENSORS)))])
        assert all(contents.data is None for contents in message.values)
        got = receiver.resolve(message)
        pair.wait(lambda got=got: arrived(got))
        for contents, tensor in zip(got.values, TENSORS, strict=True):
            found = unpack(contents, CPU)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
    pair.settle()
    assert here.on_the_way == there.on_the_way == 0
    assert here.sent == there.received == sum(tensor.nbytes for tensor in TENSORS)


def test_ranks_on_two_machines_meet_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    pair = Pair("tcp://127.0.0.1")
    (message,) = pair.ends[0].launch([run(pair.ends[0].pack(1, TENSORS[0]))])
    got = pair.ends[1].resolve(message)
    pair.wait(lambda: arrived(got))
    assert torch.equal(unpack(got.values[0], CPU), TENSORS[0])
    for end in pair.ends:
        end.close()


def test_small_ones_and_ids_stay_in_messages(pair: Pair) -> None:
    here = pair.ends[0]
    for tensor in (torch.zeros(8), torch.arange(100_000), torch.zeros(0, 5)):
        assert here.pack(1, tensor).data is not None


def test_rank_0_does_not_wait_for_what_a_lane_can_bring(pair: Pair) -> None:
    middling = torch.zeros(100, 50)
    assert [end.pack(1, middling).data is None for end in pair.ends] == [True, False]


def test_what_no_message_announces_is_not_sent(pair: Pair) -> None:
    """Else what is sent next would be taken for it."""
    here, there = pair.ends
    here.pack(1, TENSORS[0])  # a step that could not be told
    here.launch([run()])
    (message,) = here.launch([run(here.pack(2, TENSORS[1]))])
    got = there.resolve(message)
    pair.wait(lambda: arrived(got))
    assert torch.equal(unpack(got.values[0], CPU), TENSORS[1])


def test_an_announcement_out_of_order_is_noticed(pair: Pair) -> None:
    here, there = pair.ends
    here.launch([run(here.pack(1, TENSORS[0]))])  # a message that is lost
    (second,) = here.launch([run(here.pack(2, TENSORS[1]))])
    with pytest.raises(ValueError, match="tensor 2 is announced, and 1 comes next"):
        there.resolve(second)


def test_beyond_its_bound_it_has_no_room(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_channel, "_ON_THE_WAY", 32 << 20)
    here, there = pair.ends
    large = torch.zeros(40 << 20, dtype=torch.uint8).view(1, -1)
    assert here.has_room
    (message,) = here.launch([run(here.pack(1, large))])
    here.step()
    assert not here.has_room  # nobody has made room for it
    got = there.resolve(message)
    pair.settle()
    assert arrived(got)
    assert here.has_room


def test_a_rank_that_dies_ends_what_is_on_its_way_both_ways(pair: Pair) -> None:
    here, there = pair.ends
    large = torch.zeros(64 << 20, dtype=torch.uint8).view(1, -1)
    here.launch([run(here.pack(1, large))])  # nobody receives it
    coming = here.resolve(run(Contents(2, "float32", (1 << 20,), None, 1)))  # nobody sends it
    here.step()
    assert not arrived(coming)
    there.close()
    assert pair.wait(lambda: [here.step(), here.fault is not None][1]) < 1.0
    assert pair.wait(lambda: coming.values[0].data.transfer.over()) < 1.0
    assert not arrived(coming)  # nobody takes what has not come for what has
    assert not arrived(coming, on_host=False)
    here.close()
    assert here.on_the_way == 0
    assert here.has_room


@pytest.mark.parametrize(
    ("asked", "here", "there", "way"),
    [
        (None, "cuda", "cuda", "nccl"),
        (None, "cpu", "cpu", "shm"),
        ("gloo", "cpu", "cpu", "gloo"),
        ("gloo", "cuda", "cuda", "shm"),
        ("nccl", "cuda", "cpu", "shm"),
        ("nccl", "cpu", "cpu", "shm"),
        ("shm", "cuda", "cuda", "shm"),
    ],
)
def test_which_way(asked: str | None, here: str, there: str, way: str) -> None:
    found, why = way_between(asked, here, there)
    assert found == way
    assert why
    shared, why = way_between(asked, here, there, shared=True)
    assert shared == ("shm" if way == "nccl" else way)
    assert ("share a GPU" in why) == (way == "nccl")


# --- layouts ----------------------------------------------------------------------------------------------------------

APART: list[tuple[str, dict[str, Any]]] = [
    ("mini_tts", {"lm": 0, "codec": 1}),
    ("mini_tts", {"lm": 1, "codec": 0}),
    ("mini_seq2seq", {"encoder": 0, "decoder": 1}),
]


@pytest.mark.usefixtures("all_by_lanes", "loop")
@pytest.mark.parametrize(("key", "placement"), [*APART, *PLACES], ids=str)
def test_answers_are_those_of_messages(key: str, placement: dict[str, Any], registry: Registry) -> None:
    driver = RankDriver(miniature(key), registry, seed=4, placement=placement, engine=GLOO)
    assert_all_right(driver, miniature(key), 6, seed=21)
    assert {rank["way"] for rank in driver.worker.status()["ranks"]} == {"gloo"}
    if driver.worker.status()["moves"].get("bytes") or key == "mini_seq2seq":
        assert passed(driver) > 0


@pytest.mark.usefixtures("all_by_lanes")
@pytest.mark.parametrize("key", ["mini_chat", "mini_seq2seq", "mini_look"])
def test_cancelled_at_any_moment(key: str, registry: Registry) -> None:
    seeing = {"look": 1, "generate": 0}
    placement: Any = {
        "mini_chat": {"lm": {"prefill": 1, "decode": 0}},
        "mini_seq2seq": {"encoder": 1, "decoder": 0},
        "mini_look": {"eye": seeing, "lm": seeing},
    }[key]
    mini, rng = miniature(key), random.Random(3)
    driver = RankDriver(mini, registry, seed=8, placement=placement, engine=GLOO)
    for number, (name, example) in enumerate(examples(mini, 24, seed=31).items()):
        driver.submit(name, example)
        turns = iter(range(rng.randrange(14)))
        driver.run(until=lambda turns=turns: next(turns, None) is None)  # type: ignore[misc]
        if number % 3:
            driver.cancel(name)
    driver.run()
    assert {type(end) for end in driver.ended.values()} == {Done}
    assert {end.reason for end in driver.ended.values() if isinstance(end, Done)} >= {"cancelled"}
    assert passed(driver) > 0
    driver.assert_empty()


@pytest.mark.usefixtures("all_by_lanes")
@pytest.mark.parametrize("dies", [1, 2])
@pytest.mark.parametrize("moment", range(2, 40, 6))
def test_a_rank_dies_at_any_moment(dies: int, moment: int, registry: Registry) -> None:
    """Requests that have something there fail with a 503; the others, and those that come later, get their answers."""
    mini = miniature("mini_tts")
    placement = {"lm": {"prefill": 1, "decode": 2}, "codec": 0}
    driver = RankDriver(mini, registry, seed=moment, placement=placement, engine=GLOO)
    cases = examples(mini, 6, seed=moment)
    for name, example in cases.items():
        driver.submit(name, example)
    turns = iter(range(moment))
    driver.run(until=lambda: next(turns, None) is None)
    driver.kill(dies)
    driver.run(until=lambda: True)
    driver.start(dies)
    again = {f"again-{name}": example for name, example in examples(mini, 3, seed=99).items()}
    for name, example in again.items():
        driver.submit(name, example)
    driver.run()
    failed = {name for name, end in driver.ended.items() if isinstance(end, Failed)}
    assert failed <= cases.keys()
    for name in failed:
        end = driver.ended[name]
        assert isinstance(end, Failed)
        assert (end.status, end.code) == (503, "worker_died")
    for name, example in {**cases, **again}.items():
        if name not in failed:
            assert_right(mini, example, dict(driver.result(name)))
    assert {rank["way"] for rank in driver.worker.status()["ranks"]} == {"gloo"}
    driver.assert_empty()


@pytest.mark.usefixtures("all_by_lanes")
def test_a_step_whose_output_is_on_its_way_ends_with_its_rank(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has landed, and what it made has not come and will not."""
    driver = RankDriver(miniature("mini_seq2seq"), registry, placement={"encoder": 1, "decoder": 0}, engine=GLOO)
    monkeypatch.setattr(lanes._Waited, "over", lambda self: False)
    monkeypatch.setattr("mstar.worker.rank_steps.arrived", lambda message: False)
    driver.submit("r", examples(miniature("mini_seq2seq"), 1, seed=1)["r0"])
    assert driver.worker.ranks is not None
    steps = driver.worker.ranks.steps
    driver.run(until=lambda: bool(steps._arriving))
    assert not steps.flying
    driver.kill(1)
    driver.take()
    end = driver.ended["r"]
    assert isinstance(end, Failed)
    assert (end.status, end.code) == (503, "worker_died")
    assert not steps._arriving
    assert not driver.worker.ranks.busy


@pytest.mark.parametrize("fails", [0, 1])
def test_a_rank_that_cannot_open_it_has_all_by_messages(
    fails: int, registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, and the answers are right."""
    monkeypatch.setattr(tensor_channel, "LARGE_BYTES", 1)
    monkeypatch.setattr(lanes, "_PATIENCE", lanes._PATIENCE / 60)
    plain = TensorChannel._open

    def broken(self: TensorChannel, backend: str, meet: Any, local: bool) -> None:
        def no_meeting() -> Any:
            raise RuntimeError("no such device")

        plain(self, backend, no_meeting if self._number == fails else meet, local)

    monkeypatch.setattr(TensorChannel, "_open", broken)
    mini = miniature("mini_seq2seq")
    with caplog.at_level(logging.INFO, "mstar.worker.rank_links"):
        driver = RankDriver(mini, registry, placement={"encoder": 1, "decoder": 0}, engine=GLOO)
        assert_all_right(driver, mini, 3, seed=2)
    assert [record.message for record in caplog.records] == ["rank 1: tensors pass by messages: no such device"]
    assert passed(driver) == 0


def test_a_channel_that_breaks_ends_its_rank(pair: Pair, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has announced will not come, so its executor is told that it is to start again."""
    monkeypatch.setattr(tensor_channel, "LARGE_BYTES", 1)
    driver = RankDriver(miniature("mini_seq2seq"), registry, placement={"encoder": 1, "decoder": 0}, engine=GLOO)
    assert driver.worker.ranks is not None
    channel, wire = driver.worker.ranks.channel(1), driver.wires[1]
    assert channel is not None
    announced = channel.resolve(run(Contents(2, "float32", (16,), None, 1)))
    assert isinstance(announced.values[0].data, Arriving)
    wire.follower.channel.close()
    Pair.wait(lambda: [driver.worker.step(), wire.fault is not None][1])
    assert wire.fault is not None
    assert "tensors do not pass" in wire.fault

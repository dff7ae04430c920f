"""Prompts on other ranks than decoding, in processes: the answers of one rank, and ranks that die under load."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import test_divided
import test_ranks
import tiny_llama
from test_divided import folder, served
from test_processes import arena_root, lives
from test_rank_lanes import lanes_open
from test_ranks import running

from mstar.cluster.base import Phase
from mstar.spec.request import Done, Failed

__all__ = ["arena_root", "folder"]

APART = {"prefill": 1, "decode": 0}
WAYS: dict[str, dict[str, Any]] = {"messages": {}, "lanes": {"values": "gloo"}}
MINIATURES: dict[str, dict[str, Any]] = {
    "mini_hybrid": {"lm": APART},
    "mini_seq2seq": {"encoder": 1, "decoder": APART},
}


@pytest.fixture(params=WAYS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """``engine`` of a deployment for each way of values and states, of which all is large enough for it."""
    if request.param == "lanes":
        for module in (test_divided, test_ranks):
            monkeypatch.setattr(module, "PLUGINS", (*module.PLUGINS, "all_by_lanes"))
    return WAYS[request.param]


def assert_passed(status: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
    """Tensors went as *engine* says, both ways where there is more than one rank to send to."""
    ranks = status["ranks"]
    assert {rank["way"] for rank in ranks} == {engine.get("values", "shm")}
    assert any(sum(rank["lane_bytes"].values()) > 0 for rank in ranks) == bool(engine)


def open_descriptors(ranks: test_ranks.Ranks) -> int:
    """Open files of rank 0's process."""
    return len(os.listdir(f"/proc/{ranks.executor.pids[0]}/fd"))


@pytest.mark.parametrize(
    ("places", "engine"),
    [
        (APART, "messages"),
        ({"prefill": {"ranks": [2, 3], "tp": 2}, "decode": {"ranks": [0, 1], "tp": 2}}, "messages"),
        ({"prefill": {"ranks": [2, 3], "tp": 2}, "decode": {"ranks": [0, 1], "tp": 2}}, "lanes"),
    ],
    ids=["1 + 1", "2 + 2", "2 + 2 by lanes"],
    indirect=["engine"],
)
async def test_a_llama_says_what_it_says_on_one_rank(
    places: dict[str, Any], engine: dict[str, Any], folder: Path, arena_root: Path
) -> None:
    async with served(folder) as alone:
        want = await alone.answers()
    async with served(folder, placement={"llm": places}, engine=engine) as apart:
        await lanes_open(apart.executor)
        assert await apart.answers() == want
        status = await apart.executor.status()
        assert status["moves"]["done"] == len(tiny_llama.TEXTS)
        assert_passed(status, engine)
    assert list(arena_root.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "engine"),
    [("mini_hybrid", "messages"), ("mini_seq2seq", "messages"), ("mini_seq2seq", "lanes")],
    indirect=["engine"],
)
async def test_miniatures_say_what_they_should(key: str, engine: dict[str, Any], arena_root: Path) -> None:
    async with running(key, placement=MINIATURES[key], engine=engine) as ranks:
        await lanes_open(ranks.executor)
        rng = random.Random(3)
        cases = {f"r{n}": ranks.mini.example(rng) for n in range(8)}
        for name, example in cases.items():
            ranks.submit(name, example)
        for name, example in cases.items():
            await ranks.assert_right(name, example)
        assert_passed(await ranks.executor.status(), engine)
        await ranks.assert_idle()
    assert list(arena_root.iterdir()) == []


async def test_ranks_are_killed_under_load(engine: dict[str, Any], arena_root: Path) -> None:
    """Those that had something there get a 503, the others their answers; afterwards all is served as before."""
    places = {"prefill": 1, "decode": 2}
    async with running("mini_tts", placement={"lm": places, "codec": 0}, engine=engine) as ranks:
        await lanes_open(ranks.executor)
        descriptors = open_descriptors(ranks)
        for dies, rank in places.items():
            before = ranks.executor.pids
            names = [f"{dies} {n}" for n in range(8)]
            cases = {name: ranks.submit_text(name, f"load {name} " * 3, max_tokens=60) for name in names}
            await ranks.until(lambda names=names: sum(len(ranks.events[name]) for name in names) > 10)
            os.kill(before[rank], signal.SIGKILL)
            ends = [await ranks.end(name) for name in names]
            failed = [end for end in ends if isinstance(end, Failed)]
            assert {(end.status, end.code) for end in failed} <= {(503, "worker_died")}
            assert failed or dies == "prefill"
            for name, end in zip(names, ends, strict=True):
                if isinstance(end, Done):
                    await ranks.assert_right(name, cases[name])
            await ranks.until(
                lambda rank=rank, was=before[rank]: (
                    ranks.executor.pids.get(rank, was) != was and ranks.executor.phase == Phase(name="ready")
                )
            )
            after = ranks.executor.pids
            assert [other for other in after if after[other] != before[other]] == [rank]
            assert not lives(before[rank])
            for name in names:
                ranks.submit(f"again {name}", cases[name])
            for name in names:
                await ranks.assert_right(f"again {name}", cases[name])
            await ranks.assert_idle()
        assert_passed(await ranks.executor.status(), engine)
        await lanes_open(ranks.executor)
        assert open_descriptors(ranks) <= descriptors + 4  # of what Python and zmq keep
    assert list(arena_root.iterdir()) == []

"""Tensors between processes by lanes: what a rank that dies, or is cancelled for, leaves behind (nothing)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import test_ranks
from test_processes import arena_root, lives
from test_ranks import Ranks, running

from mstar.spec.request import Cancel, Done, Failed

__all__ = ["arena_root", "lanes_open"]

GLOO = {"values": "gloo"}
TO_RANK_1 = {"encoder": 0, "decoder": 1}
FROM_RANK_1 = {"encoder": 1, "decoder": 0}


@pytest.fixture(autouse=True)
def all_by_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_ranks, "PLUGINS", (*test_ranks.PLUGINS, "all_by_lanes"))


async def lanes_open(executor: Any) -> list[dict[str, Any]]:
    """What rank 0 says of the others, once it has lanes to all of them or has given up."""
    async with asyncio.timeout(60):
        while True:
            ranks: list[dict[str, Any]] = (await executor.status()).get("ranks", [{"opening": True}])
            if not any(rank.get("opening", True) for rank in ranks):
                return ranks
            await asyncio.sleep(0.01)


async def all_by_gloo(ranks: Ranks) -> None:
    assert [rank["way"] for rank in await lanes_open(ranks.executor)] == ["gloo"]


async def answers(ranks: Ranks, prefix: str, count: int = 4) -> None:
    rng = random.Random(prefix)
    cases = {f"{prefix}{n}": ranks.mini.example(rng) for n in range(count)}
    for name, example in cases.items():
        ranks.submit(name, example)
    for name, example in cases.items():
        await ranks.assert_right(name, example)


@pytest.mark.parametrize("placement", [TO_RANK_1, FROM_RANK_1], ids=["to it", "from it"])
async def test_a_rank_dies_with_tensors_on_their_way(placement: dict[str, int], arena_root: Path) -> None:
    """Their requests have ended within seconds, and its successor has lanes again."""
    async with running("mini_seq2seq", placement=placement, engine=GLOO) as ranks:
        await all_by_gloo(ranks)
        await answers(ranks, "before")
        status = await ranks.executor.status()
        (rank,) = status["ranks"]
        assert sum(rank["lane_bytes"].values()) > 0
        before = ranks.executor.pids
        os.kill(before[1], signal.SIGSTOP)
        rng = random.Random(5)
        names = [f"lost{n}" for n in range(4)]
        for name in names:
            ranks.submit(name, ranks.mini.example(rng))
        if placement is TO_RANK_1:  # what the encoder has made is sent, and nobody receives it
            async with asyncio.timeout(30):
                while (await ranks.executor.status())["steps"] == status["steps"]:
                    await asyncio.sleep(0.01)
        os.kill(before[1], signal.SIGKILL)
        began = time.monotonic()
        ends = [await ranks.end(name) for name in names]
        assert {(end.status, end.code) for end in ends if isinstance(end, Failed)} == {(503, "worker_died")}
        assert time.monotonic() - began < 10.0
        await ranks.until(lambda: ranks.executor.pids.get(1, before[1]) != before[1])
        await ranks.until(lambda: ranks.executor.phase.name == "ready")
        assert ranks.executor.pids[0] == before[0]
        await all_by_gloo(ranks)
        await answers(ranks, "after")
        await ranks.assert_idle()
    assert list(arena_root.iterdir()) == []


async def test_rank_0_dies_and_its_successor_has_lanes(arena_root: Path) -> None:
    async with running("mini_seq2seq", placement=FROM_RANK_1, engine=GLOO) as ranks:
        await all_by_gloo(ranks)
        before = ranks.executor.pids
        os.kill(before[0], signal.SIGKILL)
        await ranks.until(lambda: not {*before.values()} & {*ranks.executor.pids.values()})
        await ranks.until(lambda: ranks.executor.phase.name == "ready")
        assert not any(map(lives, before.values()))
        await all_by_gloo(ranks)
        await answers(ranks, "after")
        await ranks.assert_idle()
    assert list(arena_root.iterdir()) == []


async def test_cancels_leave_nothing(arena_root: Path) -> None:
    async with running("mini_seq2seq", placement=TO_RANK_1, engine=GLOO) as ranks:
        await all_by_gloo(ranks)
        rng = random.Random(8)
        for n in range(6):
            ranks.submit(f"r{n}", ranks.mini.example(rng))
        for n in range(0, 6, 2):
            ranks.executor.cancel(Cancel(id=f"r{n}"))
        for n in range(6):
            assert isinstance(await ranks.end(f"r{n}"), Done)
        await ranks.assert_idle()
        assert [str(p) for p in arena_root.glob("*/*") if p.name not in ("socket", "link", "lanes")] == []
    assert list(arena_root.iterdir()) == []


async def test_a_rank_whose_tensors_do_not_come_is_started_again(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It lives, and what it has announced never comes."""
    monkeypatch.setattr(test_ranks, "PLUGINS", (*test_ranks.PLUGINS[:-1], "lossy_lanes"))
    async with running("mini_seq2seq", placement=FROM_RANK_1, engine=GLOO) as ranks:
        await all_by_gloo(ranks)
        before = ranks.executor.pids
        rng = random.Random(4)
        for n in range(8):  # the third value, if each had a step of its own
            ranks.submit(f"r{n}", ranks.mini.example(rng))
            if n < 2:
                assert isinstance(await ranks.end(f"r{n}"), Done)
        ends = [await ranks.end(f"r{n}") for n in range(8)]
        failed = [end for end in ends if isinstance(end, Failed)]
        assert {(end.status, end.code) for end in failed} == {(503, "worker_died")}
        await ranks.until(lambda: ranks.executor.pids.get(1, before[1]) != before[1])
        await ranks.until(lambda: ranks.executor.phase.name == "ready")
        assert ranks.executor.pids[0] == before[0]
        assert not lives(before[1])
        assert "tensors do not pass: a tensor has not passed within" in caplog.text
    assert list(arena_root.iterdir()) == []

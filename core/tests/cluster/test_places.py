"""Prompts on other ranks than decoding, in processes: the answers of one rank, and ranks that die under load."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
from test_divided import folder, served
from test_processes import arena_root, lives
from test_ranks import running

from mstar.cluster.base import Phase
from mstar.spec.request import Done, Failed

__all__ = ["arena_root", "folder"]

APART = {"prefill": 1, "decode": 0}
MINIATURES: dict[str, dict[str, Any]] = {
    "mini_hybrid": {"lm": APART},
    "mini_seq2seq": {"encoder": 1, "decoder": APART},
}


@pytest.mark.parametrize(
    "places",
    [APART, {"prefill": {"ranks": [2, 3], "tp": 2}, "decode": {"ranks": [0, 1], "tp": 2}}],
    ids=["1 + 1", "2 + 2"],
)
async def test_a_llama_says_what_it_says_on_one_rank(places: dict[str, Any], folder: Path, arena_root: Path) -> None:
    async with served(folder) as alone:
        want = await alone.answers()
    async with served(folder, placement={"llm": places}) as apart:
        assert await apart.answers() == want
        assert (await apart.executor.status())["moves"]["done"] == len(tiny_llama.TEXTS)
    assert list(arena_root.iterdir()) == []


@pytest.mark.parametrize("key", MINIATURES)
async def test_miniatures_say_what_they_should(key: str, arena_root: Path) -> None:
    async with running(key, placement=MINIATURES[key]) as ranks:
        rng = random.Random(3)
        cases = {f"r{n}": ranks.mini.example(rng) for n in range(8)}
        for name, example in cases.items():
            ranks.submit(name, example)
        for name, example in cases.items():
            await ranks.assert_right(name, example)
        await ranks.assert_idle()
    assert list(arena_root.iterdir()) == []


async def test_ranks_are_killed_under_load(arena_root: Path) -> None:
    """Those that had something there get a 503, the others their answers; afterwards all is served as before."""
    places = {"prefill": 1, "decode": 2}
    async with running("mini_tts", placement={"lm": places, "codec": 0}) as ranks:
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
            await ranks.until(lambda: ranks.executor.phase == Phase(name="ready"))
            after = ranks.executor.pids
            assert [other for other in after if after[other] != before[other]] == [rank]
            assert not lives(before[rank])
            for name in names:
                ranks.submit(f"again {name}", cases[name])
            for name in names:
                await ranks.assert_right(f"again {name}", cases[name])
            await ranks.assert_idle()
    assert list(arena_root.iterdir()) == []

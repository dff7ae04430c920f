"""A process for each rank: the same answers as on one rank, ranks that die, and what they leave behind (nothing)."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from driver import Layout
from sharded import MANY
from test_processes import arena_root, lives

from mstar.cluster.ranks import RanksExecutor
from mstar.cluster.shm import Arena
from mstar.spec.errors import SetupError
from mstar.spec.placement import NodePlacement
from mstar.spec.request import Cancel, Done, Failed
from mstar.testing.examples import Example, task_for
from mstar.testing.miniatures import miniature
from mstar.testing.miniatures.common import decode

__all__ = ["arena_root"]  # a fixture, which every test here uses
PLUGINS = ("mstar.testing.miniatures", "sharded")


class Ranks(Layout):
    """One layout of a miniature, in processes, as the server runs it."""

    def __init__(self, key: str, **overrides: Any):
        super().__init__(key, None, PLUGINS, overrides, restart_delay_s=0.01)
        self.mini = miniature(key.replace("sharded", "mini"))

    @property
    def pids(self) -> set[int]:
        """All worker processes."""
        executor = self.executor
        if isinstance(executor, RanksExecutor):
            return {*executor.pids.values()}
        layouts = [copy.executor for copy in executor._copies]
        return {
            pid
            for layout in layouts
            for pid in (layout.pids.values() if isinstance(layout, RanksExecutor) else [layout.pid])
            if pid is not None
        }

    def submit_text(self, name: str, text: str, **knobs: Any) -> Example:
        """Submit a prompt of our own; returns the example that it is."""
        example = Example(text=text, knobs={"max_tokens": 8, **knobs})
        self.submit(name, example)
        return example

    async def assert_right(self, name: str, example: Example) -> None:
        got = await self.said(name)
        for stream, want in self.mini.expected(example).items():
            if isinstance(want, str):
                assert decode(got.get(stream, [])) == want
            else:
                np.testing.assert_allclose(got[stream], want, rtol=1e-6, atol=self.mini.tolerance)

    async def assert_idle(self) -> None:
        """Nothing is held on any rank, once all have heard of the last end."""
        async with asyncio.timeout(30):
            while True:
                status = await self.executor.status()
                used = any(pool["used"] for pool in status["resources"].values())
                there = any(rank["requests"] or _used(rank) for rank in status["ranks"])
                if not (status["running"] or status["waiting"] or used or there):
                    return


def _used(rank: Mapping[str, Any]) -> bool:
    return any(pool["used"] for pool in rank["resources"].values())


@asynccontextmanager
async def running(key: str, **overrides: Any) -> AsyncIterator[Ranks]:
    ranks = Ranks(key, **overrides)
    await ranks.executor.start()
    pids = ranks.pids
    try:
        yield ranks
    finally:
        pids |= ranks.pids
        await ranks.executor.stop()
        assert not any(map(lives, pids))


APART = {"mini_seq2seq": {"encoder": 1, "decoder": 0}, "mini_tts": {"lm": 0, "codec": 1}}


@pytest.mark.parametrize("key", APART)
async def test_nodes_on_two_ranks_give_the_answers_of_one(key: str, arena_root: Path) -> None:
    async with running(key, placement=APART[key]) as ranks:
        words = {number: psutil.Process(pid).cmdline()[-2:] for number, pid in ranks.executor.pids.items()}
        assert words == {number: [key, f"rank-{number}"] for number in (0, 1)}, "what `ps` shows"
        rng = random.Random(1)
        cases = {f"r{n}": ranks.mini.example(rng) for n in range(8)}
        for name, example in cases.items():
            ranks.submit(name, example)
        for name, example in cases.items():
            await ranks.assert_right(name, example)
        await ranks.assert_idle()
        names = [phase.name for phase in ranks.phases]
        assert names[-1] == "ready"
    assert list(arena_root.iterdir()) == []


async def test_a_dead_rank_takes_its_requests_only(arena_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running("mini_seq2seq", placement=APART["mini_seq2seq"]) as ranks:
        before = ranks.executor.pids
        rng = random.Random(5)
        os.kill(before[1], signal.SIGSTOP)
        cases = {f"r{n}": ranks.mini.example(rng) for n in range(4)}
        for name, example in cases.items():
            ranks.submit(name, example)
        await ranks.executor.status()  # rank 0 has them
        os.kill(before[1], signal.SIGKILL)
        for name in cases:
            end = await ranks.end(name)
            assert isinstance(end, Failed)
            assert (end.status, end.code) == (503, "worker_died")
            assert "rank 1" in end.message
        await ranks.until(lambda: ranks.executor.phase.name == "ready")
        after = ranks.executor.pids
        assert after[0] == before[0]
        assert after[1] != before[1]
        assert not lives(before[1])
        for name, example in cases.items():
            ranks.submit(f"again-{name}", example)
        for name, example in cases.items():
            await ranks.assert_right(f"again-{name}", example)
        await ranks.assert_idle()
        assert len(list(arena_root.iterdir())) == 3  # two ranks' folders and the link's: no old one
        assert "rank 1 of 'mini_seq2seq' died: killed by SIGKILL" in caplog.text
        assert "the requests that it had a part in end, and it starts again" in caplog.text
    assert list(arena_root.iterdir()) == []


async def test_rank_0_takes_all_with_it(arena_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running("mini_tts", placement=APART["mini_tts"]) as ranks:
        before = ranks.executor.pids
        os.kill(before[0], signal.SIGSTOP)
        example = ranks.mini.example(random.Random(2))
        ranks.submit("a", example)
        await asyncio.sleep(0)
        os.kill(before[0], signal.SIGKILL)
        end = await ranks.end("a")
        assert isinstance(end, Failed)
        assert (end.status, end.code) == (503, "worker_died")
        assert end.message.startswith("rank 0 of 'mini_tts' died: killed by SIGKILL")
        assert "all requests there end, and all ranks start again" in caplog.text
        await ranks.until(lambda: ranks.executor.phase.name == "ready")
        after = ranks.executor.pids
        assert not {*before.values()} & {*after.values()}
        assert not any(map(lives, before.values()))
        ranks.submit("b", example)
        await ranks.assert_right("b", example)
    assert list(arena_root.iterdir()) == []


async def test_a_rank_that_cannot_start_ends_the_start(arena_root: Path) -> None:
    ranks = Ranks("mini_seq2seq", placement=APART["mini_seq2seq"], resources={"kv": {"tokens": 4}})
    ranks.executor.config = msgspec.structs.replace(
        ranks.executor.config,
        deployment=ranks.executor.config.deployment.model_copy(
            update={"placement": {"encoder": NodePlacement(ranks=(0,)), "decoder": NodePlacement(ranks=(1,))}}
        ),
    )
    with pytest.raises(SetupError, match="rank 1: resource 'kv'"):
        await ranks.executor.start()
    await ranks.executor.stop()
    assert list(arena_root.iterdir()) == []


async def test_cancels_and_large_values_leave_nothing(arena_root: Path) -> None:
    async with running("mini_seq2seq", placement={"encoder": 0, "decoder": 1}) as ranks:
        rng = random.Random(8)
        for n in range(6):
            ranks.submit(f"r{n}", ranks.mini.example(rng))
        for n in range(0, 6, 2):
            ranks.executor.cancel(Cancel(id=f"r{n}"))
        for n in range(6):
            end = await ranks.end(f"r{n}")
            assert isinstance(end, Done)
        await ranks.assert_idle()
        assert [str(p) for p in arena_root.glob("*/*") if p.name not in ("socket", "link")] == []
    assert list(arena_root.iterdir()) == []


# --- meshes


TWO = {"lm": {"ranks": [0, 1], "tp": 2}}


@pytest.mark.parametrize("size", [2, 4])
async def test_a_mesh_in_lockstep_gives_the_answers_of_one_rank(size: int, arena_root: Path) -> None:
    placement = {"lm": {"ranks": list(range(size)), "tp": size}}
    async with running("sharded_chat", placement=placement) as ranks:
        rng = random.Random(4)
        cases = {f"r{n}": ranks.mini.example(rng) for n in range(6)}
        for name, example in cases.items():
            ranks.submit(name, example)
        for name, example in cases.items():
            await ranks.assert_right(name, example)
        await ranks.assert_idle()
    assert list(arena_root.iterdir()) == []


async def test_a_prompt_that_a_mesh_knows_is_skipped_by_all_of_it() -> None:
    async with running("sharded_chat", placement=TWO) as ranks:
        text = "a prompt that is longer than a few pages of the cache, twice"
        for name in ("first", "second"):
            example = ranks.submit_text(name, text)
            await ranks.assert_right(name, example)
        end = await ranks.end("second")
        assert isinstance(end, Done)
        assert end.usage.cached > 40
        other = ranks.submit_text("third", text[:30] + "and another end")  # the pages of both are the same still
        await ranks.assert_right("third", other)
        await ranks.assert_idle()


async def test_what_fails_on_all_ranks_of_a_mesh_fails_alone() -> None:
    async with running("sharded_chat", placement=TWO) as ranks:
        before = ranks.executor.pids
        good = [ranks.submit_text(f"good{n}", f"fine {n}") for n in range(3)]
        ranks.submit_text("bad", "K" * MANY)
        end = await ranks.end("bad")
        assert isinstance(end, Failed)
        assert "poison" in end.message
        for n, example in enumerate(good):
            await ranks.assert_right(f"good{n}", example)
        await ranks.assert_idle()
        assert ranks.executor.pids == before


@pytest.mark.parametrize("how", ["fault", "kill"])
async def test_a_mesh_that_is_not_of_one_mind_starts_again(
    how: str, arena_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running("sharded_chat", placement=TWO) as ranks:
        before = ranks.executor.pids
        if how == "kill":
            os.kill(before[1], signal.SIGKILL)
        others = [f"other {n}" for n in range(3)]  # in the same step: it must not be repeated in halves
        for name in others:
            ranks.submit_text(name, "aside")
        ranks.submit_text("lost", "L" * MANY)
        end = await ranks.end("lost")
        if how == "fault":
            assert isinstance(end, Failed)
            assert "not on others within 1 s: ValueError: only here" in end.message
            assert 'raise ValueError("only here")' in capfd.readouterr().err, "the traceback of what happened is logged"
        for name in others:
            await ranks.end(name)
        assert isinstance(end, Failed)
        assert (end.status, end.code) == (503, "worker_died")
        await ranks.until(lambda: ranks.executor.phase.name == "ready")
        assert not any(map(lives, before.values()))
        example = ranks.submit_text("again", "fine")
        await ranks.assert_right("again", example)
    assert list(arena_root.iterdir()) == []


async def test_who_is_left_of_a_mesh_says_so_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    async with running("sharded_chat", placement=TWO) as ranks:
        os.kill(ranks.executor.pids[1], signal.SIGSTOP)
        ranks.submit_text("lost", "fine")
        await asyncio.sleep(0)
        os.kill(ranks.executor.pids[1], signal.SIGKILL)
        said = ""
        until = time.monotonic() + 30
        while "another rank of its mesh is gone" not in said and time.monotonic() < until:
            said += capfd.readouterr().err  # the executor's loop waits meanwhile: rank 0 is the first to find out
        end = await ranks.end("lost")
        await ranks.until(lambda: ranks.executor.phase.name == "ready")
        said += capfd.readouterr().err
    (line,) = [line for line in said.splitlines() if "its mesh" in line]
    assert "WARNING worker sharded_chat, rank 0" in line
    assert "rank 0 of 'sharded_chat' ends, to be started again: another rank of its mesh is gone" in line
    assert "Traceback" not in said
    assert isinstance(end, Failed)
    assert end.message.startswith("rank 1 of 'sharded_chat' died: killed by SIGKILL"), (
        "the one that took the other along"
    )


async def test_a_model_that_divides_nothing_is_refused() -> None:
    ranks = Ranks("mini_chat", placement=TWO)
    with pytest.raises(SetupError, match="divided by tp=2"):
        await ranks.executor.start()
    await ranks.executor.stop()


async def test_a_mesh_without_rank_0_serves_and_starts_again_alone(arena_root: Path) -> None:
    placement = {"codec": 0, "lm": {"ranks": [1, 2], "tp": 2}}
    async with running("sharded_tts", placement=placement) as ranks:
        rng = random.Random(6)
        cases = {f"r{n}": ranks.mini.example(rng) for n in range(4)}
        for name, example in cases.items():
            ranks.submit(name, example)
        bad = ranks.submit_text("bad", "K" * MANY)
        assert isinstance(await ranks.end("bad"), Failed), bad
        for name, example in cases.items():
            await ranks.assert_right(name, example)
        await ranks.assert_idle()
        before = ranks.executor.pids
        os.kill(before[2], signal.SIGKILL)
        await ranks.until(lambda: ranks.executor.phase.name == "failed")
        await ranks.until(lambda: ranks.executor.phase.name == "ready")
        after = ranks.executor.pids
        assert after[0] == before[0]
        assert not {before[1], before[2]} & {*after.values()}
        (place,) = arena_root.rglob("mesh-1-2")  # of this start: backends look there when they connect later
        assert place.is_file()
        for name, example in cases.items():
            ranks.submit(f"again-{name}", example)
        for name, example in cases.items():
            await ranks.assert_right(f"again-{name}", example)
        await ranks.assert_idle()
    assert list(arena_root.iterdir()) == []


async def test_what_the_machine_refuses_is_tried_again(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running("mini_seq2seq", placement=APART["mini_seq2seq"]) as ranks:
        create, refused = Arena.create, list[int]()

        def full(root: Path | None = None) -> Arena:
            if refused:
                refused.pop()
                raise OSError(errno.ENOSPC, "no space")
            return create(root)

        monkeypatch.setattr(Arena, "create", full)
        for number in (1, 0):
            refused.append(number)
            os.kill(ranks.executor.pids[number], signal.SIGKILL)
            await ranks.until(lambda: "no space" in ranks.executor.phase.detail)
            await ranks.until(lambda: ranks.executor.phase.name == "ready")
        example = ranks.submit_text("r", "again")
        await ranks.assert_right("r", example)
    assert list(arena_root.iterdir()) == []


# --- copies


async def test_copies_share_the_requests_and_outlive_each_other(arena_root: Path) -> None:
    async with running("mini_chat", replicas=2) as ranks:
        rng = random.Random(7)
        cases = {f"r{n}": ranks.mini.example(rng) for n in range(8)}
        for name, example in cases.items():
            ranks.submit(name, example)
        copies = ranks.executor._copies
        assert [len(copy.running) for copy in copies] == [4, 4]
        for name, example in cases.items():
            await ranks.assert_right(name, example)
        status = await ranks.executor.status()
        assert [copy["steps"] > 0 for copy in status["copies"]] == [True, True]
        assert status["steps"] == sum(copy["steps"] for copy in status["copies"])

        dying = copies[0]
        os.kill(dying.executor.pid, signal.SIGSTOP)
        ranks.submit("a", cases["r0"])
        ranks.submit("b", cases["r1"])
        os.kill(dying.executor.pid, signal.SIGKILL)
        end = await ranks.end("a")
        assert isinstance(end, Failed)
        assert end.code == "worker_died"
        assert ranks.executor.phase.name == "ready"
        await ranks.assert_right("b", cases["r1"])
        ranks.submit("c", cases["r2"])  # while one copy is away
        await ranks.assert_right("c", cases["r2"])
        await ranks.until(lambda: dying.executor.phase.name == "ready")
        details = {phase.detail for phase in ranks.phases if phase.detail.startswith("1 of 2")}
        assert any(detail.endswith("(out of memory?); it is started again") for detail in details), details
        assert "1 of 2 copies serve; starting" in details
        ranks.submit("d", cases["r3"])
        await ranks.assert_right("d", cases["r3"])
    assert list(arena_root.iterdir()) == []


async def test_a_session_goes_on_in_its_copy() -> None:
    async with running("mini_rollout", replicas=2) as ranks:
        example = ranks.mini.example(random.Random(1))
        for name in ("one", "two", "three"):
            prepared = ranks.processor.prepare(task_for(ranks.spec, example, live=()), name)
            prepared.request.session = "kept"
            ranks.executor.submit(prepared.request)
            assert isinstance(await ranks.end(name), Done)
        status = await ranks.executor.status()
        assert sorted(copy["sessions"] for copy in status["copies"]) == [0, 1]


async def test_a_session_whose_copy_died_begins_anew_in_another() -> None:
    async with running("mini_rollout", replicas=2) as ranks:
        example = ranks.mini.example(random.Random(1))

        async def ask(name: str) -> Any:
            prepared = ranks.processor.prepare(task_for(ranks.spec, example, live=()), name)
            prepared.request.session = "kept"
            ranks.executor.submit(prepared.request)
            return await ranks.end(name)

        assert isinstance(await ask("one"), Done)
        copies = ranks.executor._copies
        (home,) = [copy for copy in copies if (await copy.executor.status())["sessions"]]
        os.kill(home.executor.pid, signal.SIGKILL)
        await ranks.until(lambda: home.executor.phase.name == "starting")
        assert isinstance(await ask("two"), Done)
        assert home.executor.phase.name != "ready"  # it was not waited for


async def test_moves_of_all_copies_are_counted() -> None:
    async with running("mini_chat", placement={"lm": {"prefill": 1, "decode": 0}}, replicas=2) as ranks:
        example = ranks.mini.example(random.Random(4))
        for name in ("one", "two"):
            ranks.submit(name, example)
        for name in ("one", "two"):
            await ranks.assert_right(name, example)
        status = await ranks.executor.status()
        assert [copy["moves"]["done"] for copy in status["copies"]] == [1, 1]
        assert status["moves"]["done"] == 2
        assert status["moves"]["stages"]["gather"] == sum(c["moves"]["stages"]["gather"] for c in status["copies"])


async def test_copies_of_several_ranks(arena_root: Path) -> None:
    async with running("mini_tts", placement=APART["mini_tts"], replicas=2) as ranks:
        rng = random.Random(3)
        cases = {f"r{n}": ranks.mini.example(rng) for n in range(6)}
        for name, example in cases.items():
            ranks.submit(name, example)
        for name, example in cases.items():
            await ranks.assert_right(name, example)
    assert list(arena_root.iterdir()) == []


async def test_one_of_two_places_of_a_node_dies_and_requests_are_still_taken(arena_root: Path) -> None:
    async with running("mini_seq2seq", placement={"encoder": [1, 2], "decoder": 0}) as ranks:
        before = ranks.executor.pids
        os.kill(before[2], signal.SIGKILL)
        rng = random.Random(2)
        cases = {f"r{n}": ranks.mini.example(rng) for n in range(4)}
        await ranks.until(lambda: "rank 2" in ranks.executor.phase.detail)
        for name, example in cases.items():
            ranks.submit(name, example)
        for name, example in cases.items():
            await ranks.assert_right(name, example)
        await ranks.until(lambda: not ranks.executor.phase.detail)
        assert "failed" not in [phase.name for phase in ranks.phases]
    assert list(arena_root.iterdir()) == []

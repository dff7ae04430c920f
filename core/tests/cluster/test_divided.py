"""A real decoder on the ranks of a placement: a process each, shares of the weights, the answers of one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
from driver import Layout
from test_processes import arena_root

from mstar.patterns.causal_lm import CausalLM
from mstar.spec.errors import SetupError
from mstar.testing.examples import Example

__all__ = ["arena_root"]
PLUGINS = ("mstar.testing.miniatures", "divided")
KNOBS: tuple[Mapping[str, Any], ...] = (
    {"max_tokens": 12, "temperature": 0.0},
    {"max_tokens": 12, "temperature": 0.0},
    {"max_tokens": 12, "temperature": 1.0, "seed": 7},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write(tmp_path_factory.mktemp("llama"), tiny_llama.CONFIG, CausalLM)


class Served(Layout):
    """The decoder as the server runs it."""

    def __init__(self, folder: Path, overrides: Mapping[str, Any]):
        super().__init__("tiny_llama", folder, PLUGINS, {"device": "cpu", **overrides})

    async def answers(self) -> list[list[int]]:
        """The tokens after each of the texts, all asked for at once."""
        names = [str(number) for number in range(len(KNOBS))]
        for name, text, knobs in zip(names, tiny_llama.TEXTS, KNOBS, strict=True):
            self.submit(name, Example(text=text, knobs=knobs))
        return [(await self.said(name))["text"] for name in names]


@asynccontextmanager
async def served(folder: Path, **overrides: Any) -> AsyncIterator[Served]:
    one = Served(folder, overrides)
    await one.executor.start()
    try:
        yield one
    finally:
        await one.executor.stop()


async def test_two_ranks_say_what_one_says(folder: Path, arena_root: Path) -> None:
    async with served(folder) as alone:
        want = await alone.answers()
    async with served(folder, placement={"llm": {"ranks": [0, 1], "tp": 2}}) as together:
        assert len(together.executor.pids) == 2
        assert await together.answers() == want
        status = await together.executor.status()
        assert [(rank["rank"], rank["steps"] > 0) for rank in status["ranks"]] == [(1, True)]
    assert len(set(want[0])) > 3, "an answer of one token would say little"
    assert list(arena_root.iterdir()) == []


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"ranks": [0, 1, 2], "tp": 3}, "2 key-value heads are not divided by tp=3"),
        ({"ranks": [0, 1], "sp": 2}, "does not say that its tokens can be"),
    ],
)
async def test_what_cannot_be_divided_ends_the_start(folder: Path, mesh: dict[str, Any], said: str) -> None:
    one = Served(folder, {"placement": {"llm": mesh}})
    try:
        with pytest.raises(SetupError, match=said):
            await one.executor.start()
    finally:
        await one.executor.stop()

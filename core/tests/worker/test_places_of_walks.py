"""A place for each walk of a node: requests go from rank to rank with their state, and get what they would have got."""

from __future__ import annotations

from typing import Any

import pytest

from mstar.registry import Registry
from mstar.testing.drive import miniature_registry
from mstar.testing.miniatures import miniature
from mstar.testing.rank_drive import RankDriver

from .test_ranks import assert_all_right

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("loop")]

PLACES: list[tuple[str, dict[str, Any]]] = [
    ("mini_chat", {"lm": {"prefill": 1, "decode": 0}}),
    ("mini_chat", {"lm": {"prefill": 0, "decode": 1}}),
    ("mini_chat", {"lm": {"prefill": [1, 2], "decode": 0}}),
    ("mini_chat", {"lm": {"prefill": [0, 1], "decode": [0, 2]}}),
    ("mini_tts", {"lm": {"prefill": 1, "decode": 2}, "codec": 0}),
    ("mini_hybrid", {"lm": {"prefill": 1, "decode": 0}}),
    ("mini_hybrid", {"lm": {"prefill": 0, "decode": 1}}),
    ("mini_seq2seq", {"encoder": 0, "decoder": {"prefill": 1, "decode": 0}}),
    ("mini_seq2seq", {"encoder": 1, "decoder": {"prefill": 1, "decode": 0}}),
    ("mini_seq2seq", {"encoder": 2, "decoder": {"prefill": 0, "decode": 1}}),
    ("mini_tts", {"lm": {"prefill": 1, "decode": 0}, "codec": 1}),
    ("mini_planner", {"calc": {"read": 1, "twice": 0, "shift": 2}}),
]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


@pytest.mark.parametrize(("key", "places"), PLACES, ids=str)
@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 3}], ids=["whole", "pieces"])
def test_answers_are_those_of_one_place(
    key: str, places: dict[str, Any], limits: dict[str, int], registry: Registry
) -> None:
    driver = RankDriver(miniature(key), registry, seed=5, placement=places, scheduler=limits)
    assert_all_right(driver, miniature(key), 8, seed=21)
    if driver.worker.resources:
        assert driver.worker.status()["moves"]["done"] > 0

"""The deployment files of docs/layouts: each gives the answers of one rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mstar.spec.deployment import merge_deployment
from mstar.spec.errors import DeploymentError
from mstar.spec.placement import layout_of, ranks_of
from mstar.testing.miniatures import miniature
from mstar.testing.rank_drive import RankDriver

from .test_ranks import assert_all_right

DOCS = Path(__file__).parents[3] / "docs/layouts"
MODELS = {
    frozenset({"encoder", "decoder"}): "mini_seq2seq",
    frozenset({"lm", "codec"}): "mini_tts",
    frozenset({"denoiser"}): "mini_denoise",
    frozenset({"lm"}): "mini_hybrid",
    frozenset({"eye", "lm"}): "mini_look",
}
"""Nodes that a page places → a miniature that has them."""
NAMES = {"encoder": "eye", "llm": "lm"}
"""Of a published model's nodes → in the miniature that sees."""


def files(page: str) -> list[dict[str, Any]]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


PLACED = [
    pytest.param(file["placement"], id=f"{page}-{number}")
    for page in ("nodes-apart.md", "node-copies.md", "prefill-decode.md", "copies.md")
    for number, file in enumerate(files(page))
    if "placement" in file
]


@pytest.mark.parametrize("placement", PLACED)
def test_a_layout_gives_the_answers_of_one_rank(placement: dict[str, Any]) -> None:
    placement = {NAMES.get(node, node) if "llm" in placement else node: place for node, place in placement.items()}
    mini = miniature(MODELS[frozenset(placement)])
    assert_all_right(RankDriver(mini, placement=placement), mini, 5, seed=3)


@pytest.mark.parametrize(("numbers", "beside"), [([1, 1, 0], (True, False)), ([0, 1, 1], (False, False))])
def test_rank_0_is_told_who_is_on_its_gpu(numbers: list[int], beside: tuple[bool, bool]) -> None:
    driver = RankDriver(miniature("mini_tts"), placement={"lm": 0, "codec": [1, 2]}, rank_devices=numbers)
    assert tuple(driver.wires[rank].follower.facts()["beside_rank_0"] for rank in (1, 2)) == beside


def test_every_file_is_a_deployment() -> None:
    pages = sorted(page.name for page in DOCS.glob("*.md"))
    assert len(pages) >= 4
    for page in pages:
        for file in files(page):
            merge_deployment("any", file)
    (overview,) = files("README.md")
    deployment = merge_deployment("any", overview)
    layout = layout_of(deployment.placement, deployment.placement)
    assert (ranks_of(deployment.placement), layout.ranks) == (7, 7)
    assert layout.gang(6) == (0, 6)
    assert layout.nodes_of(0) == ["lm", "writer"]


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ({"lm": 2, "codec": 0}, "rank 1 runs no node"),
        ({"lm": 3, "codec": 0}, "ranks 1 to 2 run no node"),
        ({"lm": 1023, "codec": [0, 2]}, "ranks 1, 3 to 1022 run no node"),
        ({"lm": 10**12, "codec": [0, 2]}, "should be less than 1024"),
        (
            {"lm": 0, "codec": {"ranks": [0, 1], "split": "contexts"}},
            "leave `split` out, and the copies share requests",
        ),
        ({"lm": {"ranks": [0, 1, 2], "tp": 2}}, "give 2 ranks, or a multiple"),
        ({"lm": [0, 0]}, "name a rank twice"),
        ({"lm": {"rank": [0]}}, "did you mean 'ranks'"),
        ({"lm": "first"}, "give a rank, a list of ranks"),
        ({"lmm": 1}, "did you mean 'lm'"),
    ],
)
def test_what_is_wrong_with_a_placement_is_told(placement: dict[str, Any], said: str) -> None:
    with pytest.raises(DeploymentError, match=re.escape(said)):
        RankDriver(miniature("mini_tts"), placement=placement)


def test_more_copies_than_branches_are_refused() -> None:
    with pytest.raises(DeploymentError, match=r"in 2 contexts, 'cond', 'uncond'; 2 copies would do"):
        RankDriver(miniature("mini_denoise"), placement={"denoiser": {"ranks": [0, 1, 2], "split": "contexts"}})


def test_who_sees_is_where_it_is_read() -> None:
    """Both use the embeddings that are kept by content."""
    with pytest.raises(DeploymentError, match="the nodes that share resource 'media' must be placed alike"):
        RankDriver(miniature("mini_look"), placement={"eye": 1})


@pytest.mark.parametrize(
    ("key", "placement", "said"),
    [
        ("mini_chat", {"lm": {"prefil": 1, "decode": 0}}, "placement.lm.prefil: unknown walk; did you mean 'prefill'?"),
        ("mini_chat", {"lm": {"prefill": 1}}, "a place for one walk only"),
        ("mini_chat", {"lm": {"walks": {"prefill": 1, "decode": 0}, "tp": 2}}, "tp beside walks"),
        ("mini_tts", {"lm": {"prefill": 1, "decode": {"ranks": [0, 2], "tp": 2}}}, "prefill tp 1 × sp 1, decode tp 2"),
        ("mini_tts", {"codec": {"speak": 1, "decode": 0}}, "walk 'speak' does not call node 'codec'; 'decode' does"),
        ("mini_chat", {"lm": {"prefill": 1, "decode": 3}}, "ranks 0, 2 run no node"),
        ("mini_planner", {"calc": {"read": 0, "twice": 1, "shift": 0}}, "a request never goes back"),
        ("mini_denoise", {"denoiser": {"prefill": 1, "decode": 0}}, "in several branches at once"),
        ("mini_omni", {"thinker": 0, "talker": {"prefill": 1, "decode": 0}}, "none is outside of loops"),
    ],
)
def test_a_place_for_each_walk_is_refused_where_it_cannot_be(key: str, placement: dict[str, Any], said: str) -> None:
    with pytest.raises(DeploymentError, match=re.escape(said)):
        RankDriver(miniature(key), placement=placement)


def test_state_that_cannot_move_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstar.resources.recurrent.RecurrentStateResource.moves", False)
    with pytest.raises(DeploymentError, match=re.escape("resource 'state' (recurrent_state) cannot move")):
        RankDriver(miniature("mini_hybrid"), placement={"lm": {"prefill": 1, "decode": 0}})

"""Several ranks say what one says: gated attention, gated delta nets and the vision tower divided by their heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.nn.mesh import Mesh, World
from mstar.spec.errors import SetupError
from mstar.spec.tasks import Image
from mstar.testing.conformance.subject import open_registry
from mstar.testing.drive import Driver
from mstar.testing.examples import Example
from mstar.testing.ranks import Ranks

KEY = "qwen3_5_0.8b"
TEXTS = ("Hello there, how are you today?", "France", "The capital of France is Paris. " * 3)
PICTURES = tuple(
    Image(np.random.default_rng(seed).integers(0, 256, (size, 24, 3), dtype=np.uint8))
    for seed, size in enumerate((16, 33, 40))
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as running:
        yield running


def said(world: World | None, folder: Path, size: int = 1, nodes: tuple[str, ...] = ("llm",)) -> list[Any]:
    meshes = {}
    if world is not None:
        mesh = world.mesh(range(size), tp=size)
        assert mesh is not None
        meshes = dict.fromkeys(nodes, mesh)
    driver = Driver(KEY, open_registry("mstar_qwen3.plugin"), folder, meshes, device="cpu", dtype="float32")
    for number, text in enumerate(TEXTS):
        parts = (PICTURES[number],) if "encoder" in nodes else ()
        driver.submit(str(number), Example(text, knobs={"temperature": 0.0, "max_tokens": 12}, parts=parts))
    driver.run()
    found = [list(driver.result(str(number))["text"]) for number in range(len(TEXTS))]
    driver.assert_empty()
    return found


@pytest.mark.parametrize("layout", ["whole", "text"])
def test_ranks_say_what_one_says(ranks: Ranks, folders: dict[str, Path], layout: str) -> None:
    alone = said(None, folders[layout])
    assert len(set(alone[0])) > 3
    for rank in ranks.run(2, said, folders[layout], 2):
        assert rank == alone


def test_ranks_see_what_one_sees(ranks: Ranks, folders: dict[str, Path]) -> None:
    """The tower's heads, its channels between two products, and those of the merger are divided."""
    both = ("llm", "encoder")
    alone = said(None, folders["whole"], 1, both)
    assert alone != said(None, folders["whole"])
    for rank in ranks.run(2, said, folders["whole"], 2, both):
        assert rank == alone


def test_heads_that_do_not_divide_are_told(folders: dict[str, Path]) -> None:
    registry = open_registry("mstar_qwen3.plugin")
    with pytest.raises(SetupError, match="not divided by tp=3"):
        Driver(KEY, registry, folders["text"], {"llm": Mesh.sketch(tp=3)}, device="cpu")

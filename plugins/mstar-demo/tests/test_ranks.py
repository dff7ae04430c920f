"""SmolLM2 on two ranks says what it says on one; what its heads do not allow is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mstar.nn.mesh import Mesh, World
from mstar.spec.errors import SetupError
from mstar.testing.drive import Driver
from mstar.testing.examples import Example
from mstar.testing.ranks import Ranks
from mstar_demo.tiny import write_smollm2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    write_smollm2(folder)  # six heads, two of them for keys and values
    return folder


def said(world: World | None, folder: Path) -> Any:
    mesh = None if world is None else world.mesh([0, 1], tp=2)
    driver = Driver("smollm2", weights=folder, meshes={} if mesh is None else {"llm": mesh}, device="cpu")
    driver.submit("a", Example("What is the capital of France?", knobs={"temperature": 0.0, "max_tokens": 16}))
    driver.run()
    return list(driver.result("a")["text"])


def test_two_ranks_say_what_one_says(folder: Path) -> None:
    alone = said(None, folder)
    assert len(set(alone)) > 3
    with Ranks() as ranks:
        assert ranks.run(2, said, folder) == [alone, alone]


def test_what_its_heads_do_not_allow_is_told(folder: Path) -> None:
    with pytest.raises(SetupError, match="6 query heads are not divided by tp=4"):
        Driver("smollm2", weights=folder, meshes={"llm": Mesh.sketch(tp=4)}, device="cpu")

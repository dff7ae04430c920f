"""Several ranks paint what one paints: heads divided, tokens divided, and both."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_attention import Served

from mstar.nn.mesh import Mesh, World
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.spec.errors import SetupError
from mstar.spec.tasks import Image
from mstar.testing.drive import Driver
from mstar.testing.examples import Example
from mstar.testing.ranks import Ranks
from mstar_diffusion.z_image import tiny

REQUESTS: tuple[dict[str, Any], ...] = (
    {"width": 64, "height": 80, "num_inference_steps": 3, "seed": 1},
    {"width": 64, "height": 80, "num_inference_steps": 2, "seed": 2},
    {"width": 80, "height": 64, "num_inference_steps": 2, "seed": 3, "guidance_scale": 2.0, "negative_prompt": "dull"},
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("z_image")
    tiny.write(folder, n_heads=4, n_kv_heads=4, axes_dims=[4, 4, 4])
    return folder


def registry() -> Registry:
    installed = importlib.metadata.entry_points(group="mstar.plugins", name="diffusion")
    return Registry(load_plugins(Settings(extra_plugins=() if installed else ("mstar_diffusion.plugin",))))


def painted(
    world: World | None, folder: Path, tp: int = 1, sp: int = 1, key: str = "z_image_turbo", attention: str = "sdpa"
) -> list[np.ndarray[Any, Any]]:
    meshes = {}
    if world is not None:
        mesh = world.mesh(range(tp * sp), tp, sp)
        assert mesh is not None
        meshes = {"dit": mesh}
        if sp == 1:
            meshes["text_encoder"] = mesh
    with pytest.MonkeyPatch.context() as patch:  # in the rank's process
        Served.instead(patch)
        options = {"attention_backend": attention}
        driver = Driver(key, registry(), folder, meshes, device="cpu", dtype="float32", model_kwargs=options)
    asked = REQUESTS if key == "z_image_turbo" else REQUESTS[:2]  # the other is distilled from guidance
    for number, knobs in enumerate(asked):
        seen = (Image(np.full((64, 80, 3), 40 * number, np.uint8)),) if key != "z_image_turbo" and number else ()
        driver.submit(str(number), Example("a lighthouse in the rain", knobs=knobs, parts=seen), ability="image")
    driver.run()
    pictures = [driver.result(str(number))["image"] for number in range(len(asked))]
    driver.assert_empty()
    return pictures


@pytest.mark.parametrize(("tp", "sp"), [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)])
def test_ranks_paint_what_one_paints(ranks: Ranks, folder: Path, tp: int, sp: int) -> None:
    alone = painted(None, folder)
    assert not np.array_equal(alone[0], alone[1])
    for rank in ranks.run(tp * sp, painted, folder, tp, sp):
        assert_alike(alone, rank)


def assert_alike(alone: list[np.ndarray[Any, Any]], rank: list[np.ndarray[Any, Any]]) -> None:
    for one, other in zip(alone, rank, strict=True):
        # the order of sums changes last bits, of which rounding to bytes makes a step of one here and there
        apart = np.abs(one.astype(int) - other.astype(int))
        assert apart.max() <= 1
        assert (apart > 0).mean() < 0.01


@pytest.mark.parametrize(("tp", "sp"), [(2, 1), (1, 3), (2, 2)])
def test_flux_2_and_its_references_too(ranks: Ranks, flux2: Path, tp: int, sp: int) -> None:
    alone = painted(None, flux2, key="flux2_klein")
    for rank in ranks.run(tp * sp, painted, flux2, tp, sp, "flux2_klein"):
        assert_alike(alone, rank)


@pytest.mark.parametrize(("tp", "sp"), [(2, 1), (1, 3)])
def test_attention_by_a_backend_of_the_engine(ranks: Ranks, folder: Path, tp: int, sp: int) -> None:
    """With a rank's own heads: FlashInfer's place is taken, since it runs on GPUs alone."""
    alone = painted(None, folder)
    for rank in ranks.run(tp * sp, painted, folder, tp, sp, "z_image_turbo", "flashinfer"):
        assert_alike(alone, rank)


def test_heads_that_do_not_divide_are_told(folder: Path) -> None:
    with pytest.raises(SetupError, match=r"noise_refiner\.0\.attention\.to_qkv: 4 query heads .* tp: 1 or 2 or 4"):
        Driver("z_image_turbo", registry(), folder, {"dit": Mesh.sketch(tp=3)}, device="cpu")


def test_what_cannot_be_divided_says_so(folder: Path) -> None:
    with pytest.raises(SetupError, match="ZImageVaeDecoder does not say that its tokens can be"):
        Driver("z_image_turbo", registry(), folder, {"vae_decoder": Mesh.sketch(sp=2)}, device="cpu")

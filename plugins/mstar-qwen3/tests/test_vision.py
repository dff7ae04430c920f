"""The vision tower against transformers', at tiny random sizes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from mstar.nn.rotary import Rotation
from mstar.processing.pictures import Patcher
from mstar.resources.attention.torch_sdpa import TorchAttention
from mstar.resources.ragged import RaggedView
from mstar.resources.staging import Stage
from mstar_qwen3.processor import places_of
from mstar_qwen3.vision import VisionEncoder, kernel_head_dim
from mstar_qwen3.vision_config import VisionConfig

SIZES = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
GRIDS = [(1, 4, 6), (3, 2, 2), (1, 8, 2), (1, 10, 12)]
PATCHER = Patcher(patch=4)


@pytest.fixture(scope="module")
def towers() -> tuple[torch.nn.Module, VisionEncoder]:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    torch.manual_seed(3)
    reference = Qwen3_5VisionModel(Qwen3_5VisionConfig(**SIZES)).eval()
    for tensor in reference.parameters():
        torch.nn.init.normal_(tensor, std=0.2)
    ours = VisionEncoder(VisionConfig.from_hf(SIZES, 64), PATCHER.values()).eval()
    ours.load_state_dict(reference.state_dict())
    for name, buffer in ours.compute_buffers(torch.device("cpu")).items():
        getattr(ours, name).copy_(buffer)
    return reference, ours


def pixels(grids: list[tuple[int, int, int]]) -> torch.Tensor:
    count = sum(t * h * w for t, h, w in grids)
    return torch.from_numpy(np.random.default_rng(count).integers(0, 256, (count, 96), dtype=np.uint8))


def embed(tower: VisionEncoder, grids: list[tuple[int, int, int]], patches: torch.Tensor) -> torch.Tensor:
    attention = RaggedView(TorchAttention(), Stage("cpu"), "test")
    attention.fill([h * w for t, h, w in grids for _ in range(t)], None)
    places = np.concatenate([places_of(*grid, 2) for grid in grids])
    with torch.inference_mode():
        return tower.embed(patches, torch.from_numpy(places), attention)


@pytest.mark.parametrize("grids", [GRIDS[:1], GRIDS[1:2], GRIDS])
def test_embeddings_are_transformers(
    towers: tuple[torch.nn.Module, VisionEncoder], grids: list[tuple[int, int, int]]
) -> None:
    reference, ours = towers
    patches = pixels(grids)
    values = torch.from_numpy(PATCHER.values())[0][patches.int()]
    with torch.inference_mode():
        expected = reference(values, grid_thw=torch.tensor(grids)).pooler_output
    torch.testing.assert_close(embed(ours, grids, patches), expected, rtol=1e-4, atol=1e-4)


def test_a_picture_alone_is_what_it_is_among_others(towers: tuple[torch.nn.Module, VisionEncoder]) -> None:
    _, ours = towers
    patches, at, done = pixels(GRIDS), 0, 0
    together = embed(ours, GRIDS, patches)
    for grid in GRIDS:
        count = grid[0] * grid[1] * grid[2]
        alone = embed(ours, [grid], patches[at : at + count])
        torch.testing.assert_close(together[done : done + count // 4], alone, rtol=1e-5, atol=1e-5)
        at, done = at + count, done + count // 4


def test_heads_filled_up_for_a_kernel_attend_alike(
    towers: tuple[torch.nn.Module, VisionEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = towers
    patches = pixels(GRIDS)
    plain = embed(ours, GRIDS, patches)
    monkeypatch.setattr("mstar_qwen3.vision.kernel_head_dim", lambda size, device: 64)
    torch.testing.assert_close(embed(ours, GRIDS, patches), plain, rtol=1e-5, atol=1e-5)


def test_angles_are_float32_also_of_a_tower_in_bfloat16(towers: tuple[torch.nn.Module, VisionEncoder]) -> None:
    _, ours = towers
    rotation: Rotation = ours._rotation(torch.tensor([[7, 9, 10, 12]], dtype=torch.int32))
    assert rotation.cos.dtype is torch.float32
    assert rotation.cos.shape == (1, 1, 12)


def test_a_tower_in_bfloat16_is_near_float32s(towers: tuple[torch.nn.Module, VisionEncoder]) -> None:
    reference, ours = towers
    patches = pixels(GRIDS)
    exact = embed(ours, GRIDS, patches)
    values = torch.from_numpy(PATCHER.values())[0][patches.int()].bfloat16()
    half = copy.deepcopy(reference).bfloat16()
    with torch.inference_mode():
        theirs = half(values, grid_thw=torch.tensor(GRIDS)).pooler_output
    got = embed(copy.deepcopy(ours).bfloat16(), GRIDS, patches)
    assert got.dtype is torch.bfloat16
    assert (got.float() - exact).norm() <= 1.5 * (theirs.float() - exact).norm()


def test_memory_of_a_step_grows_with_its_patches_and_holds_the_largest_picture() -> None:
    config = VisionConfig.from_hf(SIZES, 64)
    plain, large = (VisionEncoder(config, PATCHER.values(), largest) for largest in (0, 500))
    need = [
        node.step_bytes(items, torch.device("cuda"), torch.bfloat16) for node in (plain, large) for items in (100, 900)
    ]
    assert need[1] == 9 * need[0] == need[3]
    assert need[2] == 5 * need[0]
    width, filled = config.hidden, config.heads * kernel_head_dim(config.head_dim, torch.device("cuda"))
    assert need[0] / 100 > 2 * (
        6 * width + 4 * filled
    )  # at least: stream, norm, projections; what the kernel takes and gives

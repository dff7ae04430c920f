"""Pictures and videos as vision transformers want them, against transformers' processors."""

from __future__ import annotations

import importlib
import logging

import numpy as np
import pytest
from PIL import Image

from mstar.processing.pictures import BadShape, Patcher, content_words, frame_indices, smart_resize
from mstar.spec.errors import SetupError

PUBLISHED = {
    "size": {"shortest_edge": 64 * 64, "longest_edge": 320 * 320},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SHAPES = [(1, 1), (30, 30), (64, 64), (100, 37), (37, 100), (480, 640), (333, 1000), (5, 996), (32, 320), (321, 321)]


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [[0.5, 0.5, 0.5], [0.48145466, 0.4578275, 0.40821073]])
def test_pictures_are_the_pil_processors_to_the_last_bit(shape: tuple[int, int], mean: list[float]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = {**PUBLISHED, "image_mean": mean}
    pixels = noise(*shape, 3)
    expected = Qwen2VLImageProcessorPil(**config)(images=[Image.fromarray(pixels)], return_tensors="np")
    patcher = Patcher.read(config)
    patches = patcher.picture(pixels)
    assert [patches.frames, patches.height, patches.width] == expected["image_grid_thw"][0].tolist()
    values = patcher.values()
    channel = np.repeat(np.arange(3), patches.data.shape[1] // 3)
    assert np.array_equal(values[channel, patches.data], expected["pixel_values"])


@pytest.mark.parametrize("shape", [(2, 64, 64), (5, 30, 41), (8, 300, 200), (6, 20, 400), (40, 96, 96), (3, 1, 1)])
@pytest.mark.parametrize("cap", [False, True])
def test_sizes_of_videos_are_transformers(
    shape: tuple[int, int, int], cap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = video_processor(monkeypatch, cap)
    patcher = Patcher.read({**PUBLISHED, "cap_pixels_per_frame": cap, "max_video_tokens": 6})
    patches = patcher.video(list(noise(*shape, 3)))
    assert patches.frames == -(-shape[0] // 2)
    assert patches.frames * patches.height * patches.width == len(patches.data)
    assert len(patches.data) == reference.get_num_of_video_patches(*shape)


def test_patches_of_videos_lie_as_transformers_lays_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    frames = noise(5, 96, 64, 3)
    patches = Patcher.read({**PUBLISHED, "size": {"shortest_edge": 4096, "longest_edge": 96 * 64 * 6}}).video(
        list(frames)
    )
    channels_first = torch.from_numpy(frames).permute(0, 3, 1, 2)[None]
    expected, *grid = video_processor(monkeypatch, False).patchify(channels_first, 16, 2, 2)
    assert grid == [patches.frames, patches.height, patches.width] == [3, 6, 4]
    assert np.array_equal(patches.data, expected[0].numpy())


@pytest.mark.parametrize("total", [1, 2, 3, 7, 30, 31, 600, 5000])
@pytest.mark.parametrize("source_fps", [0.5, 24.0, 29.97])
def test_frames_looked_at_are_transformers(total: int, source_fps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=total, fps=source_fps)
    expected = video_processor(monkeypatch, False).sample_frames(metadata)
    assert frame_indices(total, source_fps, 2.0, 4, 768).tolist() == expected.tolist()


def video_processor(monkeypatch: pytest.MonkeyPatch, cap: bool):
    """The reference's, without torchvision: of its methods those that need none."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    module = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    found = object.__new__(module.Qwen3VLVideoProcessor)
    for name, value in {**PUBLISHED, "cap_pixels_per_frame": cap, "max_video_tokens": 6}.items():
        object.__setattr__(found, name, value)
    return found


def test_pictures_that_are_too_long_are_refused() -> None:
    assert smart_resize(10, 2000, 32, 4096, 102400) == (32, 928)
    with pytest.raises(BadShape, match="2001x10 pixels is more than 200 times"):
        smart_resize(10, 2001, 32, 4096, 102400)
    # of a video's frames, which are widened first, the size is said that they came with
    with pytest.raises(BadShape, match="2000x2 pixels is more than 200 times"):
        smart_resize(2, 2000, 32, 4096, 102400, frames=4, pair=2)


def test_the_budget_of_a_video_is_for_all_of_its_frames() -> None:
    patcher = Patcher(least=4096, most=96 * 96 * 8, cap=False)
    assert patcher.video_size(8, 96, 96) == (96, 96)
    assert patcher.video_size(32, 96, 96) == (32, 32)
    assert patcher.video_size(1, 96, 96) == patcher.video_size(2, 96, 96)


def test_words_differ_by_content_and_shape() -> None:
    pixels = noise(8, 12)
    words = content_words(pixels, 2, 4)
    other = pixels.copy()
    other[3, 5] ^= 1
    assert words == content_words(pixels.copy(), 2, 4)
    assert len({words, content_words(pixels, 4, 2), content_words(other, 2, 4)}) == 3
    assert all(0 <= word < 1 << 62 for word in words)


@pytest.mark.parametrize("config", [{"do_resize": False}, {"resample": 2}])
def test_preprocessors_that_want_something_else_are_refused(config: dict) -> None:
    with pytest.raises(SetupError, match="not supported"):
        Patcher.read(config)


def test_older_names_of_the_budget_are_read() -> None:
    patcher = Patcher.read({"min_pixels": 100, "max_pixels": 1000, "patch_size": 14})
    assert (patcher.least, patcher.most, patcher.factor) == (100, 1000, 28)

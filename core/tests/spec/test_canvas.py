"""What a model of pictures and videos takes, and what the error for everything else says."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from mstar.spec.canvas import Canvas, Lengths, Sizes
from mstar.spec.errors import RequestError
from mstar.spec.knobs import Knobs
from mstar.spec.tasks import Image, ImageTask, VideoTask

GRID = Sizes(multiple=16, min_side=256, max_side=2048, max_pixels=1024 * 1024)


@pytest.mark.parametrize(
    ("size", "nearest"),
    [
        ((1024, 1024), (1024, 1024)),
        ((1000, 1000), (992, 992)),
        ((1, 1), (256, 256)),
        ((0, 0), (256, 256)),
        ((100_000, 10_000), (2048, 256)),
        ((2048, 2048), (1024, 1024)),
        ((10_000, 16), (2048, 256)),
    ],
)
def test_the_nearest_size_is_one_that_the_model_makes(size: tuple[int, int], nearest: tuple[int, int]) -> None:
    assert GRID.nearest(size) == nearest
    assert GRID.has(nearest)
    assert GRID.has(size) == (size == nearest)


def test_the_nearest_size_is_always_one_that_the_model_makes() -> None:
    rng = random.Random(7)
    for _ in range(2000):
        multiple = rng.choice([1, 2, 8, 16, 64])
        low = rng.randint(1, 20) * multiple
        sizes = Sizes(multiple, low, low + rng.randint(0, 60) * multiple, rng.randint(low * low, 10**7))
        asked = rng.randint(0, 5000), rng.randint(0, 5000)
        assert sizes.has(sizes.nearest(asked)), (sizes, asked, sizes.nearest(asked))


def test_of_a_few_sizes_the_one_of_the_nearest_shape_is_named() -> None:
    few = Sizes(choices=((1024, 1024), (1536, 1024), (1024, 1536)))
    assert few.nearest((300, 450)) == (1024, 1536)
    with pytest.raises(RequestError, match=r"1024x1024, 1536x1024, 1024x1536.*nearest valid value is 1536x1024"):
        Canvas(few).check(ImageTask(knobs=Knobs(), prompt="x", size=(1500, 1000)))


def test_sizes_within_a_limit() -> None:
    within = GRID.within(300_000)
    assert within is not None
    assert within.nearest((2048, 2048)) == (544, 544)
    assert GRID.within(2**40) == GRID
    assert GRID.within(256 * 256 - 1) is None
    few = Sizes(choices=((1024, 1024), (64, 64)))
    assert few.within(5000) == replace(few, choices=((64, 64),), max_pixels=5000)
    assert few.within(100) is None


@pytest.mark.parametrize(("seconds", "frames"), [(5, 81), (5.0625, 81), (0.0625, 1), (4, 65), (5.125, 81)])
def test_a_length_is_right_to_a_frame(seconds: float, frames: int) -> None:
    assert Lengths(16, max_frames=121, first=1, step=4).frames(seconds) == frames


@pytest.mark.parametrize(
    ("seconds", "near"),
    [
        (4.9, "lengths are 4.8125 and 5.0625"),
        (0, "length is 0.0625"),
        (-3, "length is 0.0625"),
        (60, "length is 7.5625"),
        (float("inf"), "length is"),
        (float("nan"), "length is"),
    ],
)
def test_a_length_off_the_grid_names_its_neighbours(seconds: float, near: str) -> None:
    with pytest.raises(RequestError, match=near) as caught:
        Lengths(16, max_frames=121, first=1, step=4).frames(seconds)
    assert caught.value.param == "seconds"


def picture(width: int, height: int) -> Image:
    return Image(np.zeros((height, width, 3), np.uint8))


@pytest.mark.parametrize(
    ("task", "param"),
    [
        (ImageTask(knobs=Knobs(), prompt="x", images=(picture(8, 8),) * 3), "image"),
        (ImageTask(knobs=Knobs(), prompt="x", mask=np.zeros((8, 8), np.uint8)), "mask"),
        (ImageTask(knobs=Knobs(), prompt="x", images=(picture(8, 8),), mask=np.zeros((8, 9), np.uint8)), "mask"),
        (ImageTask(knobs=Knobs(), prompt="x", size=(8, 8)), "size"),
        (VideoTask(knobs=Knobs(), prompt="x", seconds=0.0), "seconds"),
    ],
)
def test_what_does_not_fit_names_its_field(task: ImageTask | VideoTask, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        Canvas(GRID, Lengths(8, 33), references=2, masks=True).check(task)
    assert caught.value.param == param


def test_a_canvas_that_holds_nothing_is_a_fault() -> None:
    assert list(Canvas(GRID, Lengths(24, 97, 1, 8), 1, True).faults()) == []
    assert list(Canvas(Sizes(multiple=64, min_side=65, max_side=100)).faults())
    assert list(Canvas(GRID, Lengths(0, 10)).faults())
    assert list(Canvas(GRID, masks=True).faults())

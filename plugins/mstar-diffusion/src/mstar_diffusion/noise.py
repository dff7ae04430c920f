"""The noise that a seed means: PyTorch's normal numbers of a CPU generator, made with numpy.

So a seed starts from the picture that ``torch.Generator("cpu").manual_seed(seed)`` gives a reference pipeline, on any
device, and the API side needs no torch.

Source: PyTorch 2.13, ``aten/src/ATen/native/cpu/DistributionTemplates.h`` (``normal_fill``) and
``core/MT19937RNGEngine``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["normal", "normal_by_point"]

_GROUP = 16
"""Numbers that are made of as many uniform ones at a time: the cosines of eight pairs, then the sines."""
_AT_ONCE = 1 << 16
"""So many numbers are made at a time: what is between stays in the cache, and nothing large is allocated."""


def normal(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """``torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))`` in float32, to the last bit or two
    (its vectorised sine and logarithm round in another way).

    :param shape: of 16 numbers or more. :param seed: an integer of 64 bits, of which PyTorch's engine reads 32.
    """
    size = math.prod(shape)
    if size < _GROUP:
        raise ValueError(f"noise of {size} numbers: PyTorch draws fewer than {_GROUP} in another way")
    engine = np.random.RandomState(seed & 0xFFFFFFFF)  # the same engine, seeded in the same way
    made = np.empty(size, np.float32)
    whole = size // _GROUP * _GROUP
    for begin in range(0, whole, _AT_ONCE):
        part = made[begin : min(begin + _AT_ONCE, whole)]
        _pairs(_uniform(engine, len(part)), part)
    if size != whole:
        # the last group overlaps the one before and is drawn anew
        _uniform(engine, size - whole)
        _pairs(_uniform(engine, _GROUP), made[size - _GROUP :])
    return made.reshape(shape)


def normal_by_point(shape: tuple[int, int, int], seed: int) -> NDArray[np.float32]:
    """:func:`normal` of *shape* ``[C, H, W]`` with its channels last: ``[H, W, C]``.

    Some channels are made at a time and put where they belong while they are in the cache: the whole turned around
    takes as long as making it.
    """
    channels, height, width = shape
    points = height * width
    some = max(1, _AT_ONCE // points)
    if points % _GROUP:  # groups lie across channels
        return np.ascontiguousarray(np.moveaxis(normal(shape, seed), 0, -1))
    engine = np.random.RandomState(seed & 0xFFFFFFFF)
    made = np.empty((points, channels), np.float32)
    piece = np.empty((some, points), np.float32)
    for begin in range(0, channels, some):
        part = piece[: min(some, channels - begin)]
        _pairs(_uniform(engine, part.size), part.reshape(-1))
        made[:, begin : begin + some] = part.T
    return made.reshape(height, width, channels)


def _uniform(engine: np.random.RandomState, count: int) -> NDArray[np.float32]:
    """Multiples of 2^-24 in 0…1, without 1."""
    raw = engine.randint(0, 1 << 32, count, dtype=np.uint32)
    return (raw & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2.0**-24)


def _pairs(uniform: NDArray[np.float32], made: NDArray[np.float32]) -> None:
    """Box and Muller's transform of each group into *made*: pair *i* is its numbers *i* and *i + 8*. In float32, as
    PyTorch computes it, which is a tenth of the time that float64 takes."""
    first, second = np.moveaxis(uniform.reshape(-1, 2, _GROUP // 2), 1, 0)
    radius, angle = np.sqrt(np.float32(-2) * np.log(1 - first)), np.float32(2 * math.pi) * second
    pairs = made.reshape(-1, 2, _GROUP // 2)
    np.multiply(radius, np.cos(angle), out=pairs[:, 0])
    np.multiply(radius, np.sin(angle), out=pairs[:, 1])

"""Sizes of a :mod:`mstar_tts.seanet`. No torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SeanetConfig"]


@dataclass(frozen=True)
class SeanetConfig:
    """
    :param filters: channels at the sound's own rate. :param width: of a vector.
    :param ratios: of the encoder, in the order in which they run; the decoder goes back.
    :param residuals: blocks at each rate, with a dilation that grows by *growth*.
    :param shortcut: whether blocks have a convolution beside them. :param lstm: layers next to the vectors.
    """

    filters: int
    width: int
    ratios: tuple[int, ...]
    residuals: int = 1
    kernel: int = 7
    last_kernel: int = 7
    residual_kernel: int = 3
    growth: int = 2
    compress: int = 2
    shortcut: bool = False
    lstm: int = 0

"""What convolutional codecs are made of: causal layers that run a signal piece by piece, and periodic activations.

Signals are ``[rows, channels, T]``. A causal layer looks at the end of the piece before; :class:`Carry` brings that
along, so that pieces come out as the whole would have. A new signal begins with zeros, which is the padding that causal
layers have anyway: there is no other way to run them.
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar_tts.codec_ops import snake

__all__ = ["Carry", "CausalConv", "CausalUpsample", "Snake", "SnakeBeta", "carried", "settle"]


class Carry:
    """The ends of all layers' inputs, in the order in which the layers run.

    :param state: ``[rows, size]`` of the piece before (:func:`carried` says the size); ``None``: a signal begins.
    """

    def __init__(self, state: Tensor | None = None):
        self._state, self._at = state, 0
        self._ends: list[Tensor] = []

    def extend(self, x: Tensor, count: int, activation: SnakeBeta | Snake | None = None) -> Tensor:
        """*activation* of *x* ``[rows, channels, T]`` behind the last *count* items before it: ``[rows, channels,
        count + T]``. The last *count* of that are kept for the next piece."""
        if not count:
            return x if activation is None else activation(x)
        before, whole = self.take((x.shape[1], count), x), x
        if activation is not None:
            whole = activation(x, x.new_zeros(*x.shape[:2], count) if before is None else before)
        else:
            whole = F.pad(x, (count, 0)) if before is None else torch.cat([before, x], 2)
        self.keep(whole[:, :, -count:])
        return whole

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """What the layer whose turn it is kept of the piece before, ``[rows, *shape]`` in *like*'s dtype; ``None`` for
        zeros."""
        if self._state is None:
            return None
        first, self._at = self._at, self._at + prod(shape)
        return self._state[:, first : self._at].view(-1, *shape).to(like.dtype)

    def keep(self, value: Tensor) -> None:
        """*value* ``[rows, …]`` is what that layer will :meth:`take` of this piece."""
        self._ends.append(value.flatten(1))

    def state(self, like: Tensor) -> Tensor:
        """What the next piece needs, ``[rows, size]``, in *like*'s dtype; its rows if no layer carried anything."""
        if not self._ends:
            return like.new_zeros(len(like), 0)
        return torch.cat(self._ends, 1).to(like.dtype)


def carried(module: nn.Module) -> int:
    """How many numbers a row's :class:`Carry` through *module* has."""
    return sum(int(getattr(part, "carried", 0)) for part in module.modules())


def settle(module: nn.Module) -> None:
    """Once the published weights of *module* are in: compute from them what is used instead."""
    for part in list(module.modules()):
        if part is not module and hasattr(part, "settle"):
            part.settle()  # type: ignore[operator]


class CausalConv(nn.Module):
    """A convolution whose output depends on nothing that comes later. ``[rows, in, T]`` to ``[rows, out, T / stride]``.

    Its weight is published as ``conv.weight``. Unless a signal ends there, *T* is a multiple of the stride.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
    ):
        super().__init__()
        self.conv = nn.Conv1d(
            in_channels, out_channels, kernel, stride=stride, dilation=dilation, groups=groups, bias=bias
        )
        self.stride = stride
        self.context = (kernel - 1) * dilation + 1 - stride
        self.carried = self.context * in_channels

    def forward(self, x: Tensor, carry: Carry, activation: SnakeBeta | Snake | None = None) -> Tensor:
        """:param activation: of *x*, in one go with what comes before it."""
        missing = -x.shape[2] % self.stride
        whole = carry.extend(x, self.context, activation)
        y: Tensor = self.conv(F.pad(whole, (0, missing)) if missing else whole)
        return y


class CausalUpsample(nn.Module):
    """A transposed convolution, of which only what depends on nothing later is kept. ``[rows, in, T]`` to
    ``[rows, out, T * rate]``.

    *kernel* is a multiple of *rate*: an item of the output depends on ``kernel / rate`` items of the input.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, rate: int):
        super().__init__()
        if kernel % rate:
            raise ValueError(f"an upsampling by {rate} with a kernel of {kernel}")
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, kernel, rate)
        self.rate, self.context = rate, kernel // rate - 1
        self.carried = self.context * in_channels

    def forward(self, x: Tensor, carry: Carry, activation: SnakeBeta | Snake | None = None) -> Tensor:
        """:param activation: of *x*, in one go with what comes before it."""
        y: Tensor = self.conv(carry.extend(x, self.context, activation))
        return y[:, :, self.context * self.rate : (self.context + x.shape[2]) * self.rate]


class SnakeBeta(nn.Module):
    """``x + sin(a x)² / b`` by channel, with ``a = exp(alpha)`` and ``b = exp(beta)`` (BigVGAN, Lee et al. 2023)."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels), requires_grad=False)
        self.beta = nn.Parameter(torch.zeros(channels), requires_grad=False)

    def settle(self) -> None:
        self.frequency = nn.Parameter(self.alpha.exp(), requires_grad=False)
        self.gain = nn.Parameter(1 / (self.beta.exp() + 1e-9), requires_grad=False)
        del self.alpha, self.beta

    def forward(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        """:param before: put before the result, as it is."""
        return snake(x, self.frequency, self.gain, before)


class Snake(nn.Module):
    """``x + sin(a x)² / a`` by channel (Ziyin et al. 2020), with ``a`` published as ``alpha`` ``[1, channels, 1]``."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1), requires_grad=False)

    def settle(self, dtype: torch.dtype | None = None) -> None:
        """Once, after loading. :param dtype: to go on in; ``None``: that of ``alpha``."""
        alpha = self.alpha.flatten()
        self.frequency = nn.Parameter(alpha.to(dtype or alpha.dtype), requires_grad=False)
        self.gain = nn.Parameter((1 / (alpha + 1e-9)).to(dtype or alpha.dtype), requires_grad=False)
        del self.alpha

    def forward(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        """:param before: put before the result, as it is."""
        return snake(x, self.frequency, self.gain, before)

"""The parts of a convolutional autoencoder with one attention in the middle (Rombach et al. 2022, "KL-f8").

Source: diffusers 0.42.1, ``Encoder`` and ``Decoder`` of ``models/autoencoders/vae.py``. Submodules bear the published
names.

On CUDA pictures keep their channels last in memory all the way, as convolutions want them: norm and activation are one
operation that leaves them so (:func:`mstar.nn.ops.group_norm`), and which adds the bias of the convolution before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from mstar.nn import ops

__all__ = ["Decoder", "Encoder", "doubled"]

_EPS = 1e-6


class Norm(nn.GroupNorm):
    """Group norm; with *silu* the activation behind it too."""

    def __init__(self, groups: int, channels: int, silu: bool = True):
        super().__init__(groups, channels, _EPS)
        self.silu = silu

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """*added* ``[C]``: to *x*, before it is normed."""
        return ops.group_norm(x, self.num_groups, self.weight, self.bias, self.eps, self.silu, added)


class Residual(nn.Module):
    """Two convolutions beside a way around them. ``[rows, C, H, W]``."""

    def __init__(self, channels: int, out: int, groups: int):
        super().__init__()
        self.norm1 = Norm(groups, channels)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.norm2 = Norm(groups, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(channels, out, 1) if channels != out else None

    def forward(self, x: Tensor) -> Tensor:
        if _folds_biases(x):
            return self._folded(x)
        y = self.conv2(self.norm2(self.conv1(self.norm1(x))))
        return (x if self.conv_shortcut is None else self.conv_shortcut(x)) + y  # type: ignore[no-any-return]

    def _folded(self, x: Tensor) -> Tensor:
        """The same with the biases in the norm and the sum behind their convolutions, which else add them in passes of
        their own."""
        assert self.conv2.bias is not None
        y = _without_bias(self.conv2, self.norm2(_without_bias(self.conv1, self.norm1(x)), self.conv1.bias))
        if self.conv_shortcut is None:
            return ops.add_channels(x, y, self.conv2.bias)
        assert self.conv_shortcut.bias is not None
        return ops.add_channels(_without_bias(self.conv_shortcut, x), y, self.conv2.bias + self.conv_shortcut.bias)


def _folds_biases(x: Tensor) -> bool:
    """Whether there are kernels for *x* that add a number a channel in passing."""
    return x.is_cuda and not is_compiling() and ops.cuda_kernels_fault() is None


def _without_bias(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, conv.weight, None, conv.stride, conv.padding)


class PointAttention(nn.Module):
    """Every point sees all others, in one head as wide as the channels."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.group_norm = Norm(groups, channels, silu=False)
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x: Tensor) -> Tensor:
        points = x.flatten(2)
        # compiled code calls torch's kernel of the norm directly, which wants its input in order
        normed = self.group_norm(points if x.is_cuda and not is_compiling() else points.contiguous()).transpose(1, 2)
        q, k, v = (layer(normed)[:, None] for layer in (self.to_q, self.to_k, self.to_v))
        out = self.to_out[0](F.scaled_dot_product_attention(q, k, v)[:, 0])
        return out.transpose(-1, -2).reshape(x.shape) + x  # type: ignore[no-any-return]


class Middle(nn.Module):
    def __init__(self, channels: int, groups: int, attention: bool):
        super().__init__()
        self.resnets = nn.ModuleList(Residual(channels, channels, groups) for _ in range(2))
        self.attentions = nn.ModuleList([PointAttention(channels, groups)] if attention else [])

    def forward(self, x: Tensor) -> Tensor:
        x = self.resnets[0](x)
        for attention in self.attentions:
            x = attention(x)
        return self.resnets[1](x)  # type: ignore[no-any-return]


class Halved(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))  # type: ignore[no-any-return]


def doubled(x: Tensor) -> Tensor:
    """``[rows, C, H, W]`` with each point four times: ``[rows, C, 2 * H, 2 * W]``, in the same order in memory.

    Where channels are last it is a copy, of eight bytes at a time: PyTorch's kernel moves single numbers, at a tenth of
    the bandwidth of a GPU.
    """
    points = x.movedim(1, -1)
    rows, height, width, channels = points.shape
    if is_compiling() or not points.is_contiguous() or channels * x.dtype.itemsize % 8 or x.is_contiguous():
        return F.interpolate(x, scale_factor=2.0, mode="nearest")
    wide = points.view(torch.int64)[:, :, None, :, None].expand(-1, -1, 2, -1, 2, -1)
    return wide.reshape(rows, 2 * height, 2 * width, -1).view(x.dtype).movedim(-1, 1)


class Doubled(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        # a CPU's convolution rounds by the order in memory, which is to be the reference's
        larger = doubled(x) if x.is_cuda else F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv(larger)  # type: ignore[no-any-return]


class Down(nn.Module):
    def __init__(self, channels: int, out: int, layers: int, groups: int, last: bool):
        super().__init__()
        widths = [channels, *[out] * layers]
        self.resnets = nn.ModuleList(Residual(widths[i], out, groups) for i in range(layers))
        self.downsamplers = nn.ModuleList([] if last else [Halved(out)])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.resnets, *self.downsamplers):
            x = block(x)
        return x


class Up(nn.Module):
    def __init__(self, channels: int, out: int, layers: int, groups: int, last: bool):
        super().__init__()
        widths = [channels, *[out] * layers]
        self.resnets = nn.ModuleList(Residual(widths[i], out, groups) for i in range(layers))
        self.upsamplers = nn.ModuleList([] if last else [Doubled(out)])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.resnets, *self.upsamplers):
            x = block(x)
        return x


class Encoder(nn.Module):
    """Pictures ``[rows, 3, H, W]`` in -1…1 to mean and log-variance ``[rows, 2 * latent, H/f, W/f]``.

    :param widths: channels at each size, the full one first; each but the last halves height and width.
    """

    def __init__(
        self, channels: int, latent: int, widths: Sequence[int], layers: int, groups: int, attention: bool = True
    ):
        super().__init__()
        self.conv_in = nn.Conv2d(channels, widths[0], 3, padding=1)
        before = [widths[0], *widths]
        last = len(widths) - 1
        self.down_blocks = nn.ModuleList(
            Down(before[i], width, layers, groups, i == last) for i, width in enumerate(widths)
        )
        self.mid_block = Middle(widths[-1], groups, attention)
        self.conv_norm_out = Norm(groups, widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 2 * latent, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(self.conv_norm_out(self.mid_block(x)))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Latents ``[rows, latent, h, w]`` to pictures ``[rows, 3, h * f, w * f]``, about -1…1. *widths* as in
    :class:`Encoder`; each size has one block more than there."""

    def __init__(
        self, channels: int, latent: int, widths: Sequence[int], layers: int, groups: int, attention: bool = True
    ):
        super().__init__()
        self.widths = tuple(widths)
        falling = list(reversed(widths))
        before = [falling[0], *falling]
        last = len(falling) - 1
        self.conv_in = nn.Conv2d(latent, falling[0], 3, padding=1)
        self.mid_block = Middle(falling[0], groups, attention)
        self.up_blocks = nn.ModuleList(
            Up(before[i], width, layers + 1, groups, i == last) for i, width in enumerate(falling)
        )
        self.conv_norm_out = Norm(groups, widths[0])
        self.conv_out = nn.Conv2d(widths[0], channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(self.conv_norm_out(x))  # type: ignore[no-any-return]

    def numbers_at_peak(self) -> float:
        """How many numbers it holds at a time, at most, for each pixel of the picture that it makes, where a norm with
        its activation is one operation.

        A block's input stays until the block has ended. In it a first residual has its input, that normed, and the
        convolution's output, later ones three maps of the block's width; what is doubled has its small and its large
        form and the convolution's output.
        """
        most, behind = 0.0, self.widths[-1]
        for level in reversed(range(len(self.widths))):
            width, share = self.widths[level], 0.25**level
            most = max(most, share * max(2 * behind + width, behind + 3 * width))
            if level:
                most = max(most, share * (behind + width) + 4 * share * 2 * width)
            behind = width
        return most

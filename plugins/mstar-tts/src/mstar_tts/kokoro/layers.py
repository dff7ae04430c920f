"""Layers over padded rows, channels last: ``[rows, T, channels]``, of which row *i* has ``lengths[i]`` valid items.

What lies beyond a row's length is zero wherever a layer looks at its neighbours, so that a row gives the same in any
padding. On a CPU convolutions of that layout are twice as fast as of PyTorch's own.

Reference: ``kokoro`` 0.9.4 (``modules.py``, ``istftnet.py``), which follows StyleTTS 2 (Li et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.ops import cpu_kernels_fault

__all__ = ["BiLSTM", "Conv", "Upsample", "keep"]

_MANY_TAPS, _VERY_MANY_TAPS, _MANY_CHANNELS = 7, 11, 64
"""From which on :class:`~mstar_tts.kokoro.fast_conv.FastConv` pays, with filters halved once and twice."""


def keep(x: Tensor, lengths: Tensor) -> Tensor:
    """*x* ``[rows, T, …]`` with zeros beyond each row's length (int64 ``[rows]``)."""
    inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return x * inside.view(*inside.shape, *[1] * (x.ndim - 2)).to(x.dtype)


class _Weighted(nn.Module):
    """A convolution's published weight: as it is, or as a weight norm's two factors ``weight_g`` and ``weight_v``."""

    def __init__(self, shape: tuple[int, ...], bias: int, normed: bool):
        super().__init__()
        if normed:
            self.weight_g = nn.Parameter(torch.empty(shape[0], 1, 1))
            self.weight_v = nn.Parameter(torch.empty(shape))
        else:
            self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(bias)) if bias else None

    def settle(self, dtype: torch.dtype) -> None:
        """Multiply a weight norm out and bring the weight into the order in which it is read. Once, after loading."""
        weight = torch._weight_norm(self.weight_v, self.weight_g, 0) if hasattr(self, "weight_v") else self.weight
        for name in ("weight_g", "weight_v"):
            self._parameters.pop(name, None)
        self.weight = nn.Parameter(self.ordered(weight).to(dtype), requires_grad=False)
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.to(dtype), requires_grad=False)

    def ordered(self, weight: Tensor) -> Tensor:
        return weight


class Conv(_Weighted):
    """A convolution over time; zeros are added on both sides. ``[rows, T, in]`` to ``[rows, T', out]``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        padding: int | None = None,
        bias: bool = True,
        normed: bool = True,
    ):
        super().__init__((out_channels, in_channels, kernel), out_channels if bias else 0, normed)
        self.stride, self.dilation = stride, dilation
        self.padding = (kernel - 1) * dilation // 2 if padding is None else padding
        self.fast: Callable[[Tensor], Tensor] | None = None

    def settle(self, dtype: torch.dtype) -> None:
        super().settle(dtype)
        out, channels, _, kernel = self.weight.shape
        worth = kernel >= _MANY_TAPS and min(out, channels) >= _MANY_CHANNELS
        plain = self.stride == 1 and self.dilation % 2 == 1 and dtype == torch.float32
        if worth and plain and self.weight.device.type == "cpu" and cpu_kernels_fault() is None:
            from mstar_tts.kokoro.fast_conv import FastConv

            depth = 2 if kernel >= _VERY_MANY_TAPS else 1
            self.fast = FastConv(self.weight[:, :, 0].detach(), self.bias, self.dilation, self.padding, depth)
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def ordered(self, weight: Tensor) -> Tensor:
        return weight[:, :, None].contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        if self.fast is not None:
            return self.fast(x)
        rows, length, channels = x.shape
        image = x.contiguous().view(rows, 1, length, channels).permute(0, 3, 1, 2)
        y = F.conv2d(image, self.weight, self.bias, (1, self.stride), (0, self.padding), (1, self.dilation))
        return y.permute(0, 2, 3, 1).squeeze(1)


class Upsample(_Weighted):
    """A transposed convolution whose kernel is a multiple of its stride, as one matrix product and a few sums.
    ``[rows, T, in]`` to ``[rows, T * rate, out]``."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, rate: int):
        super().__init__((in_channels, out_channels, kernel), out_channels, True)
        self.rate, self.parts, self.out = rate, kernel // rate, out_channels
        self.padding = (kernel - rate) // 2

    def ordered(self, weight: Tensor) -> Tensor:
        """``[kernel * out, in]``: the kernel's positions one after the other."""
        return weight.permute(2, 1, 0).reshape(-1, weight.shape[0]).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        each = F.linear(x, self.weight).view(rows, length, self.parts, self.rate * self.out)
        total = each.new_zeros(rows, length + self.parts - 1, self.rate * self.out)
        for part in range(self.parts):
            total[:, part : part + length] += each[:, :, part]
        y = total.view(rows, -1, self.out)[:, self.padding : self.padding + length * self.rate]
        return y if self.bias is None else y + self.bias


class BiLSTM(nn.Module):
    """One layer of LSTM in both directions, under the names of ``torch.nn.LSTM``. ``[rows, T, in]`` and int64
    ``[rows]`` lengths to ``[rows, T, 2 * hidden]``, zero beyond the lengths.

    The backward direction begins at each row's own end: rows are turned around within their lengths, which a captured
    graph can do too.
    """

    def __init__(self, in_features: int, hidden: int):
        super().__init__()
        self.hidden = hidden
        for suffix in ("", "_reverse"):
            for kind, shape in (("ih", (4 * hidden, in_features)), ("hh", (4 * hidden, hidden))):
                self.register_parameter(f"weight_{kind}_l0{suffix}", nn.Parameter(torch.empty(shape)))
                self.register_parameter(f"bias_{kind}_l0{suffix}", nn.Parameter(torch.empty(4 * hidden)))

    def settle(self, dtype: torch.dtype) -> None:
        """On a GPU, put each direction's weights side by side, as cuDNN reads them: else it would do so in every call.
        Once, after loading; *dtype* is for convolutions."""
        for suffix in ("", "_reverse"):
            weights = self._weights(suffix)
            features = weights[0].shape[1]
            if weights[0].is_cuda and torch.backends.cudnn.is_acceptable(weights[0]):  # type: ignore[no-untyped-call]
                mode = torch.backends.cudnn.rnn.get_cudnn_mode("LSTM")  # type: ignore[no-untyped-call]
                with torch.no_grad():  # their storages become parts of one
                    torch._cudnn_rnn_flatten_weight(
                        weights, len(weights), features, mode, self.hidden, 0, 1, True, False
                    )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        turned = lengths[:, None] - 1 - places
        turned = torch.where(turned < 0, places, turned)[:, :, None]
        forward = self._run(x, "")
        backward = self._run(x.gather(1, turned.expand_as(x)), "_reverse")
        both = torch.cat([forward, backward.gather(1, turned.expand_as(backward))], 2)
        return keep(both, lengths)

    def _weights(self, suffix: str) -> list[Tensor]:
        return [getattr(self, f"{kind}_l0{suffix}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]

    def _run(self, x: Tensor, suffix: str) -> Tensor:
        start = x.new_zeros(1, x.shape[0], self.hidden)
        out: Tensor = torch.lstm(x, (start, start), self._weights(suffix), True, 1, 0.0, False, False, True)[0]
        return out

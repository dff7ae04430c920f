"""The 12 Hz codec's decoder: sixteen codes a frame to sound, piece by piece.

Everything in it is causal, so it runs as a stream: :class:`DecoderState` has what the frames before have left behind
(keys and values of the transformer's window, the ends of the convolutions' inputs), and pieces of any sizes come out as
the whole would have.

Reference: ``qwen_tts`` 0.1.1, ``tokenizer_12hz/modeling_qwen3_tts_tokenizer_v2.py``; its ``chunked_decode`` recomputes
25 frames before each 300 instead, which is the same for the first 300 alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor, nn

from mstar.nn.linear import Linear
from mstar.nn.norm import RMSNorm
from mstar_tts.codec_blocks import Carry, CausalConv, CausalUpsample, SnakeBeta, carried
from mstar_tts.qwen3_tts.codec_config import DecoderConfig, TransformerConfig
from mstar_tts.qwen3_tts.codec_quantizer import SplitQuantizer
from mstar_tts.qwen3_tts.codec_transformer import DecoderLayer, rotary, window_mask

__all__ = ["CodecDecoder", "DecoderState"]


@dataclass(frozen=True)
class DecoderState:
    """What frames have left behind, a row each; all zeros before the first.

    :param done: how many there were, int64 ``[rows]``. :param lead: of the convolution before the transformer,
        ``[rows, …]``. :param kv: ``[rows, layers, 2, window - 1, kv_heads, head_dim]``. :param tail: of all
        convolutions behind it.
    """

    done: Tensor
    lead: Tensor
    kv: Tensor
    tail: Tensor


class _Transformer(nn.Module):
    def __init__(self, config: TransformerConfig, latent: int):
        super().__init__()
        assert config.window is not None
        self.window = config.window
        self.input_proj = Linear(latent, config.hidden, bias=True)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.output_proj = Linear(config.hidden, latent, bias=True)
        self.rotary = rotary(config)

    def forward(self, x: Tensor, done: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """*x* ``[rows, T, latent]``. Returns the same and the *past* of the next piece."""
        mask = window_mask(self.rotary, done, x.shape[1], self.window, x.dtype)
        x, kept = self.input_proj(x), []
        for index, layer in enumerate(self.layers):
            x, kv = layer(x, mask, past[:, index])
            kept.append(kv[:, :, kv.shape[2] - (self.window - 1) :])
        normed: Tensor = self.norm(x.flatten(0, 1))
        out: Tensor = self.output_proj(normed.view_as(x))
        return out, torch.stack(kept, 1).to(past.dtype)


class _ConvNeXt(nn.Module):
    """Depthwise convolution and two linear layers (Liu et al. 2022)."""

    def __init__(self, channels: int):
        super().__init__()
        self.dwconv = CausalConv(channels, channels, 7, groups=channels)
        self.norm = nn.LayerNorm(channels, 1e-6)
        self.pwconv1 = Linear(channels, 4 * channels, bias=True)
        self.pwconv2 = Linear(4 * channels, channels, bias=True)
        self.gamma = nn.Parameter(torch.ones(channels), requires_grad=False)

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        y: Tensor = self.norm(self.dwconv(x, carry).transpose(1, 2))
        y = self.pwconv2(nn.functional.gelu(self.pwconv1(y))) * self.gamma
        return x + y.transpose(1, 2)


class _Unit(nn.Module):
    def __init__(self, channels: int, dilation: int):
        super().__init__()
        self.act1, self.act2 = SnakeBeta(channels), SnakeBeta(channels)
        self.conv1 = CausalConv(channels, channels, 7, dilation=dilation)
        self.conv2 = CausalConv(channels, channels, 1)

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        y: Tensor = self.conv2(self.act2(self.conv1(self.act1(x), carry)), carry)
        return x + y


class _Block(nn.Module):
    """Half the channels, *rate* times the items."""

    def __init__(self, channels: int, rate: int):
        super().__init__()
        units = (_Unit(channels // 2, dilation) for dilation in (1, 3, 9))
        self.block = nn.ModuleList(
            [SnakeBeta(channels), CausalUpsample(channels, channels // 2, 2 * rate, rate), *units]
        )

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        activation, upsample, *units = self.block
        x = upsample(activation(x), carry)
        for unit in units:
            x = unit(x, carry)
        return x


class CodecDecoder(nn.Module):
    """``decoder`` of the published codec. :func:`~mstar_tts.codec_blocks.settle` it when its weights are in."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        latent, channels = config.latent, config.channels
        self.quantizer = SplitQuantizer(config.codebook, config.codebooks, config.width)
        self.pre_conv = CausalConv(config.width, latent, 3)
        self.pre_transformer = _Transformer(config.transformer, latent)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalUpsample(latent, latent, rate, rate), _ConvNeXt(latent)]) for rate in config.repeats
        )
        blocks = (_Block(channels // 2**index, rate) for index, rate in enumerate(config.rates))
        narrow = channels // 2 ** len(config.rates)
        self.decoder = nn.ModuleList(
            [CausalConv(latent, channels, 7), *blocks, SnakeBeta(narrow), CausalConv(narrow, 1, 7)]
        )

    def begin(self, rows: int, device: torch.device, dtype: torch.dtype) -> DecoderState:
        """The state before *rows* first frames."""
        shapes = self.state_shapes(self.config)
        floats = {name: torch.zeros(rows, *shape, device=device, dtype=dtype) for name, shape in shapes.items()}
        return DecoderState(done=torch.zeros(rows, dtype=torch.int64, device=device), **floats)

    @staticmethod
    def state_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Of one row's state, but for the count."""
        with torch.device("meta"):
            decoder = CodecDecoder(config)
        inner = config.transformer
        lead = carried(decoder.pre_conv)
        assert inner.window is not None
        return {
            "lead": (lead,),
            "kv": (inner.layers, 2, inner.window - 1, inner.kv_heads, inner.head_dim),
            "tail": (carried(decoder) - lead,),
        }

    def forward(self, codes: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """*codes*: integers ``[rows, C, codebooks]``; those that no codebook has count as the nearest that it has.
        Returns samples ``[rows, C * frame_samples]`` in -1…1 and the state behind them."""
        latent, done, lead, kv = self._latent(codes, state)
        carry = Carry(state.tail)
        sound = self._sound(latent, carry)
        return sound, DecoderState(done, lead, kv, carry.state(state.tail))

    def prime(self, codes: Tensor, state: DecoderState) -> DecoderState:
        """The state behind *codes* ``[rows, R, codebooks]``, whose sound nobody wants: convolutions run over as many
        frames as reach beyond the last."""
        latent, done, lead, kv = self._latent(codes, state)
        reach = self.reach()
        short = latent.shape[2] <= reach
        carry = Carry(state.tail if short else None)
        self._sound(latent if short else latent[:, :, -reach:], carry)
        return DecoderState(done, lead, kv, carry.state(state.tail))

    def reach(self) -> int:
        """Frames before one on which its sound depends through the convolutions behind the transformer."""
        frames, rate = 0.0, 1
        for part in [*self.upsample.modules(), *self.decoder.modules()]:
            if isinstance(part, CausalConv):
                frames += part.context / rate
            elif isinstance(part, CausalUpsample):
                frames += part.context / rate
                rate *= part.rate
        return ceil(frames)

    def _latent(self, codes: Tensor, state: DecoderState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What goes into the upsampling ``[rows, latent, C]``, and the state behind it but for its tail."""
        carry = Carry(state.lead)
        x = self.pre_conv(self.quantizer(codes).transpose(1, 2), carry)
        x, kv = self.pre_transformer(x.transpose(1, 2), state.done, state.kv)
        return x.transpose(1, 2), state.done + codes.shape[1], carry.state(state.lead), kv

    def _sound(self, x: Tensor, carry: Carry) -> Tensor:
        for pair in self.upsample:
            upsample, block = pair  # type: ignore[misc]
            x = block(upsample(x, carry), carry)  # type: ignore[has-type]
        first, *blocks, activation, last = self.decoder
        x = first(x, carry)
        for block in blocks:
            x = block(x, carry)
        y: Tensor = last(activation(x), carry)
        return y[:, 0].clamp(-1, 1)

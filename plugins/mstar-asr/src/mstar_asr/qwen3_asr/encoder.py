"""Qwen3-ASR's audio encoder: 13 embeddings for each second of sound.

Source: ``Qwen3ASREncoder`` and ``Qwen3ASRMultiModalProjector`` of transformers 5.24, which attend within windows of 8 s
as the authors' FlashAttention path does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.linear import ColumnLinear, QKVLinear, RowLinear
from mstar.nn.node import Node, Packed, Step
from mstar.nn.norm import LayerNorm
from mstar_asr.qwen3_asr.config import AudioConfig, audio_tokens
from mstar_asr.qwen3_asr.sound import SHORTEST
from mstar_asr.whisper.features import LogMel
from mstar_asr.whisper.request import CONTEXT, HOP

__all__ = ["AudioEncoder"]

_AT_ONCE = 128
"""Seconds that go through the convolutions together: their first output takes 3 MB a second in the largest model."""

_FLOOR = 8.0
_QUIETEST = 10.0
"""No band is below -10: the state that remembers the loudest begins at 0, which stands for that."""


class _Attention(nn.Module):
    """Full attention within given segments."""

    def __init__(self, config: AudioConfig):
        super().__init__()
        self.heads, self.head_dim = config.heads, config.hidden // config.heads
        self.qkv_proj = QKVLinear(config.hidden, config.heads, config.heads, self.head_dim, bias=True)
        self.out_proj = RowLinear(config.hidden, config.hidden, bias=True)

    def beside(self, x: Tensor, normed: Tensor, attention: Any, segments: Sequence[int]) -> Tensor | None:
        """Add to the stream *x* ``[N, hidden]``; *segments*: their lengths, ``N`` in all. See :class:`_Layer`."""
        q, k, v = self.qkv_proj(normed).view(x.shape[0], 3, self.heads, self.head_dim).unbind(1)
        return self.out_proj.add_to(x, attention.attend(q, k, v, lengths=segments).flatten(1))


class _Layer(nn.Module):
    """Blocks beside the stream. What a block adds to it is handed on as *delta* and added within the next norm, or was
    added by its last product (:meth:`mstar.nn.linear.Linear.add_to`), and there is no *delta*."""

    def __init__(self, config: AudioConfig):
        super().__init__()
        self.self_attn_layer_norm = LayerNorm(config.hidden)
        self.self_attn = _Attention(config)
        self.final_layer_norm = LayerNorm(config.hidden)
        self.fc1 = ColumnLinear(config.hidden, config.ffn, bias=True)
        self.fc2 = RowLinear(config.ffn, config.hidden, bias=True)

    def forward(self, x: Tensor, delta: Tensor | None, attention: Any, segments: Sequence[int]) -> Tensor | None:
        """*x*: the stream ``[N, hidden]``, changed in place."""
        delta = self.self_attn.beside(x, self.self_attn_layer_norm(x, delta), attention, segments)
        delta = self.fc2.add_to(x, F.gelu(self.fc1(self.final_layer_norm(x, delta))))
        if x.dtype is torch.float16:  # the reference keeps its stream in range so
            limit = torch.finfo(x.dtype).max - 1000
            (x if delta is None else x.add_(delta)).clamp_(-limit, limit)
            return None
        return delta


class AudioEncoder(Node):
    """The spectrogram of each second goes through three convolutions by itself, that of all requests in one batch. What
    they leave is one sequence for the layers, which attend within windows of 8 s, counted from each clip's start.

    Sound comes in the rows of :mod:`mstar_asr.qwen3_asr.sound`.

    :param step: seconds that come at a time of a live clip.
    """

    positions: Tensor

    def __init__(self, config: AudioConfig, step: int):
        super().__init__()
        self.config, self.step = config, step
        self.log_mel = LogMel(config.mels)
        channels = config.channels
        self.conv2d1 = nn.Conv2d(1, channels, 3, 2, padding=1)
        self.conv2d2 = nn.Conv2d(channels, channels, 3, 2, padding=1)
        self.conv2d3 = nn.Conv2d(channels, channels, 3, 2, padding=1)
        bands = audio_tokens(config.mels, config.mels)
        self.conv_out = RowLinear(channels * bands, config.hidden)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.ln_post = LayerNorm(config.hidden)
        self.proj1 = ColumnLinear(config.hidden, config.hidden, bias=True)
        self.proj2 = RowLinear(config.hidden, config.width, bias=True)
        self.tokens = audio_tokens(config.second, config.second)
        self.register_buffer("positions", torch.empty(self.tokens, config.hidden), persistent=False)

    def compute_buffers(self, device: torch.device) -> dict[str, Tensor]:
        """Sinusoids as Whisper's: all sines, then all cosines. Each second begins anew."""
        half = self.config.hidden // 2
        rates = torch.exp(-math.log(10_000) / (half - 1) * torch.arange(half, device=device).float())
        angles = torch.arange(self.tokens, device=device)[:, None] * rates
        return {"positions": torch.cat((angles.sin(), angles.cos()), 1)}

    # --- entries ------------------------------------------------------------------------------------------------------
    def forward(self, step: Step, sound: Tensor) -> dict[str, Packed]:
        """Entry ``forward``. *sound*: float32 ``[seconds of all clips, row]``. Returns ``media`` ``[N, width]``."""
        frames = sound[:, 0].long()
        bands = self.energies(sound, frames)
        clips = torch.arange(step.rows, device=sound.device).repeat_interleave(_on(sound, step.lengths))
        top = bands.new_full((step.rows,), -_QUIETEST).scatter_reduce(0, clips, bands.amax((1, 2)), "amax")
        return {"media": self.encode(step, bands, frames, top[clips], step.lengths)}

    def listen(self, step: Step, seconds: Tensor, samples: Packed, left: Tensor, last: Tensor) -> dict[str, Packed]:
        """Entry ``listen``: the window that a live clip is in, as far as it goes.

        The floor of the spectrogram is 8 below the loudest so far: a window that is complete stays as it is, whatever
        comes later.

        :param seconds: int64 ``[S]``: an item for each second of the window, those that come now included.
        :param samples: of all clips: new ones, and before them such that were heard before; 200 samples beyond
            the seconds, unless there are no more. :param left: int64 ``[rows]``: how many were heard before.
        :param last: bool ``[rows]``: there are no more.
        :returns: ``media`` ``[N, width]``.
        """
        rows = [
            self.window_rows(part, before, length, ended)
            for part, before, length, ended in zip(
                torch.split(samples.data, list(samples.lengths)),
                left.tolist(),
                step.lengths,
                last.tolist(),
                strict=True,
            )
        ]
        lengths, sound = [len(part) for part in rows], torch.cat(rows)
        frames = sound[:, 0].long()
        bands = self.energies(sound, frames)
        clips = torch.arange(step.rows, device=sound.device).repeat_interleave(_on(sound, lengths))
        before = step["loudest"].read("level")[:, 0] - _QUIETEST
        top = before.scatter_reduce(0, clips, bands.amax((1, 2)), "amax")
        step["loudest"].write("level", (top + _QUIETEST)[:, None])
        return {"media": self.encode(step, bands, frames, top[clips], lengths)}

    def window_rows(self, samples: Tensor, left: int, seconds: int, last: bool) -> Tensor:
        """The rows of a live clip's window, as :func:`mstar_asr.qwen3_asr.sound.sound_rows` makes them of a whole clip.

        :param samples: one clip's part of :meth:`listen`'s.
        """
        size, each = self.config.second * HOP, self.step
        # what was heard of the window before, with the samples ahead of it
        start = left - ((seconds - each) * size + CONTEXT) if left else 0
        window, before = samples[start:], samples[max(0, start - CONTEXT) : start]
        if last and not left and len(window) < SHORTEST:
            window = F.pad(window, (0, SHORTEST - len(window)))
        total = len(window) // HOP if last else seconds * self.config.second
        if last:
            known = torch.cat((before, window))
            window = torch.cat((window, known[-CONTEXT - 1 : -1].flip(0)))
        if not start:
            before = window[1 : CONTEXT + 1].flip(0)
        count = -(-total // self.config.second)
        known = torch.cat((before, window))[: count * size + 2 * CONTEXT]
        known = F.pad(known, (0, count * size + 2 * CONTEXT - len(known)))
        frames = (total - self.config.second * torch.arange(count, device=known.device)).clamp(max=self.config.second)
        rows = known.unfold(0, size + 2 * CONTEXT, size)[:count]
        return torch.cat((frames[:, None].to(rows.dtype), rows), 1)

    # --- the parts ----------------------------------------------------------------------------------------------------
    def energies(self, sound: Tensor, frames: Tensor) -> Tensor:
        """log10 of the mel bands, float32 ``[seconds, frames, mels]``; -inf where a frame does not count."""
        bands = self.log_mel.energies(sound[:, 1:])
        places = torch.arange(bands.shape[1], device=bands.device)
        return bands.masked_fill_((places >= frames[:, None])[:, :, None], -math.inf)

    def encode(self, step: Step, bands: Tensor, frames: Tensor, top: Tensor, lengths: Sequence[int]) -> Packed:
        """:param bands: what :meth:`energies` gave. :param top: the loudest of each second's clip, ``[seconds]``.
        :param lengths: seconds of each clip."""
        mel = (torch.maximum(bands, (top - _FLOOR)[:, None, None]) + 4.0) / 4.0
        # 0 behind the end of a clip, which is neither its floor nor silence
        mel = mel.masked_fill_(bands.isneginf(), 0.0).transpose(1, 2)[:, None]
        counts = [audio_tokens(count, self.config.second) for count in frames.tolist()]
        x = torch.cat([self.convolved(part) for part in torch.split(mel, _AT_ONCE)])
        places = torch.arange(self.tokens, device=x.device)
        x = x[places < _on(x, counts)[:, None]]
        segments, clips = self.segments(counts, lengths)
        delta: Tensor | None = None
        for layer in self.layers:
            delta = layer(x, delta, step["encoder_attention"], segments)
        x = self.proj2(F.gelu(self.proj1(self.ln_post(x, delta))))
        return Packed(x, clips)

    def convolved(self, mel: Tensor) -> Tensor:
        """*mel* float32 ``[seconds, 1, mels, frames]`` → ``[seconds, tokens, hidden]``."""
        x = mel.to(self.conv2d1.weight.dtype)
        for convolution in (self.conv2d1, self.conv2d2, self.conv2d3):
            x = F.gelu(convolution(x))
        x = self.conv_out(x.permute(0, 3, 1, 2).flatten(2))
        return x + self.positions.to(x.dtype)  # type: ignore[no-any-return]

    def segments(self, counts: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
        """Lengths in embeddings of all windows, and of all clips. *counts*: embeddings of each second."""
        windows, clips, at = [], [], 0
        for length in lengths:
            own = counts[at : at + length]
            at += length
            clips.append(sum(own))
            windows += [sum(own[i : i + self.config.window]) for i in range(0, length, self.config.window)]
        return [window for window in windows if window], clips


def _on(like: Tensor, numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, device=like.device)

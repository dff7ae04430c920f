"""The two halves of Kokoro as nodes: texts to durations and features, frames to sound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from mstar.nn.linear import Linear
from mstar.nn.node import Node, Step
from mstar_tts.kokoro.adaptive import SnakeBlock, StyleBlock
from mstar_tts.kokoro.buckets import bucket
from mstar_tts.kokoro.config import KokoroConfig
from mstar_tts.kokoro.plbert import PLBert
from mstar_tts.kokoro.prosody import Durations, PitchAndEnergy, align
from mstar_tts.kokoro.text_encoder import TextEncoder
from mstar_tts.kokoro.vocoder import HARMONICS, Vocoder
from mstar_tts.noise import normal

__all__ = ["FrameHalf", "TextHalf"]


def _settle(node: Node, dtypes: dict[str, torch.dtype]) -> None:
    """Multiply all weight norms out; convolutions under a prefix in *dtypes* get its dtype."""
    for name, module in node.named_modules():
        if hasattr(module, "settle"):
            module.settle(next((kind for prefix, kind in dtypes.items() if name.startswith(prefix)), torch.float32))


class TextHalf(Node):
    """Phonemes to durations and features, and features spread over frames.

    :param buckets: numbers of frames that rows are padded to. :param together: rows of a step are padded to the largest
        one's instead of each to its own.
    """

    def __init__(self, config: KokoroConfig, buckets: Sequence[int], together: bool):
        super().__init__()
        self.buckets, self.together, self.style = buckets, together, config.style
        self.bert = PLBert(config.albert, config.tokens)
        self.bert_encoder = Linear(config.albert.hidden, config.hidden, bias=True)
        self.predictor = Durations(config.hidden, config.style, config.layers, config.max_duration)
        self.text_encoder = TextEncoder(config.hidden, config.kernel, config.layers, config.tokens)

    def multiply_out(self) -> None:
        """Once the published weights are in: compute from them what is used instead."""
        _settle(self, {})

    def forward(self, step: Step, ids: Tensor, length: Tensor, style: Tensor, speed: Tensor) -> dict[str, Tensor]:
        """*ids* ``[rows, T]``, of which ``length`` are phonemes or marks; *style* ``[rows, 2 * style]``; *speed*
        ``[rows]``. Returns `durations` in frames, int64 ``[rows, T]``, and per phoneme `prosody` and `text`."""
        valid = torch.arange(ids.shape[1], device=ids.device) < length[:, None]
        encoded = self.bert_encoder(self.bert(ids, valid))
        prosody, durations = self.predictor(encoded, style[:, self.style :], speed, length)
        return {"durations": durations, "prosody": prosody, "text": self.text_encoder(ids, length)}

    def align(
        self, step: Step, durations: list[Tensor], prosody: list[Tensor], text: list[Tensor], most: Tensor
    ) -> dict[str, Tensor | list[Tensor]]:
        """Spread each row's `prosody` and `text` ``[T, channels]`` over frames, padded to a bucket: ``[F, channels]``.
        A row of more than *most* frames (int64 ``[rows]``) ends there: `frames` int64 ``[rows]``.

        How many frames there are decides shapes, so the host waits for it here, and nowhere else.
        """
        ends = [torch.minimum(row.cumsum(0), limit) for row, limit in zip(durations, most, strict=True)]
        frames = torch.stack([end[-1] for end in ends])
        counts = frames.tolist()
        lengths = [bucket(count, self.buckets) for count in counts]
        if self.together:
            lengths = [max(lengths)] * len(lengths)
        heard = [end.diff(prepend=end.new_zeros(1)) for end in ends]
        spread = [
            [align(*row) for row in zip(features, heard, counts, lengths, strict=True)] for features in (prosody, text)
        ]
        return {"prosody_frames": spread[0], "text_frames": spread[1], "frames": frames}


class FrameHalf(Node):
    """Frames to sound.

    :param most_frames: frames, padding included, that are computed at once; a step of more is computed in parts.
    :param dtype: of the decoder's convolutions. :param compiled: whether ``engine.compile`` takes its blocks.
    """

    def __init__(self, config: KokoroConfig, most_frames: int, dtype: torch.dtype, compiled: bool):
        super().__init__()
        self.most_frames, self.dtype, self.compiled = most_frames, dtype, compiled
        self.style, self.frame_samples = config.style, config.frame_samples
        self.predictor = PitchAndEnergy(config.hidden, config.style)
        self.decoder = Vocoder(config.vocoder, config.hidden, config.style)

    def multiply_out(self) -> None:
        """As :meth:`TextHalf.multiply_out`."""
        _settle(self, {"decoder.": self.dtype})

    def regions(self) -> Iterator[tuple[str, nn.Module]]:
        """The residual blocks. On a CPU they run kernels that a compiler cannot look into."""
        if self.compiled and self.decoder.F0_conv.weight.device.type != "cpu":
            blocks = (StyleBlock, SnakeBlock)
            yield from ((name, module) for name, module in self.named_modules() if isinstance(module, blocks))

    def forward(
        self, step: Step, prosody: Tensor, text: Tensor, frames: Tensor, style: Tensor, noise_key: Tensor
    ) -> dict[str, Tensor]:
        """*prosody* and *text* ``[rows, F, channels]``, of which ``frames`` are valid. Returns `samples` float32
        ``[rows, F * samples a frame]``; those beyond a row's frames mean nothing."""
        at_once = max(1, self.most_frames // prosody.shape[1])
        inputs = (prosody, text, frames, style, noise_key)
        parts = [self._speak(*(value[i : i + at_once] for value in inputs)) for i in range(0, len(frames), at_once)]
        return {"samples": parts[0] if len(parts) == 1 else torch.cat(parts)}

    def _speak(self, prosody: Tensor, text: Tensor, frames: Tensor, style: Tensor, noise_key: Tensor) -> Tensor:
        padded = prosody.shape[1]
        if prosody.device.type == "cpu":  # the lengths are known here, and nothing is captured
            longest = int(frames.max())
            prosody, text = prosody[:, :longest], text[:, :longest]
        samples = prosody.shape[1] * self.frame_samples
        noise = normal(noise_key, HARMONICS * samples).view(-1, samples, HARMONICS).transpose(1, 2)
        f0, energy = self.predictor(prosody, style[:, self.style :], frames)
        sound: Tensor = self.decoder(text, f0, energy, style[:, : self.style], noise, frames)
        return nn.functional.pad(sound, (0, padded * self.frame_samples - samples))

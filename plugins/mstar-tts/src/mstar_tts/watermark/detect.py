"""Whether files of sound carry a mark: what ``python -m mstar_tts.watermark detect`` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mstar.processing.resampling import resample
from mstar.spec.errors import SetupError
from mstar.weights.loader import load
from mstar_tts.watermark.audioseal import Detector, audioseal_sizes, audioseal_weights

__all__ = ["RATE", "Found", "Listener"]

RATE = 24_000
"""The rate at which marks are made, and at which alone they are found."""

_SURE = 0.5


@dataclass(frozen=True)
class Found:
    """*score*: share of the samples that seem to be marked, 0 to 1. *bits*: the most likely message."""

    score: float
    bits: tuple[int, ...]

    def verdict(self, threshold: float, message: Sequence[int] | None) -> bool:
        """Whether *score* is above *threshold*, and the message that which is wanted, if one is. Of an unmarked sound
        the score alone may be high after lossy compression."""
        return self.score > threshold and (message is None or tuple(message) == self.bits)


class Listener:
    """AudioSeal's detector.

    :param file: ``detector_streaming.pth`` of facebook/audioseal, or a folder that holds it.
    """

    def __init__(self, file: Path, device: torch.device | str = "cpu"):
        self._device = torch.device(device)
        with torch.device("meta"):
            self._detector = Detector(audioseal_sizes(file))
        load(self._detector, audioseal_weights(self._detector, file), Path("/"), self._device, torch.float32)
        self._detector.settle()

    @torch.inference_mode()
    def hear(self, samples: np.ndarray, rate: int) -> Found:
        """*samples*: float32 ``[samples]`` or ``[samples, channels]`` at *rate* Hz. A few seconds at least: of a short
        sound the mark may be missed."""
        mono = samples if samples.ndim == 1 else samples.mean(1)
        sound = torch.from_numpy(resample(mono, rate, RATE)).to(self._device)
        sure, bits = self._detector(sound[None])
        score = float((sure[0] > _SURE).float().mean())
        return Found(score, tuple(int(bit) for bit in (bits[0] > _SURE).tolist()))

    def hear_file(self, file: Path) -> Found:
        """As :meth:`hear`.

        :raises SetupError: the file cannot be read as sound.
        """
        import soundfile

        try:
            samples, rate = soundfile.read(file, dtype="float32")
        except (OSError, soundfile.LibsndfileError) as error:
            raise SetupError(f"{file} cannot be read as sound: {error}") from error
        if not len(samples):
            raise SetupError(f"{file} has no sound in it")
        return self.hear(samples, rate)

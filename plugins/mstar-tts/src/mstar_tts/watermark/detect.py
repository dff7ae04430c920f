"""Whether files of sound carry a mark: what ``python -m mstar_tts.watermark detect`` does."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mstar.processing.resampling import resample
from mstar.spec.errors import SetupError
from mstar.weights.loader import load
from mstar_tts.watermark.audioseal import Detector, audioseal_sizes, audioseal_weights
from mstar_tts.watermark.perth import PerthDetector, installed_perth, perth_weights

__all__ = ["RATE", "AudioSealListener", "Found", "Listener", "PerthListener"]

RATE = 24_000
"""The rate at which AudioSeal's marks are made, and at which alone they are found."""

_SURE = 0.5


@dataclass(frozen=True)
class Found:
    """*score*: how sure the detector is, 0 to 1: of AudioSeal the share of the samples that seem to be marked.
    *bits*: the most likely message, of marks that carry one."""

    score: float
    bits: tuple[int, ...] = ()

    def verdict(self, threshold: float, message: Sequence[int] | None) -> bool:
        """Whether *score* is above *threshold*, and the message that which is wanted, if one is. Of an unmarked sound
        the score alone may be high after lossy compression."""
        return self.score > threshold and (message is None or tuple(message) == self.bits)


class Listener(abc.ABC):
    """A detector. Of a short sound it may miss the mark: give it a few seconds at least."""

    @abc.abstractmethod
    def hear(self, samples: np.ndarray, rate: int) -> Found:
        """*samples*: float32 ``[samples]`` at *rate* Hz."""

    def hear_file(self, file: Path) -> Found:
        """As :meth:`hear`, of a file's channels together.

        :raises SetupError: the file cannot be read as sound.
        """
        import soundfile

        try:
            with file.open("rb") as content:  # the library calls a file that is not there a "System error"
                samples, rate = soundfile.read(content, dtype="float32", always_2d=True)
        except OSError as error:
            raise SetupError(f"{file}: {error.strerror or error}") from error
        except soundfile.LibsndfileError as error:
            raise SetupError(f"{file} cannot be read as sound: {error}") from error
        if len(samples) < rate // 2:
            raise SetupError(f"{file} has {len(samples) / rate:.2f} s of sound, which is too little to find a mark in")
        return self.hear(samples.mean(1), rate)


class AudioSealListener(Listener):
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
        sound = torch.from_numpy(resample(samples, rate, RATE)).to(self._device)
        sure, bits = self._detector(sound[None])
        score = float((sure[0] > _SURE).float().mean())
        return Found(score, tuple(int(bit) for bit in (bits[0] > _SURE).tolist()))


class PerthListener(Listener):
    """PerTh's detector.

    :param file: its weights; default: those of the package that is installed.
    """

    def __init__(self, file: Path | None, device: torch.device | str = "cpu"):
        self._device = torch.device(device)
        with torch.device("meta"):
            self._detector = PerthDetector()
        weights = perth_weights(self._detector, file or installed_perth())
        load(self._detector, weights, Path("/"), self._device, torch.float32)

    @torch.inference_mode()
    def hear(self, samples: np.ndarray, rate: int) -> Found:
        sound = torch.from_numpy(resample(samples, rate, RATE)).to(self._device)
        return Found(float(self._detector(sound[None], RATE)[0]))

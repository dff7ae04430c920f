"""Where somebody speaks: Silero's voice detector (16 kHz), recomputed in numpy.

The weights are those of the package ``silero-vad`` 6 (MIT), which the extra ``vad`` brings: its file
``silero_vad_16k.safetensors``. Nothing of the package is imported. Reference: its ``tinygrad_model.py``.

A frame is 512 samples, heard with 64 samples before it: a spectrogram of four columns, four convolutions over it, and
an LSTM over the frames.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np

from mstar.processing.speech.windows import Levels
from mstar.spec.errors import SetupError

__all__ = ["FRAME", "RATE", "VoiceDetector", "silero", "voice_levels"]

RATE = 16_000
FRAME = 512
_CONTEXT = 64
_REFLECTED = 64
_FFT, _STRIDE = 256, 128
_AT_ONCE = 1024
"""Frames whose spectrograms are computed together: 33 s, some 10 MB."""

_FILE = "silero_vad_16k.safetensors"
_SPEECH = 0.4
"""Tones, hum, clicks and noise of any colour stay below. Speech does for moments, but no word does from end to end."""


class VoiceDetector:
    """:param file: the weights. Thread-safe: a call keeps its state to itself."""

    def __init__(self, file: Path):
        from safetensors.numpy import load_file

        weights = {name: np.asarray(value, dtype=np.float32) for name, value in load_file(str(file)).items()}
        self._spectrum = weights["stft_conv.weight"][:, 0].T.copy()  # [256, 258]: cosines, then sines
        layers = ((1, 1), (2, 2), (3, 2), (4, 1))
        self._convolutions = [(weights[f"conv{i}.weight"], weights[f"conv{i}.bias"], stride) for i, stride in layers]
        self._read = weights["lstm_cell.weight_ih"].T.copy()
        self._again = weights["lstm_cell.weight_hh"].copy()
        self._bias = weights["lstm_cell.bias_ih"] + weights["lstm_cell.bias_hh"]
        self._judge, self._level = weights["final_conv.weight"].ravel(), float(weights["final_conv.bias"][0])

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """The probability of speech, one for each 512 samples (a last, shorter frame counts as one).

        :param samples: float32 ``[samples]`` at 16 kHz in -1…1. Returns float32 ``[frames]`` in 0…1.
        """
        frames = -(-len(samples) // FRAME)
        padded = np.zeros(_CONTEXT + frames * FRAME, dtype=np.float32)
        padded[_CONTEXT : _CONTEXT + len(samples)] = samples
        heard = np.lib.stride_tricks.sliding_window_view(padded, _CONTEXT + FRAME)[::FRAME] if frames else padded[:0]
        hidden, cell = np.zeros(128, dtype=np.float32), np.zeros(128, dtype=np.float32)
        states = np.empty((frames, 128), dtype=np.float32)
        for first in range(0, frames, _AT_ONCE):
            gates = self._encode(heard[first : first + _AT_ONCE]) @ self._read + self._bias
            for number, gate in enumerate(gates, first):
                hidden, cell = _lstm(gate + self._again @ hidden, cell)
                states[number] = hidden
        return _sigmoid(np.maximum(states, 0) @ self._judge + np.float32(self._level))

    def speech_s(self, samples: np.ndarray, lead: int = 0) -> float:
        """Seconds of speech in *samples* (as for a call). *lead*: samples at their beginning that are heard for context
        and do not count."""
        return float((self(samples)[lead // FRAME :] > _SPEECH).sum()) * FRAME / RATE

    def _encode(self, frames: np.ndarray) -> np.ndarray:
        """*frames* ``[n, 576]`` → ``[n, 128]``."""
        padded = np.pad(frames, ((0, 0), (0, _REFLECTED)), mode="reflect")
        columns = np.lib.stride_tricks.sliding_window_view(padded, _FFT, axis=1)[:, ::_STRIDE]
        spectrum = columns @ self._spectrum  # [n, 4, 258]
        half = spectrum.shape[-1] // 2
        x = np.sqrt(spectrum[..., :half] ** 2 + spectrum[..., half:] ** 2)
        for weight, bias, stride in self._convolutions:
            x = _convolved(x, weight, bias, stride)
        return np.asarray(x[:, 0])


def _convolved(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: int) -> np.ndarray:
    """ReLU of a convolution of width 3, padded by one. *x* ``[n, time, in]``, *weight* ``[out, in, 3]``."""
    padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
    steps = (x.shape[1] - 1) // stride + 1
    y = bias + sum(padded[:, k : k + stride * (steps - 1) + 1 : stride] @ weight[:, :, k].T for k in range(3))
    return np.asarray(np.maximum(y, 0))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * x))  # exp would overflow


def _lstm(gates: np.ndarray, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """*gates* ``[512]``: in, forget, new, out. Returns (hidden, cell)."""
    let_in, keep, new, out = gates[:128], gates[128:256], gates[256:384], gates[384:]
    cell = _sigmoid(keep) * cell + _sigmoid(let_in) * np.tanh(new)
    return _sigmoid(out) * np.tanh(cell), cell


@cache
def silero() -> VoiceDetector | None:
    """The detector with the weights of the installed package; ``None`` without the package."""
    found = importlib.util.find_spec("silero_vad")
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).parent / "data" / _FILE
    if not file.is_file():
        raise SetupError(f"{file} is missing: this silero-vad is none of version 6 (pip install 'mstar-core[vad]')")
    return VoiceDetector(file)


def voice_levels(detector: VoiceDetector) -> Levels:
    """What is quiet, for :class:`~mstar.processing.speech.windows.WindowPolicy`: where *detector* hears no voice."""

    def levels(samples: np.ndarray, rate: int) -> tuple[np.ndarray, int]:
        if rate != RATE:
            raise ValueError(f"the voice detector hears {RATE} Hz, not {rate}")
        return detector(samples), FRAME

    return levels

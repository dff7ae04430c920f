"""The log-mel spectrogram that Whisper hears.

Source: ``WhisperFeatureExtractor`` of transformers 5.24 and ``log_mel_spectrogram`` of OpenAI's whisper 20250625:
frames of 400 samples every 160 under a periodic Hann window, power spectrum, Slaney's mel bands up to 8 kHz, log10 of
at least 1e-10, a floor 8 below the clip's maximum, then ``(x + 4) / 4``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar_asr.whisper.request import CONTEXT, HOP
from mstar_asr.whisper.spectrum import mel_filters

__all__ = ["LogMel"]

_FFT = 2 * CONTEXT
_FLOOR = 8.0
_LEAST = 1e-10


class LogMel(nn.Module):
    """Windows of samples to what the encoder reads; float32 whatever the model's dtype is."""

    window: Tensor
    filters: Tensor

    def __init__(self, mels: int):
        super().__init__()
        self.mels = mels
        self.register_buffer("window", torch.empty(_FFT), persistent=False)
        self.register_buffer("filters", torch.empty(_FFT // 2 + 1, mels), persistent=False)

    def compute_buffers(self, device: torch.device) -> dict[str, Tensor]:
        return {
            "window": torch.hann_window(_FFT, device=device),
            "filters": torch.from_numpy(mel_filters(self.mels).T.copy()).to(device),
        }

    @classmethod
    def ready(cls, mels: int) -> LogMel:
        """One on the CPU that works by itself, for the API side."""
        log_mel = cls(mels)
        for name, buffer in log_mel.compute_buffers(torch.device("cpu")).items():
            setattr(log_mel, name, buffer)
        return log_mel

    def energies(self, samples: Tensor) -> Tensor:
        """*samples* float32 ``[..., CONTEXT + n + CONTEXT]`` → log10 of the mel bands, ``[..., n // HOP, mels]``."""
        frames = samples.unfold(-1, _FFT, HOP)[..., : (samples.shape[-1] - _FFT) // HOP, :] * self.window
        spectrum = torch.view_as_real(torch.fft.rfft(frames))
        power = spectrum.square().sum(-1)
        return (power @ self.filters).clamp_(min=_LEAST).log10_()

    def forward(self, samples: Tensor, frames: Tensor, loudest: Tensor) -> Tensor:
        """The inputs of :mod:`mstar_asr.whisper.request`, a window a row: *samples* float32
        ``[rows, WINDOW + 2 * CONTEXT]``, *frames* int64 ``[rows, 1]``, *loudest* float32 ``[rows, 1]``.

        :returns: float32 ``[rows, mels, FRAMES]``.
        """
        bands = self.energies(samples)
        top = torch.where(loudest.isnan(), bands.amax((1, 2))[:, None], loudest)
        bands = (torch.maximum(bands, (top - _FLOOR)[:, :, None]) + 4.0) / 4.0
        places = torch.arange(bands.shape[1], device=bands.device)
        return bands.masked_fill_((places >= frames)[:, :, None], 0.0).transpose(1, 2)

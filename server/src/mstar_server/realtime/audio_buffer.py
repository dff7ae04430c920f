"""Audio on its way in and out: the formats of the protocol, and the buffer that a client fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mstar.spec.errors import RequestError, nearest
from mstar.spec.tasks import Audio
from mstar_server.media.encode.images import base64_text
from mstar_server.media.values import decode_base64

__all__ = ["FORMATS", "AudioBuffer", "AudioFormat", "LiveAudio", "OutgoingAudio", "read_format"]

_BETA = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
_RATES = {"audio/pcm": 24_000, "audio/pcmu": 8_000, "audio/pcma": 8_000}


@dataclass(frozen=True)
class AudioFormat:
    """Mono audio: ``audio/pcm`` (16 bits, little-endian, 24 kHz), ``audio/pcmu`` or ``audio/pcma`` (G.711, 8 kHz)."""

    type: str

    @property
    def rate(self) -> int:
        return _RATES[self.type]

    @property
    def beta_name(self) -> str:
        return next(name for name, kind in _BETA.items() if kind == self.type)

    def object(self) -> dict[str, Any]:
        return {"type": self.type, "rate": self.rate} if self.type == "audio/pcm" else {"type": self.type}

    def decode(self, data: bytes, param: str) -> np.ndarray:
        """float32 ``[samples]`` in -1…1."""
        if self.type != "audio/pcm":
            table = _ULAW if self.type == "audio/pcmu" else _ALAW
            return table[np.frombuffer(data, np.uint8)]
        if len(data) % 2:
            raise RequestError(f"{param!r}: {len(data)} bytes are no whole 16-bit samples", param=param)
        return np.frombuffer(data, "<i2").astype(np.float32) / 32768

    def encode(self, samples: np.ndarray) -> bytes:
        """*samples*: float ``[samples]``; what is beyond -1…1 is clipped."""
        whole = np.rint(np.clip(np.nan_to_num(samples), -1, 1) * 32767).astype(np.int32)
        if self.type == "audio/pcm":
            coded: np.ndarray = whole.astype("<i2")
        else:
            coded = _to_ulaw(whole) if self.type == "audio/pcmu" else _to_alaw(whole)
        return coded.tobytes()


FORMATS = {kind: AudioFormat(kind) for kind in _RATES}


def read_format(value: Any, param: str) -> AudioFormat:
    """A format as either protocol spells it: ``{"type": "audio/pcm", "rate": 24000}`` or ``"pcm16"``."""
    kind = value.get("type") if isinstance(value, dict) else _BETA.get(value) if isinstance(value, str) else None
    if not isinstance(kind, str) or kind not in FORMATS:
        known = sorted(FORMATS) if isinstance(value, dict) else sorted(_BETA)
        shown = kind if isinstance(value, dict) else value
        raise RequestError(f"{param!r}: {str(shown)[:80]!r} is unknown{nearest(str(shown), known)}", param=param)
    found = FORMATS[kind]
    rate = value.get("rate") if isinstance(value, dict) else None
    if rate not in (None, found.rate):
        message = f"'{param}.rate': {kind} has {found.rate} samples a second, got {str(rate)[:40]}"
        raise RequestError(message, param=f"{param}.rate")
    return found


def _ulaw_table() -> np.ndarray:
    code = ~np.arange(256, dtype=np.int32) & 0xFF
    size = ((((code & 0x0F) << 3) + 0x84) << ((code >> 4) & 7)) - 0x84
    return (np.where(code & 0x80, -size, size) / 32768).astype(np.float32)


def _alaw_table() -> np.ndarray:
    code = np.arange(256, dtype=np.int32) ^ 0x55
    power, low = (code >> 4) & 7, (code & 0x0F) << 4
    size = np.where(power == 0, low + 8, (low + 0x108) << np.maximum(power - 1, 0))
    return (np.where(code & 0x80, size, -size) / 32768).astype(np.float32)


_ULAW, _ALAW = _ulaw_table(), _alaw_table()


def _to_ulaw(whole: np.ndarray) -> np.ndarray:
    size = np.minimum(np.abs(whole), 32635) + 0x84
    power = np.log2(size).astype(np.int32) - 7
    code = np.where(whole < 0, 0x80, 0) | (power << 4) | ((size >> (power + 3)) & 0x0F)
    coded: np.ndarray = (~code & 0xFF).astype(np.uint8)
    return coded


def _to_alaw(whole: np.ndarray) -> np.ndarray:
    size = np.abs(whole)
    power = np.maximum(np.log2(np.maximum(size, 1)).astype(np.int32) - 7, 0)
    low = np.where(power == 0, size >> 4, size >> (power + 3)) & 0x0F
    code = np.where(whole >= 0, 0x80, 0) | (power << 4) | low
    coded: np.ndarray = ((code ^ 0x55) & 0xFF).astype(np.uint8)
    return coded


class AudioBuffer:
    """What a client has sent and not committed. :ivar begins_at: samples that came before it.

    :param longest_s: more is refused.
    """

    def __init__(self, longest_s: float):
        self.longest_s, self.begins_at = longest_s, 0
        self._pieces: list[np.ndarray] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def read(self, text: str, kind: AudioFormat) -> np.ndarray:
        """The samples of an append, whose base64 is *text*. Raises :class:`RequestError`, also for want of room."""
        samples = kind.decode(decode_base64(text, "audio"), "audio")
        if self._size + len(samples) > self.longest_s * kind.rate:
            message = f"the buffer would hold more than {self.longest_s:g} seconds: commit or clear it"
            raise RequestError(message, param="audio", code="input_audio_buffer_full")
        return samples

    def append(self, samples: np.ndarray) -> None:
        self._pieces.append(samples)
        self._size += len(samples)

    def take(self) -> np.ndarray:
        """All of it; the buffer is empty then."""
        found = np.concatenate(self._pieces) if self._pieces else np.zeros(0, np.float32)
        self.begins_at += self._size
        self._pieces, self._size = [], 0
        return found

    def peek(self) -> np.ndarray:
        """All of it; it stays."""
        return np.concatenate(self._pieces) if self._pieces else np.zeros(0, np.float32)

    def keep(self, last: int) -> None:
        """Drop all but the last *last* samples."""
        if self._size > last:
            samples = self.take()
            kept = samples[len(samples) - last :]
            self.begins_at -= last
            self.append(kept)


class LiveAudio:
    """What a client says, at the rate of the model that hears it meanwhile. :param wanted: ``None``: any will do."""

    def __init__(self, rate: int, wanted: float | None):
        self.rate, self.seconds = rate if wanted is None else int(wanted), 0.0
        self._given = rate
        self._resampler = _resampler(rate, self.rate)

    def feed(self, samples: np.ndarray, last: bool = False) -> Audio | None:
        """*samples*: float32 ``[samples]``. What the resampler holds back comes later, at the *last* at the latest."""
        self.seconds += len(samples) / self._given
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=last)
        return Audio(samples, self.rate) if len(samples) else None


class OutgoingAudio:
    """A model's sound as base64 pieces in a client's format: mono, at the format's rate."""

    def __init__(self, kind: AudioFormat):
        self.kind, self.seconds = kind, 0.0
        self._resampler: Any = None
        self._rate = 0

    def encode(self, samples: Any, rate: int) -> str:
        """*samples*: float ``[samples]`` or ``[samples, channels]``. What the resampler holds back comes later."""
        mono = np.asarray(samples, dtype=np.float32)
        mono = mono.mean(1) if mono.ndim == 2 else mono
        self.seconds += len(mono) / rate
        if rate != self._rate:
            self._rate = rate
            self._resampler = _resampler(rate, self.kind.rate)
        if self._resampler is not None:
            mono = self._resampler.resample_chunk(mono)
        return _base64(self.kind, mono)

    def end(self) -> str:
        """What was held back; may be empty."""
        if self._resampler is None:
            return ""
        return _base64(self.kind, self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))


def _resampler(rate: int, wanted: int) -> Any:
    if rate == wanted:
        return None
    import soxr

    return soxr.ResampleStream(rate, wanted, 1, dtype="float32")


def _base64(kind: AudioFormat, samples: np.ndarray) -> str:
    return base64_text(kind.encode(samples)) if len(samples) else ""

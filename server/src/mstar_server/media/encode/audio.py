"""Sound → bytes, while it is made: WAV, bare PCM, MP3, Ogg Opus, AAC (ADTS) and FLAC."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from mstar.spec.sound import channels, pcm16, wav

__all__ = [
    "AUDIO_TYPES",
    "MPEG_RATES",
    "AudioEncoder",
    "Sink",
    "audio_encoder",
    "content_type",
    "encode_audio",
    "nearest_rate",
    "wav_header",
]

AUDIO_TYPES: Mapping[str, str] = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
}
"""Format → its media type."""

_OPEN_ENDED = 0xFFFFFFFF
MPEG_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
_CODECS: Mapping[str, tuple[str, str, tuple[int, ...]]] = {
    "mp3": ("mp3", "libmp3lame", MPEG_RATES),
    "opus": ("ogg", "libopus", (8_000, 12_000, 16_000, 24_000, 48_000)),
    "aac": ("adts", "aac", (*MPEG_RATES, 64_000, 88_200, 96_000)),
    "flac": ("flac", "flac", ()),
}
"""Format → FFmpeg's container, codec, and the rates that the codec has (none: all)."""

_LAYOUTS = {1: "mono", 2: "stereo"}


class AudioEncoder(Protocol):
    """One file. :ivar rate: of what is encoded, in Hz; not that of the samples where the codec lacks theirs."""

    rate: int

    def feed(self, samples: Any) -> bytes:
        """float32 ``[samples]`` (or ``[samples, channels]``) in -1…1 → the bytes that are ready, perhaps none."""
        ...

    def finish(self) -> bytes:
        """The rest. Nothing can be fed afterwards."""
        ...


def content_type(name: str, rate: int, channel_count: int = 1) -> str:
    """The ``Content-Type`` of format *name*; PCM, which has no header, carries its rate and channels there."""
    facts = f";rate={rate};channels={channel_count}" if name == "pcm" else ""
    return AUDIO_TYPES[name] + facts


def audio_encoder(name: str, rate: int, channel_count: int = 1, bit_rate: int | None = None) -> AudioEncoder:
    """An encoder to stream format *name* (a key of :data:`AUDIO_TYPES`) from samples at *rate* Hz.

    Sizes in headers are open-ended: where all samples are there, :func:`encode_audio` writes exact ones.
    :param channel_count: 1 or 2 for compressed formats. :param bit_rate: bits a second; default: the codec's.
    """
    if name in ("wav", "pcm"):
        return _Pcm(rate, channel_count, header=name == "wav")
    return _Compressed(name, rate, channel_count, bit_rate)


def encode_audio(samples: Any, rate: int, name: str, bit_rate: int | None = None) -> bytes:
    """A whole file of format *name*, with exact sizes."""
    if name == "wav":
        return wav(samples, rate)
    if name == "pcm":
        return pcm16(samples)
    out = io.BytesIO()
    encoder = _Compressed(name, rate, channels(samples), bit_rate, out)
    encoder.feed(samples)
    encoder.finish()
    return out.getvalue()


def wav_header(rate: int, channel_count: int, data_bytes: int | None) -> bytes:
    """What stands before the samples of a 16-bit WAV file; *data_bytes* is ``None`` where the end is not known."""
    whole, data = (_OPEN_ENDED, _OPEN_ENDED) if data_bytes is None else (36 + data_bytes, data_bytes)
    frame = 2 * channel_count
    form = struct.pack("<HHIIHH", 1, channel_count, rate, rate * frame, frame, 16)
    return struct.pack("<4sI4s4sI", b"RIFF", whole, b"WAVE", b"fmt ", 16) + form + struct.pack("<4sI", b"data", data)


class _Pcm:
    def __init__(self, rate: int, channel_count: int, header: bool):
        self.rate = rate
        self._head = wav_header(rate, channel_count, None) if header else b""

    def feed(self, samples: Any) -> bytes:
        head, self._head = self._head, b""
        return head + pcm16(samples)

    def finish(self) -> bytes:
        head, self._head = self._head, b""
        return head


class Sink:
    """What FFmpeg writes to when nothing can be written again."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


class _Compressed:
    """*out*: a file that FFmpeg may seek in; without one the bytes come from :meth:`feed` and :meth:`finish`."""

    def __init__(self, name: str, rate: int, channel_count: int, bit_rate: int | None, out: io.BytesIO | None = None):
        import av
        import soxr

        container, codec, rates = _CODECS[name]
        self.rate = nearest_rate(rate, rates)
        self._layout = _LAYOUTS[channel_count]
        self._resampler = soxr.ResampleStream(rate, self.rate, channel_count) if rate != self.rate else None
        self._sink = Sink()
        self._position = 0
        # each packet goes out at once, and Ogg does not wait for a second of sound to fill a page
        options = {} if out is not None else {"fflags": "flush_packets"}
        if container == "ogg" and out is None:
            options["page_duration"] = "100000"
        if container == "mp3" and out is None:
            options["write_xing"] = "0"  # a table of contents of zeros is worse than none
        self._container = av.open(out or self._sink, "w", format=container, options=options)
        stream: Any = self._container.add_stream(codec, rate=self.rate)
        stream.layout = self._layout
        if bit_rate is not None:
            stream.bit_rate = bit_rate
        self._stream = stream

    def feed(self, samples: Any) -> bytes:
        samples = np.nan_to_num(np.clip(np.asarray(samples, np.float32), -1.0, 1.0))
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples)
        self._encode(samples)
        return self._sink.take()

    def finish(self) -> bytes:
        if self._resampler is not None:
            rest = np.zeros((0, 2) if self._layout == "stereo" else (0,), np.float32)
            self._encode(self._resampler.resample_chunk(rest, last=True))
        if self._position:
            self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._sink.take()

    def _encode(self, samples: np.ndarray[Any, Any]) -> None:
        import av

        if not len(samples):
            return
        packed = np.ascontiguousarray(np.clip(samples, -1.0, 1.0), np.float32).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=self._layout)
        frame.sample_rate, frame.pts = self.rate, self._position
        frame.time_base = Fraction(1, self.rate)
        self._position += len(samples)
        self._container.mux(self._stream.encode(frame))


def nearest_rate(rate: int, rates: tuple[int, ...]) -> int:
    """The lowest of *rates* that loses nothing of a sound at *rate*."""
    if not rates or rate in rates:
        return rate
    return min((r for r in rates if r > rate), default=rates[-1])

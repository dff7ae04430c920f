"""Sound → mono samples, in a decoder's process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from mstar_server.media.kinds import HEAD_BYTES, Container, require
from mstar_server.media.limits import MediaFault, MediaLimits, damaged
from mstar_server.media.output import ArrayRef, Decoded, Output

__all__ = ["CODECS", "decode_audio", "decode_container_audio"]

CODECS = (
    "aac,aac_latm,ac3,eac3,alac,flac,mp1,mp1float,mp2,mp2float,mp3,mp3float,opus,libopus,vorbis,libvorbis,speex,libspeex,"
    "wmav1,wmav2,amrnb,amrwb,pcm_s16le,pcm_s16be,pcm_s24le,pcm_s24be,pcm_s32le,pcm_s32be,pcm_f32le,pcm_f32be,pcm_f64le,"
    "pcm_u8,pcm_s8,pcm_alaw,pcm_mulaw,adpcm_ima_wav,adpcm_ms,gsm,gsm_ms"
)
"""FFmpeg's decoders of sound that a file may call for."""

_RATES = (1_000, 768_000)
_BLOCK = 1 << 17
"""Samples of all channels that are decoded at a time."""

_SOUNDFILE = ("WAV", "FLAC", "Ogg", "MP3", "AIFF")


def decode_audio(file: BinaryIO, limits: MediaLimits, output: Output) -> Decoded:
    """The mean of all channels, float32 ``[samples]``, at the file's own rate. Raises :class:`MediaFault`.

    Length and size are judged while it decodes, so a file cannot make the decoder go on by lying in its header.
    """
    container = require(file.read(HEAD_BYTES), "audio")
    file.seek(0)
    if container.name in _SOUNDFILE:
        try:
            return _by_soundfile(file, container, limits, output)
        except _Unknown as error:
            if not container.demuxer:
                raise damaged("audio", error) from None
        file.seek(0)
    return decode_container_audio(file, container, limits, output)


class _Unknown(Exception):
    """libsndfile does not know what is inside; FFmpeg may."""


def _by_soundfile(file: BinaryIO, container: Container, limits: MediaLimits, output: Output) -> Decoded:
    import soundfile

    size = file.seek(0, 2)
    file.seek(0)
    try:
        sound = soundfile.SoundFile(file.fileno(), closefd=False)
    except (soundfile.LibsndfileError, TypeError, ValueError) as error:
        raise _Unknown(getattr(error, "error_string", str(error))) from None
    with sound:
        writer = _Writer(sound.samplerate, limits, output)
        # The frames of a header are a promise; where each takes a byte at least, an impossible one is a stream's
        if container.name not in ("WAV", "AIFF") or sound.frames <= size:
            writer.expect(sound.frames / sound.samplerate)
        try:
            while len(block := sound.read(max(1, _BLOCK // sound.channels), dtype="float32", always_2d=True)):
                writer.write(block.mean(axis=1))
        except soundfile.LibsndfileError as error:
            raise damaged("audio", error.error_string) from None
        return writer.done()


def decode_container_audio(file: BinaryIO, container: Container, limits: MediaLimits, output: Output) -> Decoded:
    """The first sound track of a file that FFmpeg reads."""
    import av

    try:
        with av.open(
            file, format=container.demuxer, options={"codec_whitelist": CODECS}, metadata_errors="ignore"
        ) as media:
            if not media.streams.audio:
                raise MediaFault("the file holds no sound", "invalid_audio")
            return _track(media, media.streams.audio[0], limits, output)
    except av.FFmpegError as error:
        raise damaged("audio", error.strerror or error) from None


def _track(media: Any, stream: Any, limits: MediaLimits, output: Output) -> Decoded:
    import av

    writer: _Writer | None = None
    resampler = av.AudioResampler(format="fltp")
    for frame in decoded_frames(media, stream):
        if writer is None:
            writer = _Writer(frame.sample_rate, limits, output)
            if stream.duration is not None and stream.time_base is not None:
                writer.expect(float(stream.duration * stream.time_base))
        try:
            planes = resampler.resample(frame)
        except ValueError as error:  # rate or channels changed on the way
            raise damaged("audio", error) from None
        for plane in planes:
            writer.write(plane.to_ndarray().mean(axis=0))
    if writer is None:
        raise MediaFault("the file holds no sound that can be decoded", "invalid_audio")
    return writer.done()


def decoded_frames(media: Any, stream: Any) -> Iterator[Any]:
    """The frames of *stream*. Packets that do not decode are passed over while they are fewer than those that do."""
    import av

    good = bad = 0
    packets = media.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except av.FFmpegError:  # the file ends in the middle of a packet
            bad += 1
            packet = None
        try:
            # an empty packet asks for what the decoder still holds
            frames = stream.decode(packet if packet is not None and packet.size else None)
            good += 1
        except EOFError:
            frames = []
        except av.FFmpegError as error:
            bad += 1
            if bad > good + 16:
                raise damaged(stream.type, error.strerror or error) from None
            frames = []
        yield from frames
        if packet is None or not packet.size:
            break
    if bad > good:
        raise damaged(stream.type, "most of it does not decode")


_LOUDEST = 65_536.0
"""Times full scale, which is 1. Samples that count as integers of 16 bits do are below; what is not would overflow a
model's arithmetic."""


class _Writer:
    """Counts seconds while samples pass through."""

    def __init__(self, rate: int, limits: MediaLimits, output: Output):
        if not _RATES[0] <= rate <= _RATES[1]:
            raise MediaFault(f"a rate of {rate} Hz is not in {_RATES[0]}…{_RATES[1]}", "invalid_audio")
        self._rate, self._limits, self._output, self._start = rate, limits, output, output.size

    def expect(self, seconds: float) -> None:
        """Refuse what the header says is too long."""
        if seconds > self._limits.max_audio_s:
            message = f"audio of {seconds:.6g} s is longer than the limit of {self._limits.max_audio_s:g} s"
            raise MediaFault(message, "audio_too_long")

    def write(self, samples: np.ndarray[Any, Any]) -> None:
        if not np.isfinite(samples).all():
            raise damaged("audio", "it has samples that are no numbers")
        if len(samples) and (loudest := float(np.abs(samples).max())) > _LOUDEST:
            raise damaged("audio", f"it has a sample of {loudest:.3g}; full scale is 1")
        if self._count() + len(samples) > self._limits.max_audio_s * self._rate:
            message = f"the audio is longer than the limit of {self._limits.max_audio_s:g} s"
            raise MediaFault(message, "audio_too_long")
        self._output.write(samples.astype(np.float32, copy=False))

    def _count(self) -> int:
        return (self._output.size - self._start) // 4

    def done(self) -> Decoded:
        if not self._count():
            raise MediaFault("the audio holds no samples", "invalid_audio")
        return Decoded(samples=ArrayRef("float32", (self._count(),), self._start), rate=self._rate)

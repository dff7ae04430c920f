"""Frames and sound → MP4 (H.264, AAC), whole or while they are made."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from mstar.spec.tasks import Audio
from mstar_server.media.encode.audio import MPEG_RATES, Sink, nearest_rate

__all__ = ["VIDEO_TYPE", "Mp4Encoder", "mp4"]

VIDEO_TYPE = "video/mp4"

_BT709 = 1  # FFmpeg's number for its matrix, primaries and transfer
_LIMITED = 1  # and for its range
_BT709_MATRIX = 1  # swscale's


def mp4(frames: Iterable[Any], fps: float, audio: Audio | None = None, quality: int = 23) -> bytes:
    """A whole file, its index at the front. *frames*: uint8 ``[H, W, 3]`` each. See :class:`Mp4Encoder`."""
    frames = iter(frames)
    first = next(frames, None)
    if first is None:
        raise ValueError("a video needs a frame")
    height, width = np.asarray(first).shape[:2]
    # to move the index to the front FFmpeg opens the file a second time, by its name
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        encoder = Mp4Encoder(width, height, fps, audio.rate if audio is not None else None, quality, file.name)
        try:
            encoder.frame(first)
            for frame in frames:
                encoder.frame(frame)
            if audio is not None:
                encoder.sound(audio.samples)
        finally:
            encoder.finish()
        return Path(file.name).read_bytes()


class Mp4Encoder:
    """One MP4 file in fragments, each playable when it is there.

    A player shows even sizes only: an odd width or height gets one more column or row, the last one again.

    :param audio_rate: Hz of the sound, ``None`` for a silent file. :param quality: H.264's rate factor, 0 (lossless) to
        51; 23 is the codec's default. :param path: write a whole file there instead, with its index at the front.
    """

    def __init__(
        self, width: int, height: int, fps: float, audio_rate: int | None = None, quality: int = 23,
        path: str | None = None,
    ):  # fmt: skip
        import av

        self._shape = (height, width)
        self._sink = Sink()
        whole, parts = "faststart", "frag_keyframe+empty_moov+default_base_moof"
        options = {"movflags": whole if path is not None else parts}
        self._container = av.open(path or self._sink, "w", format="mp4", options=options)
        rate = Fraction(fps).limit_denominator(1001 * 60)
        video: Any = self._container.add_stream("libx264", rate=rate)
        video.width, video.height, video.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
        video.options = {"crf": str(quality), "preset": "veryfast"}
        context = video.codec_context
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = _LIMITED
        context.gop_size = max(1, round(2 * fps))
        self._video, self._frames, self._rate = video, 0, rate
        self._audio: Any = None
        self._samples = 0
        self._resampler: Any = None
        if audio_rate is not None:
            self._open_audio(audio_rate)

    def _open_audio(self, rate: int) -> None:
        import soxr

        to = nearest_rate(rate, MPEG_RATES)
        self._audio = self._container.add_stream("aac", rate=to)
        self._audio.layout = "mono"
        self._resampler = soxr.ResampleStream(rate, to, 1)

    def frame(self, pixels: Any) -> bytes:
        """The next frame, uint8 ``[H, W, 3]`` → the bytes that are ready, perhaps none."""
        import av

        pixels = np.asarray(pixels, np.uint8)
        if pixels.shape != (*self._shape, 3):
            raise ValueError(f"a frame has shape {pixels.shape}, the video {(*self._shape, 3)}")
        height, width = self._shape
        pixels = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
        frame = frame.reformat(format="yuv420p", dst_colorspace=_BT709_MATRIX)
        frame.pts, frame.time_base = self._frames, 1 / self._rate
        self._frames += 1
        self._container.mux(self._video.encode(frame))
        return self._sink.take()

    def sound(self, samples: Any) -> bytes:
        """The next samples of the sound, float32 ``[samples]``, in any order with frames."""
        self._encode(self._resampler.resample_chunk(np.nan_to_num(np.clip(np.asarray(samples, np.float32), -1.0, 1.0))))
        return self._sink.take()

    def finish(self) -> bytes:
        """The rest of the file."""
        if self._audio is not None:
            self._encode(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
            if self._samples:
                self._container.mux(self._audio.encode(None))
        if self._frames:
            self._container.mux(self._video.encode(None))
        self._container.close()
        return self._sink.take()

    def _encode(self, samples: np.ndarray[Any, Any]) -> None:
        import av

        if not len(samples):
            return
        packed = np.ascontiguousarray(np.clip(samples, -1.0, 1.0), np.float32).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout="mono")
        frame.sample_rate, frame.pts = self._audio.rate, self._samples
        frame.time_base = Fraction(1, self._audio.rate)
        self._samples += len(samples)
        self._container.mux(self._audio.encode(frame))

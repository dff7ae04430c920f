"""A video on its way to disk: frames and sound as they come, in any order; an MP4 file, a thumbnail, a sprite sheet.

Memory does not grow with the video's length: frames are encoded as they come, sound waits on disk until it is laid
beside them.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image as Pillow

from mstar_server.media.encode.audio import MPEG_RATES, nearest_rate
from mstar_server.media.encode.video import Mp4Encoder

__all__ = ["Clip", "ClipWriter"]

THUMBNAIL_SIDE = 512
"""The longer side of a thumbnail, in pixels."""
TILE_SIDE = 192
"""And of a picture on the sprite sheet."""
TILES = 16
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Clip:
    """What was written. *seconds*: the length of what is seen."""

    width: int
    height: int
    frames: int
    seconds: float
    has_sound: bool


class ClipWriter:
    """Writes *video* (MP4: H.264, and AAC if there is sound). Calls take milliseconds to seconds: make them in a
    thread, one after the other.

    :param thumbnail: WebP of the first frame, and *sheet*: JPEG of up to :data:`TILES` frames, evenly spread; ``None``
        writes none. :param quality: H.264's rate factor.
    """

    def __init__(self, video: Path, thumbnail: Path | None = None, sheet: Path | None = None, quality: int = 18):
        self._video, self._thumbnail, self._sheet, self._quality = video, thumbnail, sheet, quality
        self._silent = video.with_suffix(".silent.mp4")
        self._encoder: Mp4Encoder | None = None
        self._fps = 0.0
        self._shape = (0, 0)
        self._count = 0
        self._tiles: list[Pillow.Image] = []
        self._every = 1
        self._spool: BinaryIO | None = None
        self._rate, self._channels = 0, 0
        self._lock = threading.Lock()

    def frames(self, frames: Any, fps: float) -> None:
        """The next frames, uint8 ``[frames, H, W, 3]``, *fps* a second."""
        with self._lock:
            for frame in frames:
                self._frame(np.asarray(frame, np.uint8), fps)

    def sound(self, samples: Any, rate: int) -> None:
        """The next samples, float32 ``[samples]`` or ``[samples, channels]`` (the first two of them count)."""
        with self._lock:
            samples = np.asarray(samples, np.float32)
            samples = samples[:, None] if samples.ndim == 1 else samples[:, :2]
            if self._spool is None:
                self._spool = tempfile.TemporaryFile(dir=self._video.parent)  # noqa: SIM115 - close() does
                self._rate, self._channels = rate, samples.shape[1]
            if (rate, samples.shape[1]) != (self._rate, self._channels):
                raise ValueError(f"the sound has changed to {rate} Hz, {samples.shape[1]} channels on its way")
            self._spool.write(np.ascontiguousarray(samples).tobytes())

    def finish(self) -> Clip:
        """Complete the files. Raises :class:`ValueError` if there was no frame."""
        with self._lock:
            if self._encoder is None:
                raise ValueError("a video needs a frame")
            encoder, self._encoder = self._encoder, None
            encoder.finish()
            if self._spool is None:
                os.replace(self._silent, self._video)
            else:
                _lay_beside(self._silent, self._spool, self._rate, self._channels, self._video)
            if self._sheet is not None:
                _sheet(self._tiles).save(self._sheet, "JPEG", quality=85)
            height, width = self._shape
            return Clip(width, height, self._count, self._count / self._fps, self._spool is not None)

    def close(self) -> None:
        """Let go of what is open, and remove what is of no use to anybody. Safe to call more than once."""
        with self._lock:
            encoder, self._encoder = self._encoder, None
            spool, self._spool = self._spool, None
            try:
                if encoder is not None:
                    encoder.finish()
            finally:
                if spool is not None:
                    spool.close()
                self._silent.unlink(missing_ok=True)

    def _frame(self, frame: np.ndarray[Any, Any], fps: float) -> None:
        if self._encoder is None:
            height, width = frame.shape[:2]
            self._encoder = Mp4Encoder(width, height, fps, quality=self._quality, path=str(self._silent))
            self._fps, self._shape = fps, (height, width)
            if self._thumbnail is not None:
                _small(frame, THUMBNAIL_SIDE).save(self._thumbnail, "WEBP", quality=85)
        self._encoder.frame(frame)
        if self._sheet is not None and self._count % self._every == 0:
            self._tiles.append(_small(frame, TILE_SIDE))
            if len(self._tiles) == 2 * TILES:  # how long the video will be is not known: keep every second
                self._tiles, self._every = self._tiles[::2], self._every * 2
        self._count += 1


def _small(frame: np.ndarray[Any, Any], side: int) -> Pillow.Image:
    image = Pillow.fromarray(np.ascontiguousarray(frame))
    image.thumbnail((side, side))
    return image


def _sheet(tiles: list[Pillow.Image]) -> Pillow.Image:
    """Up to :data:`TILES` of *tiles*, evenly spread, in rows of four."""
    count = min(TILES, len(tiles))
    chosen = [tiles[number * (len(tiles) - 1) // max(1, count - 1)] for number in range(count)]
    width, height = chosen[0].size
    columns = min(4, count)
    sheet = Pillow.new("RGB", (columns * width, -(-count // columns) * height))
    for number, tile in enumerate(chosen):
        sheet.paste(tile, (number % columns * width, number // columns * height))
    return sheet


def _lay_beside(silent: Path, spool: BinaryIO, rate: int, channels: int, out: Path) -> None:
    """Copy the video of *silent* to *out*, with the sound of *spool* beside it."""
    import av

    with (
        av.open(str(silent)) as source,
        av.open(str(out), "w", format="mp4", options={"movflags": "faststart"}) as target,
    ):
        shown = source.streams.video[0]
        video = target.add_stream_from_template(shown)
        sound = _Sound(target, spool, rate, channels)
        for packet in source.demux(shown):
            if packet.dts is None:
                continue  # the end of the stream
            assert packet.time_base is not None
            sound.write_until(float(packet.dts * packet.time_base))
            packet.stream = video
            target.mux(packet)
        sound.write_until(float("inf"))


class _Sound:
    """AAC from a spool of float32 samples, encoded as far as the video is, so that the two lie side by side."""

    def __init__(self, target: Any, spool: BinaryIO, rate: int, channels: int):
        import soxr

        self.rate, self._target, self._spool, self._channels = nearest_rate(rate, MPEG_RATES), target, spool, channels
        self._stream = target.add_stream("aac", rate=self.rate)
        self._layout = "mono" if channels == 1 else "stereo"
        self._stream.layout = self._layout
        self._resampler = soxr.ResampleStream(rate, self.rate, channels)
        self._written = 0
        self._blocks = self._read()
        self._over = False

    def write_until(self, seconds: float) -> None:
        while not self._over and self._written / self.rate < seconds:
            samples = next(self._blocks, None)
            if samples is None:
                self._over = True
                if self._written:
                    self._target.mux(self._stream.encode(None))
            elif len(samples):
                self._encode(samples)

    def _read(self) -> Iterator[np.ndarray[Any, Any]]:
        """The samples ``[samples, channels]``, resampled, block by block."""
        self._spool.seek(0)
        while data := self._spool.read(_BLOCK * 4 * self._channels):
            block = np.frombuffer(data, np.float32).reshape(-1, self._channels)
            yield self._resampler.resample_chunk(np.nan_to_num(np.clip(block, -1.0, 1.0)))
        yield self._resampler.resample_chunk(np.zeros((0, self._channels), np.float32), last=True)

    def _encode(self, samples: np.ndarray[Any, Any]) -> None:
        import av

        packed = np.ascontiguousarray(np.clip(samples, -1.0, 1.0), np.float32).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=self._layout)
        frame.sample_rate, frame.pts, frame.time_base = self.rate, self._written, Fraction(1, self.rate)
        self._written += len(samples)
        self._target.mux(self._stream.encode(frame))

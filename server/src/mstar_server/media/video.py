"""Videos → sampled frames and their sound, in a decoder's process."""

from __future__ import annotations

from typing import Any, BinaryIO

import msgspec
import numpy as np

from mstar_server.media.audio import CODECS, decode_container_audio, decoded_frames
from mstar_server.media.kinds import HEAD_BYTES, Container, require
from mstar_server.media.limits import MediaFault, MediaLimits, Sampling, damaged
from mstar_server.media.output import ArrayRef, Decoded, Output
from mstar_server.media.spread import THREADS, SpreadFrames, check_length, check_pixels, upright

__all__ = ["decode_video", "holds_video"]

_CODECS = (
    "h264,hevc,vp8,libvpx,vp9,libvpx-vp9,av1,libdav1d,libaom-av1,mpeg4,msmpeg4v3,mpeg1video,mpeg2video,h263,mjpeg,theora,"
    "prores,dnxhd,ffv1,rawvideo,gif,png"
)


def decode_video(file: BinaryIO, sampling: Sampling, limits: MediaLimits, output: Output) -> Decoded:
    """Frames uint8 ``[frames, H, W, 3]``, upright, those shown at the times that *sampling* asks for, and their rate.

    The first frame is at the first frame's time. A container that promises more frames than decode is no error.
    Raises :class:`MediaFault`.
    """
    import av

    container = require(file.read(HEAD_BYTES), "video")
    video = None
    try:
        with _open(file, container) as media:
            stream = _picture_stream(media)
            if stream is None:
                raise MediaFault("the file holds no pictures, only sound", "invalid_video")
            sound = bool(media.streams.audio)
            if not sampling.spread:
                video = _Sampler(stream, media.duration, sampling, limits, output).run(media)
        if video is None:
            video = SpreadFrames(lambda: _open(file, container), _picture_stream, sampling, limits, output).run()
    except av.FFmpegError as error:
        raise damaged("video", error.strerror or error) from None
    if not (sampling.audio and sound):
        return video
    file.seek(0)
    track = decode_container_audio(file, container, limits, output)
    return msgspec.structs.replace(video, samples=track.samples, rate=track.rate)


def holds_video(file: BinaryIO, container: Container) -> bool:
    """Whether a file that may hold sound or pictures holds pictures that move."""
    import av

    try:
        with _open(file, container) as media:
            return _picture_stream(media) is not None
    except av.FFmpegError as error:
        raise damaged("video", error.strerror or error) from None


def _open(file: BinaryIO, container: Container) -> Any:
    import av

    file.seek(0)
    options = {"codec_whitelist": f"{_CODECS},{CODECS}"}
    return av.open(file, format=container.demuxer, options=options, metadata_errors="ignore")


def _picture_stream(media: Any) -> Any:
    """The first stream of pictures that is not a cover."""
    from av.stream import Disposition

    for stream in media.streams.video:
        if not stream.disposition & Disposition.attached_pic and stream.codec_context is not None:
            return stream
    return None


class _Sampler:
    """Writes the frames that are shown at ``start + k * interval``, for k = 0, 1, 2…

    Where the length is not known in advance, or was a lie, more frames than wanted come: then every second one is
    dropped and the interval doubles. So never more than the wanted number is held.
    """

    def __init__(self, stream: Any, duration: int | None, sampling: Sampling, limits: MediaLimits, output: Output):
        self._stream, self._limits, self._output = stream, limits, output
        self._most = max(1, min(sampling.max_frames, limits.max_video_frames))
        self._base, self._count, self._shape = output.size, 0, (0, 0)
        self._start: float | None = None
        self._source_fps = float(stream.average_rate or stream.guessed_rate or 0) or 25.0
        seconds = self._seconds(duration)
        self._interval = max(1 / sampling.fps, 1 / self._source_fps, seconds / self._most)
        self._check_length(seconds)
        width, height = stream.codec_context.width, stream.codec_context.height
        self._check_pixels(width, height, max(1, min(self._most, int(seconds / self._interval))))

    def _seconds(self, duration: int | None) -> float:
        stream = self._stream
        if stream.duration is not None and stream.time_base is not None:
            return max(0.0, float(stream.duration * stream.time_base))
        return max(0.0, duration / 1_000_000) if duration is not None else 0.0

    def run(self, media: Any) -> Decoded:
        self._stream.thread_type = "AUTO"
        self._stream.codec_context.thread_count = THREADS
        held: Any = None
        time = 0.0
        for number, frame in enumerate(decoded_frames(media, self._stream)):
            time = self._time(frame, number)
            if self._start is None:
                self._start = time
            self._check_length(time - self._start)
            self._show(held, until=time - 0.01 * self._interval)
            held = frame
        self._show(held, until=time + 0.01 * self._interval)
        if not self._count:
            raise MediaFault("the video has no frame that can be decoded", "invalid_video")
        ref = ArrayRef("uint8", (self._count, *self._shape, 3), self._base)
        return Decoded(frames=ref, fps=1 / self._interval)

    def _time(self, frame: Any, number: int) -> float:
        """Seconds at which *frame* is shown. (A frame's own ``time`` is wrong when the decoder held it to the end.)"""
        if frame.pts is None or not self._stream.time_base:
            return number / self._source_fps
        return float(frame.pts * self._stream.time_base)

    def _show(self, frame: Any, until: float) -> None:
        """*frame* was shown up to *until*: write it for each sampling time before that."""
        if frame is None or self._start is None:
            return
        pixels: np.ndarray[Any, Any] | None = None
        while self._start + self._count * self._interval < until:
            if self._count == self._most:
                self._count = self._output.keep_every_second(self._base, self._frame_bytes(), self._count)
                self._interval *= 2
                continue
            if pixels is None:
                pixels = self._upright(frame)
            self._output.write(pixels)
            self._count += 1

    def _frame_bytes(self) -> int:
        return 3 * self._shape[0] * self._shape[1]

    def _upright(self, frame: Any) -> np.ndarray[Any, Any]:
        self._check_pixels(frame.width, frame.height, self._count + 1)
        pixels = upright(frame, self._shape)
        self._shape = pixels.shape[:2]
        return pixels

    def _check_length(self, seconds: float) -> None:
        check_length(seconds, self._limits)

    def _check_pixels(self, width: int, height: int, frames: int) -> None:
        check_pixels(width, height, frames, self._interval, self._limits)

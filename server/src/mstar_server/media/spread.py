"""Frames that lie evenly from a video's first to its last, in a decoder's process; and what all frames must keep to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mstar.processing.pictures import BadShape, frame_indices, resized
from mstar_server.media.audio import decoded_frames
from mstar_server.media.limits import MediaFault, MediaLimits, Sampling
from mstar_server.media.output import ArrayRef, Decoded, Output

__all__ = ["THREADS", "SpreadFrames", "check_length", "check_pixels", "upright"]

THREADS = 2
"""Of FFmpeg's, for one video."""

Pixels = np.ndarray[Any, Any]


class SpreadFrames:
    """Writes the frames that :func:`~mstar.processing.pictures.frame_indices` chooses.

    Which these are depends on how many frames there are. What the file says of that is believed at first; if it was not
    so, the frames are chosen and decoded again.

    :param open_media: opens the file. :param pictures: its stream of pictures.
    """

    def __init__(
        self,
        open_media: Callable[[], Any],
        pictures: Callable[[Any], Any],
        sampling: Sampling,
        limits: MediaLimits,
        output: Output,
    ):
        self._open, self._pictures = open_media, pictures
        self._sampling, self._limits, self._output = sampling, limits, output
        self._base = output.size
        self._source = self._shape = (0, 0)  # of the frames, and of what is written

    def run(self) -> Decoded:
        """Raises :class:`MediaFault`."""
        total, fps = self._promised()
        chosen, found = self._decode(total, fps)
        if found != total and found:
            self._output.back_to(self._base)
            chosen, found = self._decode(found, fps)
        if not found:
            raise MediaFault("the video has no frame that can be decoded", "invalid_video")
        times = tuple(index / fps for index in chosen)
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else self._sampling.fps
        ref = ArrayRef("uint8", (len(chosen), *self._shape, 3), self._base)
        return Decoded(frames=ref, fps=rate, times=times, resized=self._sampling.patcher is not None)

    def _promised(self) -> tuple[int, float]:
        """Frames, and frames a second, as the file says."""
        with self._open() as media:
            stream = self._pictures(media)
            total = stream.frames or sum(1 for packet in media.demux(stream) if packet.size)
            return max(1, total), float(stream.average_rate or stream.guessed_rate or 0) or 25.0

    def _decode(self, total: int, fps: float) -> tuple[list[int], int]:
        """The frames that are wanted of *total*, written as far as they come, and how many there are."""
        check_length((total - 1) / fps, self._limits)
        sampling = self._sampling
        most = max(1, min(sampling.max_frames, self._limits.max_video_frames))
        chosen = frame_indices(total, fps, sampling.fps, min(sampling.min_frames, most), most).tolist()
        with self._open() as media:
            stream = self._pictures(media)
            context = stream.codec_context
            interval = total / fps / len(chosen)
            check_pixels(context.width, context.height, len(chosen), interval, self._limits)
            stream.thread_type, context.thread_count = "AUTO", THREADS
            wanted, number = iter(chosen), 0
            index = next(wanted)
            for frame in decoded_frames(media, stream):
                check_length(number / fps, self._limits)
                if number == index:
                    check_pixels(frame.width, frame.height, len(chosen), interval, self._limits)
                    pixels = upright(frame, self._source)
                    self._source = pixels.shape[:2]
                    self._output.write(self._fitted(pixels, len(chosen)))
                    index = next(wanted, -1)
                number += 1
        return chosen, number

    def _fitted(self, pixels: Pixels, frames: int) -> Pixels:
        """*pixels*, which are one of so many *frames*, as large as the model wants them."""
        if self._sampling.patcher is not None:
            try:
                size = self._sampling.patcher.video_size(frames, *pixels.shape[:2])
            except BadShape as error:
                raise MediaFault(str(error), "invalid_video") from None
            pixels = resized(np.ascontiguousarray(pixels), *size)
        self._shape = pixels.shape[:2]
        return pixels


def upright(frame: Any, shape: tuple[int, ...]) -> Pixels:
    """*frame*'s pixels uint8 ``[H, W, 3]``, turned as it is shown. *shape*: of the frames before, ``(0, 0)`` for none.

    Raises :class:`MediaFault` if it is of another.
    """
    pixels: Pixels = frame.to_ndarray(format="rgb24")
    if turns := round(frame.rotation / 90) % 4:
        pixels = np.rot90(pixels, turns)
    if shape not in ((0, 0), pixels.shape[:2]):
        raise MediaFault("the size of the frames changes in the middle of the video", "invalid_video")
    return pixels


def check_length(seconds: float, limits: MediaLimits) -> None:
    """Raise :class:`MediaFault` for a video longer than the limit."""
    if seconds > limits.max_video_s:
        message = f"a video of {seconds:.6g} s is longer than the limit of {limits.max_video_s:g} s"
        raise MediaFault(message, "video_too_long")


def check_pixels(width: int, height: int, frames: int, interval: float, limits: MediaLimits) -> None:
    """Raise :class:`MediaFault` for frames that are too large, or too many for their size. *interval*: seconds from one
    to the next."""
    if width * height > limits.max_pixels:
        message = f"frames of {width}x{height} are larger than the limit of {limits.max_pixels} pixels"
        raise MediaFault(message, "video_too_large")
    if width * height * frames > limits.max_video_pixels:
        limit, size = limits.max_video_pixels, f"{width}x{height}"
        most = limit // (width * height)
        message = (
            f"{frames} frames of {size} are more than the limit of {limit} pixels; "
            f"at this size at most {most} frames, which are {most * interval:.0f} s"
        )
        raise MediaFault(message, "video_too_large")

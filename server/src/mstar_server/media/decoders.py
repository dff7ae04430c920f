"""The decoders by the name that a job asks for them. Runs in a decoder's process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import BinaryIO

import msgspec

from mstar_server.media.audio import decode_audio
from mstar_server.media.images import decode_frames, decode_image, decode_mask
from mstar_server.media.kinds import HEAD_BYTES, sniff
from mstar_server.media.limits import MediaFault, MediaLimits, Sampling
from mstar_server.media.output import Decoded, Output
from mstar_server.media.video import decode_video, holds_video

__all__ = ["DECODERS", "Decoder", "Job"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to decode a file as, and within which limits.

    :param decoder: a key of :data:`DECODERS`. :param takes: for ``any``: the kinds that are of use.
    :param parts: for ``frames``: the sizes of the files that lie one behind the other.
    """

    decoder: str
    limits: MediaLimits
    sampling: Sampling = Sampling()
    takes: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()


Decoder = Callable[[int, Job, Output], Decoded]
"""Reads the file with this descriptor, appends to the output, and says what lies where. Raises MediaFault."""


def _image(fd: int, job: Job, output: Output) -> Decoded:
    with _opened(fd) as file:
        return decode_image(file, job.limits, output)


def _mask(fd: int, job: Job, output: Output) -> Decoded:
    with _opened(fd) as file:
        return decode_mask(file, job.limits, output)


def _frames(fd: int, job: Job, output: Output) -> Decoded:
    with _opened(fd) as file:
        return decode_frames(file, job.parts, job.sampling.fps, job.limits, output)


def _audio(fd: int, job: Job, output: Output) -> Decoded:
    with _opened(fd) as file:
        return decode_audio(file, job.limits, output)


def _video(fd: int, job: Job, output: Output) -> Decoded:
    with _opened(fd) as file:
        return decode_video(file, job.sampling, job.limits, output)


def _any(fd: int, job: Job, output: Output) -> Decoded:
    """A file in a container that may hold sound or pictures: as a video if it has pictures, else as sound."""
    with _opened(fd) as file:
        container = sniff(file.read(HEAD_BYTES), audio=True)
        file.seek(0)
        if container is None:
            raise MediaFault("the file is of an unknown format", "unsupported_media_type", 415)
        kind = "video" if "video" in container.kinds and holds_video(file, container) else container.kinds[0]
    if kind not in job.takes:
        message = f"the file is {kind}, which this model does not take; it takes {', '.join(job.takes)}"
        raise MediaFault(message, "unsupported_modality")
    return DECODERS[kind](fd, job, output)


def _opened(fd: int) -> BinaryIO:
    os.lseek(fd, 0, os.SEEK_SET)
    return os.fdopen(os.dup(fd), "rb", buffering=0)  # libsndfile reads the descriptor itself


DECODERS: Mapping[str, Decoder] = {
    "image": _image, "mask": _mask, "frames": _frames, "audio": _audio, "video": _video, "any": _any,
}  # fmt: skip

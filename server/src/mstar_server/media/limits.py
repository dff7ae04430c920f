"""What may be decoded, and what is said when it may not. Plain data: it travels to the decoders' processes."""

from __future__ import annotations

from typing import Literal

import msgspec

from mstar.processing.pictures import Patcher
from mstar.spec.model import ModelSpec
from mstar_server.options import ServerOptions

__all__ = ["DEFAULT_SAMPLING", "Kind", "MediaFault", "MediaLimits", "Sampling", "damaged", "sampling_of"]

Kind = Literal["image", "mask", "audio", "video", "any"]
"""What a file is decoded as. ``any``: as what its first bytes say, of the kinds that the caller takes. ``mask``: an
image, of which only the opacity counts: uint8 ``[H, W]``, 0 where it is transparent."""


class MediaLimits(msgspec.Struct, frozen=True):
    """The part of :class:`~mstar_server.options.ServerOptions` that a decoder enforces; the names are the same."""

    max_pixels: int
    max_video_pixels: int
    max_video_frames: int
    max_video_s: float
    max_audio_s: float
    max_decoded_bytes: int

    @classmethod
    def of(cls, options: ServerOptions) -> MediaLimits:
        return cls(**{name: getattr(options, name) for name in cls.__struct_fields__})


class Sampling(msgspec.Struct, frozen=True):
    """Which frames of a video are wanted: those shown at 0, 1/*fps*, 2/*fps*… seconds, at most *max_frames*.

    A longer video is sampled more thinly, still evenly; one with fewer frames a second than *fps* keeps its own rate.
    :param audio: decode the sound, too.
    :param spread: instead, frames that lie evenly from the first to the last, as many as *fps* says, but no fewer than
        *min_frames* as far as there are so many (:func:`mstar.processing.pictures.frame_indices`).
    :param patcher: of spread frames: to which size they are brought; ``None``: they keep theirs.
    """

    fps: float = 2.0
    max_frames: int = 768
    audio: bool = False
    spread: bool = False
    min_frames: int = 1
    patcher: Patcher | None = None


DEFAULT_SAMPLING = Sampling()


def sampling_of(spec: ModelSpec, patcher: Patcher | None = None) -> Sampling:
    """Which frames of a video *spec*'s model wants, if its adapter says nothing else. *patcher*: its processor's."""
    if spec.frames is None:
        return DEFAULT_SAMPLING
    return Sampling(spec.frames.fps, spec.frames.most, spread=True, min_frames=spec.frames.least, patcher=patcher)


class MediaFault(Exception):
    """A file that cannot be used. The message follows the name of the field: "the image is damaged: …"."""

    def __init__(self, message: str, code: str, status: int = 400):
        super().__init__(message)
        self.message, self.code, self.status = message, code, status


def damaged(kind: str, reason: object) -> MediaFault:
    """The fault of a file that begins like a *kind* but cannot be decoded."""
    return MediaFault(f"the {kind} is damaged: {str(reason)[:200] or type(reason).__name__}", f"invalid_{kind}")

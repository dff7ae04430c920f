"""Pictures and videos for vision transformers of any resolution: sizes, patches, frames. No torch.

Sizes and the order of patches are those of Qwen2-VL and Qwen3-VL ("Qwen2-VL", arXiv 2409.12191), after the image
processor for PIL and the video processor of transformers 5.24 (``models/qwen2_vl``, ``models/qwen3_vl``), which many
families have taken over. Resizing is Pillow's, as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mstar.spec.errors import SetupError

__all__ = ["MAX_RATIO", "BadShape", "Patcher", "Patches", "content_words", "frame_indices", "resized", "smart_resize"]

Pixels = npt.NDArray[np.uint8]

MAX_RATIO = 200
"""How many times longer than the other a picture's longer side may be."""

_WORD = (1 << 62) - 1


class BadShape(ValueError):
    """A picture that cannot be cut into patches; the message goes on after the name of the picture."""


def smart_resize(height: int, width: int, factor: int, least: int, most: int, frames: int = 1, pair: int = 1) -> Any:
    """Height and width, multiples of *factor*, near the picture's own and its ratio, so that *frames* of them have
    *least* to *most* pixels in all.

    :param pair: frames that become one patch: a video's number of frames is rounded to a multiple. Frames narrower than
        *factor* are widened first, as the video processor does.
    :raises BadShape: the picture is too long and narrow.
    """
    given = f"{width}x{height}"
    if pair > 1 and (height < factor or width < factor):
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > MAX_RATIO:
        raise BadShape(f"one side of {given} pixels is more than {MAX_RATIO} times the other")
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    count = round(frames / pair) * pair
    if count * high * wide > most:
        beta = math.sqrt(frames * height * width / most)
        high = max(factor, math.floor(height / beta / factor) * factor)
        wide = max(factor, math.floor(width / beta / factor) * factor)
    elif count * high * wide < least:
        beta = math.sqrt(least / (frames * height * width))
        high = math.ceil(height * beta / factor) * factor
        wide = math.ceil(width * beta / factor) * factor
    return high, wide


def frame_indices(total: int, source_fps: float, fps: float, least: int, most: int) -> npt.NDArray[np.int64]:
    """Which of a video's *total* frames are looked at: evenly from the first to the last, *fps* a second, within
    *least* and *most* and no more than there are. int64 ``[n]``, rising."""
    count = min(max(int(total / source_fps * fps), least), most, total)
    return np.linspace(0, total - 1, max(count, 1)).round().astype(np.int64)


def content_words(pixels: npt.NDArray[Any], *about: int) -> tuple[int, int]:
    """Two words of 62 bits that differ for other *pixels*, or others numbers *about* them."""
    digest = blake2b(np.asarray(about, np.int64).tobytes(), digest_size=16)
    digest.update(np.ascontiguousarray(pixels).data)
    first, second = np.frombuffer(digest.digest(), np.uint64).tolist()
    return first & _WORD, second & _WORD


@dataclass(frozen=True)
class Patches:
    """A picture's or a video's patches.

    :param data: uint8 ``[frames * height * width, values of a patch]``, by group of frames, then in blocks that become
        one embedding. :param frames: groups of frames; 1 for a picture. :param height: in patches, as *width*.
    """

    data: Pixels
    frames: int
    height: int
    width: int


@dataclass(frozen=True)
class Patcher:
    """How a checkpoint wants its pictures, from its ``preprocessor_config.json`` or ``video_preprocessor_config.json``.

    :param patch: pixels of a patch's side. :param merge: patches on the side of what becomes one embedding.
    :param pair: frames of a patch; a picture is repeated. :param least: pixels of a picture, or of all frames of a
        video together; likewise *most*.
    :param cap: of videos: pixels of one frame are at most *frame_tokens* embeddings', and an even share of *most*
        (qwen-vl-utils' rule); else a short video has as many pixels as a long one.
    :param fps: frames a second that are looked at, *least_frames* to *most_frames*.
    :param mean: and *std*, *scale*: a byte ``b`` becomes ``(b * scale - mean) / std``, by channel.
    """

    patch: int = 16
    merge: int = 2
    pair: int = 2
    least: int = 65536
    most: int = 16777216
    cap: bool = True
    frame_tokens: int = 768
    fps: float = 2.0
    least_frames: int = 4
    most_frames: int = 768
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    scale: float = 1 / 255

    @classmethod
    def read(cls, config: Mapping[str, Any], default: Patcher | None = None) -> Patcher:
        """From a published file's *config*; what it does not say is *default*'s.

        :raises SetupError: it wants something else than resizing, rescaling and normalising RGB with Pillow's bicubic
            filter.
        """
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if not config.get(name, True):
                raise SetupError(f"the preprocessor's {name}=false is not supported")
        if config.get("resample", 3) != int(Image.Resampling.BICUBIC):
            raise SetupError(f"the preprocessor's resample={config['resample']} is not supported: 3 (bicubic) is")
        size = config.get("size") or {}
        found: dict[str, Any] = {
            "patch": config.get("patch_size"),
            "merge": config.get("merge_size"),
            "pair": config.get("temporal_patch_size"),
            "least": config.get("min_pixels") or size.get("shortest_edge"),
            "most": config.get("max_pixels") or size.get("longest_edge"),
            "cap": config.get("cap_pixels_per_frame"),
            "frame_tokens": config.get("max_video_tokens"),
            "fps": config.get("fps"),
            "least_frames": config.get("min_frames"),
            "most_frames": config.get("max_frames"),
            "mean": None if config.get("image_mean") is None else tuple(config["image_mean"]),
            "std": None if config.get("image_std") is None else tuple(config["image_std"]),
            "scale": config.get("rescale_factor"),
        }
        return replace(default or cls(), **{name: value for name, value in found.items() if value is not None})

    @property
    def factor(self) -> int:
        """Pixels on the side of what becomes one embedding."""
        return self.patch * self.merge

    def picture_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that a picture is resized to. Raises :class:`BadShape`."""
        return smart_resize(height, width, self.factor, self.least, self.most)  # type: ignore[no-any-return]

    def video_size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width that each of a video's *frames* is resized to. Raises :class:`BadShape`."""
        frames, most = max(frames, self.pair), self.most
        if self.cap:
            share = min(self.frame_tokens * self.factor**2, self.most // frames)
            most = max(share, int(self.least * 1.05)) * frames
        return smart_resize(height, width, self.factor, self.least, most, frames, self.pair)  # type: ignore[no-any-return]

    def picture(self, pixels: Pixels) -> Patches:
        """*pixels* uint8 ``[H, W, 3]``. Raises :class:`BadShape`."""
        high, wide = self.picture_size(*pixels.shape[:2])
        return self.cut(resized(pixels, high, wide)[None])

    def video(self, frames: Sequence[Pixels]) -> Patches:
        """*frames* uint8 ``[n, H, W, 3]``, those that are looked at. The last is repeated to fill its group. Raises
        :class:`BadShape`."""
        high, wide = self.video_size(len(frames), *frames[0].shape[:2])
        return self.cut(np.stack([resized(frame, high, wide) for frame in frames]))

    def cut(self, frames: Pixels) -> Patches:
        """*frames* uint8 ``[n, H, W, 3]`` that have their size already."""
        count, high, wide, channels = frames.shape
        missing = -count % self.pair
        if missing:
            frames = np.concatenate((frames, np.repeat(frames[-1:], missing, 0)))
        groups, rows, columns = len(frames) // self.pair, high // self.patch, wide // self.patch
        merge, patch = self.merge, self.patch
        blocks = frames.reshape(
            groups, self.pair, rows // merge, merge, patch, columns // merge, merge, patch, channels
        ).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        data = np.ascontiguousarray(blocks).reshape(groups * rows * columns, -1)
        return Patches(data, groups, rows, columns)

    def values(self) -> npt.NDArray[np.float32]:
        """What each byte becomes, float32 ``[channels, 256]``, to the last bit as the image processor computes it."""
        byte = (np.arange(256, dtype=np.uint8) * self.scale).astype(np.float32)
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        return np.ascontiguousarray(((byte[:, None] - mean) / std).T)


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """*pixels* uint8 ``[H, W, 3]`` by Pillow's bicubic filter."""
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))

"""How a checkpoint wants its pictures and videos, from the files beside its weights."""

from __future__ import annotations

from pathlib import Path

from mstar.processing.pictures import Patcher
from mstar.processing.tokenizer import read_json
from mstar.spec.errors import SetupError
from mstar_qwen3.vision_config import VisionConfig

__all__ = ["read_patchers"]

_PICTURES = Patcher(least=65536, most=16777216)
_VIDEOS = Patcher(least=4096, most=25165824)
"""The published checkpoints'."""


def read_patchers(folder: Path, vision: VisionConfig) -> tuple[Patcher, Patcher]:
    """For pictures and for videos, from ``preprocessor_config.json`` and ``video_preprocessor_config.json``.

    Without a file it is as in the published checkpoints. A video's frames are capped one by one, as the authors' own
    tools do, unless the file says ``cap_pixels_per_frame: false``.

    :raises SetupError: they do not fit the vision tower, or want something that is not supported.
    """
    pictures = Patcher.read(read_json(folder, "preprocessor_config.json"), _PICTURES)
    videos = Patcher.read(read_json(folder, "video_preprocessor_config.json"), _VIDEOS)
    for name, found in (("preprocessor_config.json", pictures), ("video_preprocessor_config.json", videos)):
        sizes = (found.patch, found.merge, found.pair)
        if sizes != (vision.patch, vision.merge, vision.pair):
            raise SetupError(
                f"{folder / name}: patches of {sizes} (pixels, merged, frames) are not the vision tower's "
                f"{(vision.patch, vision.merge, vision.pair)}"
            )
    if (pictures.mean, pictures.std, pictures.scale) != (videos.mean, videos.std, videos.scale):
        raise SetupError(f"{folder}: pictures and videos are normalised differently, which is not supported")
    return pictures, videos

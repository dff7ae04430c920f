"""Qwen3.5's API side: prompts in which pictures and videos stand among the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mstar.nn.config import read_config
from mstar.processing.mrope import Grid, rope_positions
from mstar.processing.pictures import BadShape, Patcher, Patches, content_words
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.processor import Prepared, ProcessorContext
from mstar.spec.tasks import ChatTask, GenerateTask, Image, Part, Task, Text, Video
from mstar_qwen3.chat import Qwen35TextProcessor
from mstar_qwen3.config import Qwen35Config
from mstar_qwen3.preprocessing import read_patchers
from mstar_qwen3.vision_config import VisionConfig

__all__ = ["Qwen35Processor", "places_of"]


def places_of(frames: int, height: int, width: int, merge: int) -> npt.NDArray[np.int32]:
    """Row and column of each patch in its picture, and the picture's rows and columns; int32 ``[P, 4]``, in the order
    of :class:`~mstar.processing.pictures.Patches`."""
    rows, columns = np.indices((height, width), dtype=np.int32)
    where = np.stack((rows, columns, np.full_like(rows, height), np.full_like(rows, width)), -1)
    blocks = where.reshape(height // merge, merge, width // merge, merge, 4).transpose(0, 2, 1, 3, 4)
    return np.tile(blocks.reshape(-1, 4), (frames, 1))

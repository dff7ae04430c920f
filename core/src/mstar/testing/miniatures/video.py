"""Shape 10 again, without a session: a video with sound, frame by frame."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mstar.nn.model import Model
from mstar.nn.node import Node, Step
from mstar.spec.graph import CLIENT, Call, Entry, Graph, Index, Loop, NodeSpec, Param, Partition, Port, Stream, Times
from mstar.testing.miniatures.catalog import FLICKER, SOUND

__all__ = ["Clip"]


class Frame(Node):
    def forward(self, step: Step, canvas: Tensor, index: Tensor) -> dict[str, Any]:
        """The canvas ``[rows, H, W, 3]``, brighter by the frame's number, and the piece of sound that goes with it."""
        brighter = canvas.to(torch.int64) + FLICKER * index.view(-1, 1, 1, 1)
        samples = index[:, None] * SOUND + torch.arange(SOUND)
        return {"frame": (brighter % 256).to(torch.uint8), "sound": (samples % 40).float() / 80 - 0.25}


class Clip(Model):
    """A loop that emits a frame and its sound each time, and tells its progress."""

    def graph(self) -> Graph:
        canvas = Port("canvas", "float32", ("H", "W", 3), "stacked")
        frame = Port("frame", "uint8", ("H", "W", 3), "stacked")
        sound = Port("sound", "float32", (SOUND,), "stacked")
        entry = Entry(inputs=(canvas, Port("index", "int64", (), "stacked")), outputs=(frame, sound))
        call = Call(
            "camera",
            inputs={"canvas": "canvas", "index": Index()},
            emit={"frame": "video", "sound": "audio"},
        )
        return Graph(
            nodes=(NodeSpec("camera", (entry,)),),
            walks={"film": Loop(call, Times(Param("frames")), progress="progress")},
            partitions=(Partition("main", ("film",)),),
            streams=(
                Stream("video", "main", CLIENT, frame, "video", capacity=8),
                Stream("audio", "main", CLIENT, Port("sample", "float32", (), "stacked"), "audio"),
                Stream("progress", "main", CLIENT, Port("progress", "int64", (2,), "stacked"), "progress"),
            ),
            inputs=(canvas,),
        )

    def build(self, node: str) -> Node:
        return Frame()

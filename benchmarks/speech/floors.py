"""What the device allows a speaking language model: its products as a captured graph, and its keys and values at copy
bandwidth. The codec counts nothing here: it is what comes on top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gpu.floors import copy_bandwidth, linear_graph

from speech.families import Family

__all__ = ["floors"]


def floors(family: Family, device: torch.device, streams: Sequence[int], context: int, small: bool) -> dict[str, Any]:
    """By number of streams: seconds of a step that makes a frame's worth, and seconds of sound a second if there were
    nothing else. :param context: tokens that a row of the first part has behind it, on average."""
    copy = copy_bandwidth(device, 1 << 22 if small else 1 << 30)
    steps: dict[str, float] = {str(count): 0.0 for count in streams}
    for number, (shape, times) in enumerate(family.parts):
        products = linear_graph(shape, device, streams)
        for count in streams:
            keys = count * context * shape.kv_bytes / copy if number == 0 else 0.0  # others have few, in a cache
            steps[str(count)] += times * products[str(count)] + keys
    return {
        "copy_bytes_per_s": copy,
        "step_s": steps,
        "audio_s_per_s": {name: int(name) / step / family.steps_per_s for name, step in steps.items()},
    }

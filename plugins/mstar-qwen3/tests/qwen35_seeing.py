"""transformers' Qwen3.5 as the reference of requests with pictures and videos.

Its video processor needs torchvision, so the frames of a video are resized and cut here, by the processor's formulas.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from tokenizers import Tokenizer

from mstar.processing.tokenizer import TextTokenizer, read_json
from mstar.spec.tasks import Image, Message, Text, Video

Inputs = dict[str, Any]


@lru_cache(maxsize=2)
def reference(folder: Path) -> Any:
    from transformers import Qwen3_5ForConditionalGeneration

    return Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def inputs_of(folder: Path, messages: Sequence[Message]) -> Inputs:
    """What transformers' processor would make of *messages*."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    parts = [part for message in messages for part in message.content]
    images = [part for part in parts if isinstance(part, Image)]
    videos = [part for part in parts if isinstance(part, Video)]
    config = read_json(folder, "preprocessor_config.json")
    found: Inputs = {}
    texts: dict[str, list[str]] = {"image": [], "video": []}
    if images:
        pixels = [Pillow.fromarray(image.pixels) for image in images]
        made = Qwen2VLImageProcessorPil(**config)(images=pixels, return_tensors="pt")
        found |= {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
        texts["image"] = ["<|image_pad|>" * (int(grid.prod()) // 4) for grid in made["image_grid_thw"]]
    if videos:
        cut = [_video(read_json(folder, "video_preprocessor_config.json"), video) for video in videos]
        found["pixel_values_videos"] = torch.cat([patches for patches, _, _ in cut])
        found["video_grid_thw"] = torch.tensor([grid for _, grid, _ in cut])
        texts["video"] = [_groups(grid, times) for _, grid, times in cut]
    ids = torch.tensor([_ids(folder, messages, texts)])
    model = reference(folder).config
    kinds = (ids == model.image_token_id).int() + 2 * (ids == model.video_token_id).int()
    return {**found, "input_ids": ids, "mm_token_type_ids": kinds}


def _ids(folder: Path, messages: Sequence[Message], texts: dict[str, list[str]]) -> list[int]:
    plain = [
        {
            "role": message.role,
            "content": [
                {"type": "text", "text": part.text} if isinstance(part, Text) else {"type": type(part).__name__.lower()}
                for part in message.content
            ],
        }
        for message in messages
    ]
    template = TextTokenizer(folder).chat_template
    assert template is not None
    text = template.render(plain, enable_thinking=False)
    left = {kind: list(found) for kind, found in texts.items()}
    text = re.sub(r"<\|(image|video)_pad\|>", lambda match: left[match[1]].pop(0), text)
    assert not any(left.values())
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


def _groups(grid: Sequence[int], times: Sequence[float]) -> str:
    pads = "<|video_pad|>" * (grid[1] * grid[2] // 4)
    return "".join(f"<{time:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for time in times)


def _video(config: dict[str, Any], video: Video) -> tuple[torch.Tensor, list[int], list[float]]:
    """Patches, grid and the groups' times."""
    module = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    processing = importlib.import_module("transformers.models.qwen3_vl.processing_qwen3_vl")
    from transformers.video_utils import VideoMetadata

    processor = object.__new__(module.Qwen3VLVideoProcessor)
    for name, value in config.items():
        object.__setattr__(processor, name, value)
    count, high, wide = video.frames.shape[:3]
    chosen = processor.sample_frames(VideoMetadata(total_num_frames=count, fps=video.fps))
    factor, size = config["patch_size"] * config["merge_size"], config["size"]
    used = max(len(chosen), 2)  # the reference refuses a single frame; ours repeats it, as it fills any group
    share = min(768 * factor**2, size["longest_edge"] // used)
    most = max(share, int(size["shortest_edge"] * 1.05)) * used
    height, width = module.smart_resize(used, high, wide, 2, factor, size["shortest_edge"], most)
    bicubic = Pillow.Resampling.BICUBIC
    frames = [np.asarray(Pillow.fromarray(video.frames[i]).resize((width, height), bicubic)) for i in chosen]
    pixels = (torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    patches, *grid = processor.patchify(pixels[None], config["patch_size"], config["merge_size"], 2)
    times = processing.Qwen3VLProcessor._calculate_timestamps(None, chosen.tolist(), video.fps)
    return patches[0], grid, times


def greedy(folder: Path, inputs: Inputs, count: int) -> list[int]:
    """The *count* tokens that the reference goes on with, whatever ends an answer."""
    with torch.inference_mode():
        made = reference(folder).generate(
            **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return made[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]

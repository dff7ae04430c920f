"""Qwen3.5's shapes: published configurations, random checkpoints of them, and what their steps cost at the least."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mstar_qwen3 import tiny
from mstar_qwen3.config import TextConfig

__all__ = ["SHAPES", "HybridShape", "publish"]

SHARD_BYTES = 5 << 30
CHUNK = 64
"""Tokens that the delta rule takes at once."""


@dataclass(frozen=True)
class HybridShape:
    """A published configuration.

    :param text: sizes that differ. :param vision: of the tower. :param key: the deployment that is measured with it.
    """

    key: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    batches: Sequence[int] = (1, 8, 32, 64)
    prompt: int = 1024
    prefills: Sequence[int] = (512, 2048, 8192)
    turn: tuple[int, int, int] = (4096, 64, 128)
    """Tokens of a chat's first prompt, of its answer, and of the second turn's question."""
    image: int = 1024
    """Pixels of a picture's side."""
    chats: int = 32
    answer: int = 128
    warm: int = 16
    steps: int = 96

    def config(self, vocab: int, ids: Mapping[str, int]) -> dict[str, Any]:
        """``config.json``. *ids*: of the tokenizer's tokens."""
        text = {
            "model_type": "qwen3_5_text",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "max_position_embeddings": 262144,
            **self.text,
            "vocab_size": vocab,
            "eos_token_id": ids["<|endoftext|>"],
        }
        vision = {
            "model_type": "qwen3_5_vision",
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": text["hidden_size"],
            **self.vision,
        }
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "vision_config": vision,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        }

    @cached_property
    def facts(self) -> TextConfig:
        return TextConfig.from_hf({"max_position_embeddings": 262144, **self.text}, tied=False)

    # --- floors -------------------------------------------------------------------------------------------------------
    @property
    def products(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of a decode step's matrix products, fused as a server fuses them, the head last."""
        c = self.facts
        inner = c.value_heads * c.value_dim
        mlp = [(2 * c.intermediate, c.hidden), (c.hidden, c.intermediate)]
        width = c.heads * c.head_dim
        full = [(2 * width + 2 * c.kv_heads * c.head_dim, c.hidden), (c.hidden, width), *mlp]
        linear = [(c.channels + inner + 2 * c.value_heads, c.hidden), (c.hidden, inner), *mlp]
        found = [product for kind in c.kinds for product in (full if kind == "full_attention" else linear)]
        return [*found, (c.vocab, c.hidden)]

    @property
    def state_bytes(self) -> int:
        """What a row's step reads and writes of its state: matrices in float32, and the convolution's window."""
        c = self.facts
        matrices = 4 * c.value_heads * c.key_dim * c.value_dim
        return 2 * len(c.linear_layers) * (matrices + 2 * c.channels * (c.kernel - 1))

    @property
    def kv_bytes(self) -> int:
        """Keys and values of a token."""
        c = self.facts
        return 2 * 2 * len(c.full_layers) * c.kv_heads * c.head_dim

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt: products, causal attention, the delta rule by chunks, one row's head."""
        c = self.facts
        *layers, head = self.products
        attention = 4 * len(c.full_layers) * c.heads * c.head_dim * tokens * (tokens + 1) / 2
        # of a token and head: with the tokens of its chunk keys, queries and values; with the state two reads, a write
        rule = 2 * CHUNK * (2 * c.key_dim + 2 * c.value_dim) + 6 * c.key_dim * c.value_dim
        delta = float(len(c.linear_layers) * c.value_heads * rule * tokens)
        return 2.0 * tokens * sum(out * inner for out, inner in layers) + attention + delta + 2.0 * math.prod(head)


_TEXT: Mapping[str, Any] = {
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
_TOWER: Mapping[str, Any] = {"patch_size": 16, "num_position_embeddings": 2304, "num_heads": 16}
SHAPES: Mapping[str, HybridShape] = {
    "4b": HybridShape(
        "qwen3_5_4b",
        {
            **_TEXT, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
            "num_key_value_heads": 4, "linear_num_value_heads": 32, "tie_word_embeddings": True,
        },
        {**_TOWER, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096},
    ),
    "9b": HybridShape(
        "qwen3_5_9b",
        {
            **_TEXT, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
            "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32,
            "tie_word_embeddings": False,
        },
        {**_TOWER, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304},
    ),
    "tiny": HybridShape(
        "qwen3_5_4b",
        {
            **_TEXT, "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "rope_parameters": {**_TEXT["rope_parameters"], "mrope_section": [4, 2, 2]},
            "tie_word_embeddings": True,
        },
        {**_TOWER, "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2},
        batches=(1, 3), prompt=40, prefills=(32, 96), turn=(600, 4, 8), image=128, chats=3, answer=6, warm=2, steps=6,
    ),
}  # fmt: skip
"""4B and 9B as published; ``tiny`` is for checks of the program."""


def publish(shape: HybridShape, folder: Path, device: str, dtype: torch.dtype) -> None:
    """A random checkpoint in the published layout, with a text for every id of the vocabulary; special ids are last."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(tiny.tokenizer().to_str())
    vocab, words = int(shape.text["vocab_size"]), content["model"]["vocab"]
    first = vocab - len(content["added_tokens"])
    words |= {f"Ġword{number}": number for number in range(len(words), first)}
    for number, token in enumerate(content["added_tokens"]):
        token["id"] = first + number
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(tiny.TEMPLATE.lstrip("\n"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["<|im_end|>"]]}))
    config = shape.config(vocab, ids)
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(**config))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if shape.text["tie_word_embeddings"]:
        shapes.pop("lm_head.weight", None)
    _write(shapes, folder, device, dtype)


def _write(shapes: Mapping[str, torch.Size], folder: Path, device: str, dtype: torch.dtype) -> None:
    draw = torch.Generator(device).manual_seed(1)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, shape in shapes.items():
        tensor = _drawn(name, shape, draw, device).to(dtype).cpu()
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def _drawn(name: str, shape: torch.Size, draw: torch.Generator, device: str) -> Tensor:
    """At the scale of a model before its training: streams, logits and states have the size that they have in use."""
    made = torch.empty(shape, device=device)
    if name.endswith("A_log"):
        return made.uniform_(0.0, 2.7, generator=draw)
    if name.endswith("dt_bias"):
        return made.normal_(-4.0, 1.0, generator=draw)
    if len(shape) == 1:
        offset = name.endswith(("layernorm.weight", "_norm.weight", "language_model.norm.weight"))
        plain = name.endswith("weight") and not offset
        return made.normal_(1.0 if plain else 0.0, 0.1, generator=draw)
    return made.normal_(0.0, 1 / math.sqrt(math.prod(shape[1:])), generator=draw)

"""Writes a tiny Llama as llama.cpp would: other names, reordered query and key rows, quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

Array = NDArray[Any]

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ġ a"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Q4_1, Q8_0, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "F32"))


def published_tensors(seed: int = 0) -> dict[str, Array]:
    """Random weights under their published names; their values fit bfloat16 exactly."""
    random = np.random.default_rng(seed)
    head_dim = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HEADS * head_dim, HIDDEN),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * head_dim, HIDDEN),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * head_dim, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * head_dim),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "mlp.gate_proj.weight": (FFN, HIDDEN),
            prefix + "mlp.up_proj.weight": (FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, FFN),
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    return {
        name: (random.integers(-64, 65, shape) / 64 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def interleave_rows(weight: Array, heads: int) -> Array:
    """llama.cpp's row order, spelled out: of each head, rows 0, n, 1, n + 1, … with n half a head."""
    head_dim = len(weight) // heads
    order = [
        head * head_dim + half * head_dim // 2 + row
        for head in range(heads)
        for row in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


def stored_name(published: str) -> str:
    for old, new in {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
    }.items():
        published = published.replace(old, new)
    return published


def write(
    file: Path,
    tensors: Mapping[str, Array],
    kind: Callable[[str], gguf.GGMLQuantizationType] = lambda name: F32,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    template: str | None = TEMPLATE,
) -> dict[str, Array]:
    """Write *tensors* (published names), each quantised as *kind* says.

    Returns the stored bytes of each by published name, in published row order.
    """
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    raw = {}
    for name, values in tensors.items():
        stored = raw[name] = gguf.quantize(values, kind(name))
        if "q_proj" in name or "k_proj" in name:
            stored = interleave_rows(stored, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(stored_name(name), stored, raw_dtype=kind(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return raw

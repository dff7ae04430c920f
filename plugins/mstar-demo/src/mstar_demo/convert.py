"""From the GGUF file in a package to the layout that Hugging Face publishes for a Llama model.

GGUF (llama.cpp) keeps a checkpoint's tensors under other names, quantised, and with the rows of the query and key
projections reordered; the tokenizer and the chat template are metadata. All of it is undone here with the ``gguf``
package's reader and dequantisation, tensor by tensor, without torch.

Sources: the GGUF specification and converter of llama.cpp (``docs/gguf.md``, ``conversion`` of ``LlamaForCausalLM``),
llama.cpp's pre-tokenizer table (``llama-vocab.cpp``), and the ``config.json`` that transformers reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from mstar.spec.errors import WeightsError
from mstar.weights.sources import Progress
from mstar.weights.writer import write_safetensors
from mstar_demo.tokenizer import write_tokenizer

__all__ = ["smollm2"]

_Rows = NDArray[Any]
"""A tensor as stored: ``[rows, bytes of a quantised row]`` uint8, or plain numbers."""

_CUT_ROWS = 4096

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2(raw: Path, out: Path, progress: Progress) -> None:
    """Convert the one ``.gguf`` file in *raw* (a Llama with a byte-level BPE tokenizer) into folder *out*.

    Weights come out in bfloat16, rounded to nearest, ties to even.

    :raises WeightsError: when the file is of another kind, or lacks a tensor or a fact.
    """
    (file,) = raw.glob("*.gguf")
    reader = gguf.GGUFReader(file)
    facts = _facts(reader)
    if facts["general.architecture"] != "llama":
        raise WeightsError(f"{file.name} holds a {facts['general.architecture']!r} model, expected 'llama'")
    config = llama_config(facts, tied=not any(tensor.name == "output.weight" for tensor in reader.tensors))
    _write_tensors(reader, config, out / "model.safetensors", progress)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", _generation_config(config))
    write_tokenizer(facts, out)


class _Facts(dict[str, Any]):
    """GGUF metadata by name."""

    def __missing__(self, name: str) -> Any:
        raise WeightsError(f"the GGUF file lacks the fact {name!r}")


def _facts(reader: gguf.GGUFReader) -> _Facts:
    return _Facts((name, field.contents()) for name, field in reader.fields.items())


def llama_config(facts: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """``config.json`` of the published model, from GGUF metadata."""
    heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts.get("llama.attention.head_count_kv", heads),
        "head_dim": facts["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": _shortest(facts["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(facts["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _shortest(value: float) -> float:
    """GGUF stores float32: 9.9999997e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _write_tensors(reader: gguf.GGUFReader, config: dict[str, Any], file: Path, progress: Progress) -> None:
    stored = {tensor.name: tensor for tensor in reader.tensors}
    wanted = dict(_names(config))
    if missing := wanted.keys() - stored.keys():
        raise WeightsError(f"the GGUF file lacks {len(missing)} tensor(s), such as {min(missing)}")
    if unknown := stored.keys() - wanted.keys():
        raise WeightsError(f"the GGUF file has {len(unknown)} tensor(s) of unknown meaning, such as {min(unknown)}")
    layout = {published: ("BF16", _shape(stored[name])) for name, published in wanted.items()}
    write_safetensors(file, layout, _contents(wanted, stored, config, progress))


def _contents(
    wanted: dict[str, str], stored: dict[str, Any], config: dict[str, Any], progress: Progress
) -> Iterator[bytes]:
    """The tensors' bytes in bfloat16, in the order of *wanted*, one in memory at a time."""
    total, done = sum(int(tensor.n_bytes) for tensor in stored.values()), 0
    for name in wanted:
        rows = stored[name].data  # quantisation runs along a row, so rows can be moved and cut before it is undone
        if heads := _rotated_heads(name, config):
            rows = restore_rotary_rows(rows, heads)
        yield b"".join(_bfloat16(cut, stored[name].tensor_type) for cut in _cuts(rows))
        done += int(stored[name].n_bytes)
        progress("converting the weights", done, total)


def _shape(tensor: Any) -> list[int]:
    """GGUF lists the fastest dimension first."""
    return [int(size) for size in reversed(tensor.shape)]


def _names(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """GGUF name → published name of every tensor."""
    yield "token_embd.weight", "model.embed_tokens.weight"
    for layer in range(config["num_hidden_layers"]):
        for stored, published in _LAYER.items():
            yield f"blk.{layer}.{stored}.weight", f"model.layers.{layer}.{published}.weight"
    yield "output_norm.weight", "model.norm.weight"
    if not config["tie_word_embeddings"]:
        yield "output.weight", "lm_head.weight"


def _rotated_heads(name: str, config: dict[str, Any]) -> int:
    if name.endswith(".attn_q.weight"):
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if name.endswith(".attn_k.weight") else 0


def restore_rotary_rows(rows: _Rows, heads: int) -> _Rows:
    """Undo llama.cpp's row order of a query or key projection, ``[heads * head_dim, …]``.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head as a pair; the published layout pairs row i of a head's
    first half with row i of its second half.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _cuts(rows: _Rows) -> Iterator[_Rows]:
    """Pieces of a few thousand rows: a vocabulary's embedding in float32 is larger than all else together."""
    for start in range(0, len(rows), _CUT_ROWS):
        yield rows[start : start + _CUT_ROWS]


def _bfloat16(rows: _Rows, kind: gguf.GGMLQuantizationType) -> bytes:
    values = gguf.dequantize(rows, kind)
    rounded: NDArray[np.uint8] = gguf.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType.BF16)
    return rounded.tobytes()


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")

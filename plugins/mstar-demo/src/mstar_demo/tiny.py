"""A tiny random SmolLM2 in the published layout: what tests and the conformance suite serve."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from mstar.weights.writer import write_safetensors

__all__ = ["write_smollm2"]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = ("Ġ t", "Ġ a", "h e", "Ġt he", "i n", "r e", "o n", "a t")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HIDDEN, _HEADS, _KV_HEADS, _FFN, _LAYERS, _CONTEXT = 48, 6, 2, 80, 2, 256


def write_smollm2(folder: Path) -> None:
    """Write ``model.safetensors`` (float32, two layers of width 48), its config, tokenizer and template to *folder*."""
    vocab = _write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": _HIDDEN,
        "intermediate_size": _FFN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = _shapes(vocab)
    random = np.random.default_rng(7)
    data = (_values(random, shape).tobytes() for shape in shapes.values())
    write_safetensors(folder / "model.safetensors", {name: ("F32", shape) for name, shape in shapes.items()}, data)


def _values(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Norms around one; matrices wide enough that the next token depends on all before it."""
    return random.normal(1.0 if len(shape) == 1 else 0.0, 0.25, shape).astype("<f4")


def _shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    narrow = _HIDDEN // _HEADS * _KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, _HIDDEN)}
    for layer in range(_LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (_HIDDEN,),
                "self_attn.q_proj": (_HIDDEN, _HIDDEN),
                "self_attn.k_proj": (narrow, _HIDDEN),
                "self_attn.v_proj": (narrow, _HIDDEN),
                "self_attn.o_proj": (_HIDDEN, _HIDDEN),
                "post_attention_layernorm": (_HIDDEN,),
                "mlp.gate_proj": (_FFN, _HIDDEN),
                "mlp.up_proj": (_FFN, _HIDDEN),
                "mlp.down_proj": (_HIDDEN, _FFN),
            }.items()
        }
    return {**shapes, "model.norm.weight": (_HIDDEN,)}


def _write_tokenizer(folder: Path) -> int:
    """Byte-level BPE with a few merges and SmolLM2's special tokens; returns the number of tokens."""
    pieces = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in _MERGES)]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    tokenizer = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return len(pieces)

"""Tiny random checkpoints in both published layouts: ``python -m mstar_qwen3.tiny FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mstar.processing.bpe_files import QWEN2_PATTERN
from mstar_qwen3 import tiny_vision

__all__ = ["TEMPLATE", "text_config", "text_tensors", "tokenizer", "write", "write_text"]

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 32
KEY_HEADS, VALUE_HEADS, STATE_DIM, KERNEL = 2, 4, 16, 4
KINDS = ("linear_attention", "full_attention", "linear_attention", "full_attention")
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of their own, but text."""

TEMPLATE = """
{%- macro said(content) %}
{%- if content is string %}{{ content }}{% else %}
{%- for part in content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{%- endmacro %}
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\nCall one as <tool_call>\\n<function=f>\\n<parameter=x>\\n1\\n</parameter>\\n</function>\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + said(message.content) + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- said(message.content) }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + said(message.content) + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{ '<think>\\n' }}{% endif %}{% endif %}
"""
"""What the published template does with turns, thoughts, tools and media, in few words."""

_CORPUS = [
    "Hello there, how are you today? The capital of France is Paris.",
    "system user assistant tool think name function parameter true false null",
] * 4


def write(folder: Path) -> None:
    """A checkpoint of a few dozen channels into *folder*, in the layout of ``Qwen3_5ForConditionalGeneration``."""
    made = _write_texts(folder)
    ids = {f"{name}_token_id": made.token_to_id(f"<|{name}_pad|>") for name in ("image", "video")}
    ids |= {f"vision_{end}_token_id": made.token_to_id(f"<|vision_{end}|>") for end in ("start", "end")}
    content = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text_config(made, tied=True),
        "vision_config": tiny_vision.config(HIDDEN),
        "tie_word_embeddings": True,
        **ids,
    }
    _write_json(folder / "config.json", content)
    found = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in text_tensors(made, True).items()
    }
    found |= tiny_vision.tensors(HIDDEN)
    for name, preprocessor in tiny_vision.preprocessors().items():
        _write_json(folder / name, preprocessor)
    # the head that drafts several tokens, which nothing here reads
    found["mtp.fc.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def write_text(folder: Path, head_dim: int = HEAD_DIM, state_dim: int = STATE_DIM) -> None:
    """The language model alone, in the layout of ``Qwen3_5ForCausalLM``, with a head of its own.

    :param head_dim: of attention, a multiple of 32. :param state_dim: of the delta nets' keys and values. Kernels for
        GPUs want the published sizes, 256 and 128, or others of their own.
    """
    made = _write_texts(folder)
    content = {"architectures": ["Qwen3_5ForCausalLM"], **text_config(made, False, head_dim, state_dim)}
    _write_json(folder / "config.json", content)
    found = text_tensors(made, False, head_dim, state_dim)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def tokenizer() -> Tokenizer:
    """Byte-level BPE with Qwen's special tokens and tags."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(_CORPUS, trainer)
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in TAGS])
    return made


def text_config(made: Tokenizer, tied: bool, head_dim: int = HEAD_DIM, state_dim: int = STATE_DIM) -> Config:
    """``text_config`` as transformers writes it."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [part * head_dim // 32 for part in (4, 2, 2)],
        "mrope_interleaved": True,
    }
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": made.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": len(KINDS),
        "layer_types": list(KINDS),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "linear_conv_kernel_dim": KERNEL,
        "linear_key_head_dim": state_dim,
        "linear_value_head_dim": state_dim,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "mamba_ssm_dtype": "float32",
        "attn_output_gate": True,
        "tie_word_embeddings": tied,
        "eos_token_id": made.token_to_id("<|endoftext|>"),
    }


def text_tensors(made: Tokenizer, tied: bool, head_dim: int = HEAD_DIM, state_dim: int = STATE_DIM) -> Tensors:
    """The language model's, under the names of ``Qwen3_5ForCausalLM``."""
    draw = torch.Generator().manual_seed(7)

    def normal(*shape: int, width: float = 0.25) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * width

    found: Tensors = {"model.embed_tokens.weight": normal(made.get_vocab_size(), HIDDEN)}
    inner, keys = VALUE_HEADS * state_dim, KEY_HEADS * state_dim
    for layer, kind in enumerate(KINDS):
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        if kind == "full_attention":
            shapes |= {
                "self_attn.q_proj": (2 * HEADS * head_dim, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * head_dim, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * head_dim, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * head_dim),
                "self_attn.q_norm": (head_dim,),
                "self_attn.k_norm": (head_dim,),
            }
        else:
            shapes |= {
                "linear_attn.in_proj_qkv": (2 * keys + inner, HIDDEN),
                "linear_attn.in_proj_z": (inner, HIDDEN),
                "linear_attn.in_proj_b": (VALUE_HEADS, HIDDEN),
                "linear_attn.in_proj_a": (VALUE_HEADS, HIDDEN),
                "linear_attn.out_proj": (HIDDEN, inner),
                "linear_attn.conv1d": (2 * keys + inner, 1, KERNEL),
            }
        own = f"model.layers.{layer}."
        found |= {f"{own}{name}.weight": normal(*shape) for name, shape in shapes.items()}
        if kind == "linear_attention":
            found[f"{own}linear_attn.norm.weight"] = 1 + normal(state_dim)
            found[f"{own}linear_attn.A_log"] = torch.rand(VALUE_HEADS, generator=draw) - 1
            found[f"{own}linear_attn.dt_bias"] = normal(VALUE_HEADS, width=1.0) - 1  # a state that lasts
            found[f"{own}linear_attn.conv1d.weight"] *= 2
    found["model.norm.weight"] = normal(HIDDEN)
    if not tied:
        found["lm_head.weight"] = normal(made.get_vocab_size(), HIDDEN)
    return found


def _write_texts(folder: Path) -> Tokenizer:
    """Tokenizer, template and what ends an answer."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizer()
    made.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    (folder / "chat_template.jinja").write_text(TEMPLATE.lstrip("\n"), encoding="utf-8")
    ends = [made.token_to_id("<|im_end|>"), made.token_to_id("<|endoftext|>")]
    _write_json(folder / "generation_config.json", {"eos_token_id": ends, "do_sample": True, "top_k": 20})
    return made


def _write_json(file: Path, content: Config) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

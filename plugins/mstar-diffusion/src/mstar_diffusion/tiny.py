"""Tiny random checkpoints in the published layout: a folder for each part, as diffusers and transformers write them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mstar.nn.model import BuildContext, Model
from mstar.testing.tiny_tokenizers import EOS, byte_level
from mstar.weights.names import WeightMap

__all__ = ["TEXT_HIDDEN", "write_pipeline"]

TEXT_HIDDEN = 32
_HEADS, _KV_HEADS, _FFN, _LAYERS = 4, 2, 48, 4
_PAD = "<|endoftext|>"
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)


def write_pipeline(
    folder: Path,
    model: type[Model],
    options: Any,
    configs: Mapping[str, Mapping[str, Any]],
    classes: Mapping[str, Any],
    beside: Mapping[str, nn.Module] | None = None,
) -> None:
    """Write a pipeline of *model*'s into *folder*.

    :param configs: part (``transformer``, ``vae``, ``scheduler``) → its configuration. :param classes: the contents of
        ``model_index.json``, with ``library.Class`` for each part. :param beside: folder →
        a module on the meta device whose tensors are published there too, though nothing here needs them.
    """
    vocab = _write_tokenizer(folder / "tokenizer")
    text = _text_config(vocab)
    _write(folder / "text_encoder" / "config.json", text)
    for part, config in configs.items():
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        _write(folder / part / name, config)
    index = {name: kind.split(".") if "." in str(kind) else kind for name, kind in classes.items()}
    _write(folder / "model_index.json", index)
    made = model(BuildContext(folder, torch.float32, torch.device("cpu"), options))
    tensors: dict[str, dict[str, Tensor]] = {"text_encoder": dict(_spare(text))}
    random = torch.Generator().manual_seed(7)
    for node in (spec.name for spec in made.graph().nodes):
        weightmap: WeightMap = made.weights(node)
        with torch.device("meta"):
            module = made.build(node)
        tensors.setdefault(weightmap.folder, {}).update(_drawn(module, weightmap, random))
    for part, more in (beside or {}).items():
        tensors[part].update(_drawn(more, WeightMap.from_module(more), random))
    if "bn.running_mean" in tensors["vae"]:
        tensors["vae"]["bn.num_batches_tracked"] = torch.tensor(0)  # a batch norm's third buffer, for training
    for part, found in tensors.items():
        name = "model.safetensors" if part == "text_encoder" else "diffusion_pytorch_model.safetensors"
        save_file(found, folder / part / name, metadata={"format": "pt"})


def _drawn(module: nn.Module, weightmap: WeightMap, random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Norms around one; matrices wide enough that every token matters, and no wider."""
    targets = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for place in weightmap.placements:
        shape = list(targets[place.target].shape)
        shape[0] = shape[0] if place.rows is None else place.rows
        noise = torch.randn(shape, generator=random)
        if place.published.endswith("running_var"):
            yield place.published, noise.square() + 0.5
        elif place.published.endswith("embed_tokens.weight"):
            yield place.published, noise
        elif len(shape) > 1:
            yield place.published, noise / noise[0].numel() ** 0.5
        else:
            norm = "norm" in place.published.rsplit(".", 2)[-2] and place.published.endswith("weight")
            yield place.published, noise * 0.1 + norm


def _text_config(vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": TEXT_HIDDEN,
        "intermediate_size": _FFN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    }


def _spare(text: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """What a whole language model has behind the layers that are wanted: its last layer and its norm."""
    hidden, head = text["hidden_size"], text["head_dim"]
    last = f"model.layers.{text['num_hidden_layers'] - 1}."
    shapes = {
        "self_attn.q_proj": (_HEADS * head, hidden),
        "self_attn.k_proj": (_KV_HEADS * head, hidden),
        "self_attn.v_proj": (_KV_HEADS * head, hidden),
        "self_attn.o_proj": (hidden, _HEADS * head),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (_FFN, hidden),
        "mlp.up_proj": (_FFN, hidden),
        "mlp.down_proj": (hidden, _FFN),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    yield "model.norm.weight", torch.ones(hidden)
    yield from ((f"{last}{name}.weight", torch.ones(shape)) for name, shape in shapes.items())


def _write_tokenizer(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level()
    tokenizer.add_special_tokens([_PAD])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": _PAD,
        "padding_side": "right",
        "model_max_length": 1024,
        "chat_template": _TEMPLATE,
    }
    _write(folder / "tokenizer_config.json", facts)
    return int(tokenizer.get_vocab_size())


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n")

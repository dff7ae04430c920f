"""The facts of a decoder-only transformer, read from the ``config.json`` that its weights are published with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.spec.errors import SetupError, WeightsError, nearest

__all__ = ["ACTIVATIONS", "DecoderConfig", "MoEConfig", "RopeConfig", "read_config"]

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
"""Activations that :class:`mstar.nn.decoder.GatedMLP` computes, under the names of ``hidden_act``."""

_ACTIVATION_ALIASES = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
# Which optional parts each family has, unless its config says otherwise.
_FAMILIES: Mapping[str, Mapping[str, bool]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
}


@dataclass(frozen=True)
class RopeConfig:
    """How rotary frequencies are made. *scaling* holds the scheme's own keys as published (``factor``…).

    :param kind: ``default``, ``linear``, ``llama3`` or ``yarn``. :param theta: base of the geometric series.
    """

    kind: str = "default"
    theta: float = 10000.0
    scaling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.kind not in _ROPE_KEYS:
            raise SetupError(f"config.json: rope_type {self.kind!r} is not supported{nearest(self.kind, _ROPE_KEYS)}")
        missing = [key for key in _ROPE_KEYS[self.kind] if (self.scaling or {}).get(key) is None]
        if missing:
            raise SetupError(f"config.json: rope_type {self.kind!r} needs {', '.join(missing)}")


@dataclass(frozen=True)
class MoEConfig:
    """Layers of experts (:class:`mstar.nn.moe.MoE`). :param layers: those that have them; others have one gated MLP."""

    experts: int
    active: int
    intermediate: int
    normalized: bool
    layers: frozenset[int]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a Llama-like decoder.

    :param hidden: width of the residual stream. :param heads: query heads; *kv_heads* divides it.
    :param intermediate: width of the gated MLP. :param max_positions: the longest context that the model knows.
    :param windows: per layer the sliding window in tokens (the token itself included), or ``None`` for full attention.
    :param qk_norm: RMS norm over each head of q and k, before the rotation.
    :param moe: layers that have a mixture of experts; ``None``: none.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_positions: int
    norm_eps: float = 1e-6
    activation: str = "silu"
    rope: RopeConfig = RopeConfig()
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise SetupError(
                f"config.json: num_attention_heads {self.heads} is no multiple of num_key_value_heads {self.kv_heads}"
            )
        if self.head_dim % 2:
            raise SetupError(f"config.json: head_dim {self.head_dim} is odd; rotary positions need an even one")
        if self.activation not in ACTIVATIONS:
            raise SetupError(
                f"config.json: hidden_act {self.activation!r} is not supported{nearest(self.activation, ACTIVATIONS)}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """From the contents of a ``config.json`` as transformers writes it (version 4 or 5).

        :raises SetupError: a key is missing, or has a value that these blocks do not compute; names both.
        """
        model_type = str(_need(config, "model_type"))
        if model_type not in _FAMILIES:
            raise SetupError(f"config.json: model_type {model_type!r} is not supported{nearest(model_type, _FAMILIES)}")
        if config.get("quantization_config"):
            raise SetupError("config.json: quantization_config is set, but quantised weights are not supported")
        hidden, heads, layers = (
            _size(config, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        family = _FAMILIES[model_type]
        attention_bias = bool(config.get("attention_bias", False))
        activation = str(config.get("hidden_act", "silu"))
        return cls(
            vocab=_size(config, "vocab_size"),
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", heads),
            head_dim=_size(config, "head_dim", hidden // heads),
            intermediate=_size(config, "intermediate_size"),
            max_positions=_size(config, "max_position_embeddings"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            activation=_ACTIVATION_ALIASES.get(activation, activation),
            rope=_rope(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family.get("qkv_bias", attention_bias),
            o_bias=attention_bias and model_type in ("llama", "qwen3", "qwen3_moe"),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family.get("qk_norm", False),
            windows=_windows(config, model_type, layers),
            moe=_moe(config, activation, layers) if model_type == "qwen3_moe" else None,
        )


def read_config(folder: Path | None) -> dict[str, Any]:
    """The ``config.json`` in *folder*.

    :raises WeightsError: there is no folder, no such file in it, or it is not a JSON object.
    """
    if folder is None:
        raise WeightsError("this model needs weights; name a folder or a Hub id with --weights")
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path} does not exist; the weights' folder must be in the published layout") from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise WeightsError(f"{path} holds {type(config).__name__}, not an object")
    return config


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1; *default* where the key is missing or null."""
    value = config.get(key)
    if value is None:
        value = default if default is not None else _need(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SetupError(f"config.json: {key} is {value!r}; it must be a whole number of at least 1")
    return value


def _need(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise SetupError(f"config.json: {key} is missing")
    return config[key]


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """transformers 5 writes ``rope_parameters``; version 4 wrote ``rope_theta`` and ``rope_scaling``."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = str(rope.pop("rope_type", None) or rope.pop("type", None) or "default")
    partial = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise SetupError(f"config.json: partial_rotary_factor {partial} is not supported; only 1.0 is")
    theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    if kind == "yarn" and not rope.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = _need(config, "max_position_embeddings")
    return RopeConfig(kind, theta, rope)


def _moe(config: Mapping[str, Any], activation: str, layers: int) -> MoEConfig:
    if activation not in ("silu", "swish"):
        raise SetupError(f"config.json: hidden_act {activation!r} is not supported in experts; 'silu' is")
    named = "num_local_experts" if config.get("num_experts") is None else "num_experts"  # as transformers 5 writes it
    experts, active = _size(config, named), _size(config, "num_experts_per_tok")
    if active > experts:
        raise SetupError(f"config.json: num_experts_per_tok {active} is more than {named} {experts}")
    step, plain = _size(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return MoEConfig(
        experts,
        active,
        _size(config, "moe_intermediate_size"),
        bool(config.get("norm_topk_prob", False)),
        frozenset(index for index in range(layers) if index not in plain and (index + 1) % step == 0),
    )


def _windows(config: Mapping[str, Any], model_type: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window or model_type == "llama":
        return ()
    if model_type == "mistral":
        return (int(window),) * layers
    if not config.get("use_sliding_window", False):
        return ()
    kinds = config.get("layer_types")
    if kinds is None:  # written before transformers 4.53: the first max_window_layers layers see everything
        full = int(config.get("max_window_layers", layers))
        kinds = ["full_attention" if index < full else "sliding_attention" for index in range(layers)]
    known = {"full_attention": None, "sliding_attention": int(window)}
    if len(kinds) != layers:
        raise SetupError(f"config.json: layer_types has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        if kind not in known:
            raise SetupError(f"config.json: layer_types has {kind!r}, which is not supported{nearest(kind, known)}")
    return tuple(known[kind] for kind in kinds)

"""The sizes of a checkpoint, from its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mstar.nn.config import RopeConfig
from mstar.spec.errors import SetupError, nearest

__all__ = ["Qwen35Config", "TextConfig"]

Kind = Literal["linear_attention", "full_attention"]
_KINDS = ("linear_attention", "full_attention")
_TEXT_ONLY = "qwen3_5_text"
_MODEL_TYPES = ("qwen3_5", _TEXT_ONLY)


@dataclass(frozen=True)
class TextConfig:
    """The language model's sizes.

    :param kinds: of each layer. :param rope: frequencies of the *rotary_dims* of each head's *head_dim* elements that
        are rotated. :param sections: of those frequencies, how many turn with time, height and width.
    :param key_heads: of the gated delta net; *value_heads* is a multiple of it. :param kernel: taps of its convolution.
    :param state_dtype: of its matrix state, as the checkpoint has it.
    """

    vocab: int
    hidden: int
    intermediate: int
    kinds: tuple[Kind, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dims: int
    rope: RopeConfig
    sections: tuple[int, int, int]
    max_positions: int
    norm_eps: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_dtype: Literal["float32", "bfloat16"]
    tied: bool

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that attend, and so have keys and values."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind == "full_attention")

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The gated DeltaNet layers, which have a state."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind == "linear_attention")

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], tied: bool) -> TextConfig:
        """From ``text_config``, or the whole file of a checkpoint without vision.

        :param tied: where *config* does not say whether the head is the embedding.
        :raises SetupError: a key is missing, or has a value that this model does not compute.
        """
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        head_dim = _size(config, "head_dim", 256)
        factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
        found = cls(
            vocab=_size(config, "vocab_size"),
            hidden=_size(config, "hidden_size"),
            intermediate=_size(config, "intermediate_size"),
            kinds=_kinds(config),
            heads=_size(config, "num_attention_heads"),
            kv_heads=_size(config, "num_key_value_heads"),
            head_dim=head_dim,
            rotary_dims=int(head_dim * factor),
            rope=_rope(config, rope),
            sections=_sections(rope),
            max_positions=_size(config, "max_position_embeddings"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            key_heads=_size(config, "linear_num_key_heads"),
            value_heads=_size(config, "linear_num_value_heads"),
            key_dim=_size(config, "linear_key_head_dim"),
            value_dim=_size(config, "linear_value_head_dim"),
            kernel=_size(config, "linear_conv_kernel_dim", 4),
            state_dtype=_one_of(config, "mamba_ssm_dtype", ("float32", "bfloat16"), "float32"),
            tied=bool(config.get("tie_word_embeddings", tied)),
        )
        _one_of(config, "hidden_act", ("silu", "swish"), "silu")
        _one_of(config, "output_gate_type", ("silu", "swish"), "silu")
        for key, value in (("attention_bias", False), ("attn_output_gate", True)):
            if bool(config.get(key, value)) is not value:
                raise SetupError(f"config.json: {key} is {config[key]!r}, which is not supported; only {value} is")
        found._check()
        return found

    def _check(self) -> None:
        for what, more, fewer in (
            ("num_attention_heads", self.heads, self.kv_heads),
            ("linear_num_value_heads", self.value_heads, self.key_heads),
        ):
            if more % fewer:
                raise SetupError(f"config.json: {what} {more} is no multiple of its {fewer} key heads")
        if self.kernel < 2:
            raise SetupError(f"config.json: linear_conv_kernel_dim is {self.kernel}; it must be at least 2")
        if self.rotary_dims % 2 or sum(self.sections) != self.rotary_dims // 2:
            raise SetupError(
                f"config.json: mrope_section {list(self.sections)} must sum to half of the {self.rotary_dims} elements "
                f"of a head that are rotated"
            )
        if not self.full_layers or not self.linear_layers:
            raise SetupError("config.json: layer_types must have layers of both kinds, linear and full attention")


@dataclass(frozen=True)
class Qwen35Config:
    """A whole checkpoint's.

    :param text_layout: published as a language model alone (``Qwen3_5ForCausalLM``): ``model.layers`` and not
        ``model.language_model.layers``.
    :param vision: ``vision_config`` as published; ``None`` in a checkpoint of the language model alone, which has none
        of the tokens below either.
    :param image_token: the prompt's id in whose places a picture's embeddings are put; *video_token*: a video's.
    :param vision_start: the ids around each run of them, with *vision_end*.
    """

    text: TextConfig
    text_layout: bool = False
    vision: Mapping[str, Any] | None = None
    image_token: int | None = None
    video_token: int | None = None
    vision_start: int | None = None
    vision_end: int | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen35Config:
        """:raises SetupError: a key is missing, or has a value that this model does not compute."""
        kind = str(config.get("model_type"))
        if kind not in _MODEL_TYPES:
            raise SetupError(f"config.json: model_type {kind!r} is not supported{nearest(kind, _MODEL_TYPES)}")
        if config.get("quantization_config"):
            raise SetupError("config.json: quantization_config is set, but quantised weights are not supported")
        if kind == _TEXT_ONLY:
            return cls(TextConfig.from_hf(config, tied=False), text_layout=True)
        if not isinstance(config.get("text_config"), Mapping):
            raise SetupError("config.json: text_config is missing")
        # both levels have the key; the outer one is what transformers ties by
        tied = bool(config.get("tie_word_embeddings", config["text_config"].get("tie_word_embeddings", False)))
        text = TextConfig.from_hf({**config["text_config"], "tie_word_embeddings": tied}, tied)
        vision = config.get("vision_config")
        if vision is None:
            return cls(text)
        tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        return cls(text, False, vision, *(_size(config, name) for name in tokens))


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise SetupError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SetupError(f"config.json: {key} is {value!r}; it must be a whole number of at least 1")
    return value


def _one_of(config: Mapping[str, Any], key: str, known: tuple[Any, ...], default: str) -> Any:
    value = config.get(key)
    if value is None:
        return default
    if value not in known:
        raise SetupError(f"config.json: {key} {value!r} is not supported{nearest(str(value), known)}")
    return value


def _kinds(config: Mapping[str, Any]) -> tuple[Kind, ...]:
    """``layer_types``; without it every ``full_attention_interval``-th layer attends."""
    layers = _size(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        every = _size(config, "full_attention_interval", 4)
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise SetupError(f"config.json: layer_types has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        if kind not in _KINDS:
            raise SetupError(f"config.json: layer_types has {kind!r}, which is not supported{nearest(kind, _KINDS)}")
    return tuple(kinds)


def _rope(config: Mapping[str, Any], rope: Mapping[str, Any]) -> RopeConfig:
    """YaRN is how the authors say to go beyond ``max_position_embeddings``."""
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000_000)
    kind = _one_of(rope, "rope_type", ("default", "yarn"), "default")
    if kind == "yarn" and not rope.get("original_max_position_embeddings"):
        rope = {**rope, "original_max_position_embeddings": _size(config, "max_position_embeddings")}
    return RopeConfig(kind, theta, rope)


def _sections(rope: Mapping[str, Any]) -> tuple[int, int, int]:
    sections = tuple(rope.get("mrope_section") or (11, 11, 10))
    if len(sections) != 3 or not all(isinstance(size, int) and size >= 0 for size in sections):
        raise SetupError(f"config.json: mrope_section is {list(sections)}; it must be three whole numbers")
    if not rope.get("mrope_interleaved", True):
        raise SetupError("config.json: mrope_interleaved is false, which is not supported; only true is")
    return sections

"""The shapes that are measured: published configurations, what they cost, and how much of each measure is taken.

No torch: the program that starts everything stays light.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mstar.nn.config import DecoderConfig

__all__ = ["CHECKED", "FULL", "SHAPES", "SMOKE", "Shape", "Sizes", "sizes_of"]

_QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "vocab_size": 151936,
}
_LLAMA3_ROPE: Mapping[str, Any] = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_TINY: Mapping[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "vocab_size": 640,
}


@dataclass(frozen=True)
class Shape:
    """A decoder's ``config.json``, and the figures that follow from it. Bytes are those of bfloat16."""

    name: str
    config: Mapping[str, Any]

    @cached_property
    def facts(self) -> DecoderConfig:
        return DecoderConfig.from_hf(self.config)

    @property
    def layer_products(self) -> list[tuple[str, int, int]]:
        """(name, outputs, inputs) of one layer's matrix products, fused as a server fuses them."""
        c = self.facts
        return [
            ("qkv", (c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
            ("o", c.hidden, c.heads * c.head_dim),
            ("gate_up", 2 * c.intermediate, c.hidden),
            ("down", c.hidden, c.intermediate),
        ]

    @property
    def layer_weights(self) -> int:
        """Weights of the matrix products of all layers, the head left out."""
        return self.facts.layers * sum(out * inner for _, out, inner in self.layer_products)

    @property
    def head_weights(self) -> int:
        return self.facts.vocab * self.facts.hidden

    @property
    def read_bytes(self) -> int:
        """What one decode step must read of the weights: all products and the head."""
        return 2 * (self.layer_weights + self.head_weights)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token."""
        c = self.facts
        return 2 * 2 * c.layers * c.kv_heads * c.head_dim

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt of *tokens*: the products, causal attention (half of the square), one row's head."""
        c = self.facts
        attention = 4 * c.layers * c.heads * c.head_dim * tokens * (tokens + 1) / 2
        return 2.0 * self.layer_weights * tokens + attention + 2.0 * self.head_weights


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
            "llama-3.2-3b",
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "attention_bias": False,
                "bos_token_id": 128000,
                "eos_token_id": 128001,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 3072,
                "intermediate_size": 8192,
                "max_position_embeddings": 131072,
                "mlp_bias": False,
                "num_attention_heads": 24,
                "num_hidden_layers": 28,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "rope_scaling": _LLAMA3_ROPE,
                "rope_theta": 500000.0,
                "tie_word_embeddings": True,
                "vocab_size": 128256,
            },
        ),
        Shape(
            "qwen3-0.6b",
            {
                **_QWEN3,
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_attention_heads": 16,
                "num_hidden_layers": 28,
                "tie_word_embeddings": True,
            },
        ),
        Shape(
            "qwen3-8b",
            {
                **_QWEN3,
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_attention_heads": 32,
                "num_hidden_layers": 36,
                "tie_word_embeddings": False,
            },
        ),
        Shape(
            "tiny",
            {
                **_TINY,
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "head_dim": 16,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
            },
        ),
        Shape(
            "check-llama-64",
            {
                **_TINY,
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "head_dim": 64,
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_attention_heads": 8,
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "rope_scaling": {**_LLAMA3_ROPE, "original_max_position_embeddings": 64},
                "rope_theta": 500000.0,
                "tie_word_embeddings": False,
            },
        ),
        Shape(
            "check-qwen3-128",
            {
                **_TINY,
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "head_dim": 128,
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_attention_heads": 4,
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
            },
        ),
    )
}
"""By name. The three published ones are measured; the others are for checks and smoke runs."""

CHECKED = ("check-llama-64", "check-qwen3-128")
"""Small shapes of the parity check: head sizes 64 and 128, scaled and plain positions, without and with norms of heads,
with a head of its own and a tied one."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Tokens, requests and steps.

    :param prompt: of decode and load. :param step_tokens: the scheduler's ``max_step_tokens``, so large that each
        measured prompt is one step. :param context: the longest context served.
    :param warm: steps before a window. :param steps: steps timed. :param profiled: steps under the profiler.
    :param loads: (requests at once, new tokens each) of runs that are timed from first prompt to last token.
    :param host_batch: the batch whose host cost is taken apart.
    :param http: (streams, new tokens) of the HTTP run; one of *loads*, with which it is compared.
    :param first_token: (streams, prompt, requests a stream) of the run for the time to first token.
    """

    prompt: int = 1024
    batches: tuple[int, ...] = (1, 8, 32, 64, 128)
    prefills: tuple[int, ...] = (512, 2048, 8192)
    step_tokens: int = 8192
    context: int = 9216
    warm: int = 16
    steps: int = 96
    profiled: int = 32
    repeats: int = 5
    loads: tuple[tuple[int, int], ...] = ((32, 256), (64, 256))
    host_batch: int = 32
    http: tuple[int, int] = (64, 256)
    first_token: tuple[int, int, int] = (8, 256, 4)
    peer_tokens: tuple[int, int] = (32, 160)
    gemm: int = 8192
    copy_bytes: int = 4 << 30

    def pool_tokens(self) -> int:
        """Keys and values that fit the largest batch with its answers, or the longest prompt."""
        return max(self.batches[-1], self.http[0]) * (self.prompt + self.answer()) + self.context

    def answer(self) -> int:
        """Most new tokens of a request of ``decode``: the first of a batch goes on while the last prompt is read, for
        two windows and two runs of steps before them."""
        reading = 2 * self.batches[-1] * self.prompt // self.step_tokens
        return 2 * reading + 3 * self.warm + 2 * self.steps + 2 * self.profiled + 64


FULL = Sizes()
SMOKE = Sizes(
    prompt=20,
    batches=(1, 3),
    prefills=(16, 48),
    step_tokens=64,
    context=512,
    warm=2,
    steps=6,
    profiled=4,
    repeats=2,
    loads=((3, 12),),
    host_batch=3,
    http=(3, 12),
    first_token=(2, 60, 2),
    peer_tokens=(2, 6),
    gemm=64,
    copy_bytes=1 << 20,
)


def sizes_of(shape: str) -> Sizes:
    return SMOKE if shape == "tiny" or shape in CHECKED else FULL

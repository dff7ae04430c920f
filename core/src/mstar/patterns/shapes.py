"""What the patterns' resources need to know of an autoregressive decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mstar.nn.config import DecoderConfig
from mstar.spec.errors import SetupError
from mstar.spec.knobs import TextOptions
from mstar.spec.request import EngineRequest, SamplingParams
from mstar.spec.resources import PagedKV, Sampler

__all__ = ["DecoderShape", "answer_tokens", "context_length"]


@dataclass(frozen=True)
class DecoderShape:
    """The sizes behind a decoder's KV cache and sampler.

    :param vocab: width of the logits. :param max_tokens: the longest context, prompt and answer together.
    :param windows: per layer the sliding window in tokens, or ``None`` for full attention; empty = all full.
    """

    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_tokens: int
    windows: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, config: DecoderConfig, max_tokens: int | None = None) -> DecoderShape:
        """The shape of a Llama-like decoder. *max_tokens*: default, what its positions allow."""
        return cls(
            vocab=config.vocab,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_tokens=max_tokens or config.max_positions,
            windows=config.windows,
        )

    def kv(self) -> PagedKV:
        return PagedKV(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            query_heads=self.heads,
            max_tokens=self.max_tokens,
            windows=self.windows,
        )

    def sampler(self, prompt: str | None = "prompt") -> Sampler:
        return Sampler(vocab=self.vocab, prompt=prompt)


def answer_tokens(request: EngineRequest) -> int:
    """The most tokens that *request* may generate."""
    return request.sampling.get("sampler", SamplingParams()).max_tokens


def context_length(options: Any, config: DecoderConfig) -> int:
    """The longest context that is served: what the deployment's *options* say under ``max_tokens``, or all that the
    model's positions allow.

    :raises SetupError: they say more than that.
    """
    wanted = TextOptions.of(options).max_tokens or config.max_positions
    if wanted > config.max_positions:
        raise SetupError(f"model_kwargs.max_tokens is {wanted!r}; the model takes 2 to {config.max_positions}")
    return wanted

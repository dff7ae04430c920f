"""The start-up check: a first small step on FlashInfer, in each way that a need will be served, against torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mstar.resources.attention.base import AttentionNeed, KVBatch
from mstar.resources.attention.memory import KVMemory
from mstar.resources.staging import Stage

if TYPE_CHECKING:
    from mstar.resources.attention.flashinfer import FlashInferAttention

__all__ = ["first_step"]

_TOLERANCE = 5e-2
"""A few roundings of bfloat16 of results below 4."""
_PROMPTS, _CONTEXTS = (150, 3), (37, 5, 1)
_MOST = 160
"""Tokens that no context of the check exceeds."""
_WINDOW = 4


@torch.no_grad()
def first_step(backend: FlashInferAttention, need: AttentionNeed) -> str | None:
    """``None``, or how the results differ. What FlashInfer raises goes to the caller."""
    library = backend.library(need.device)
    library.fault = None
    pairs = _ragged(backend, need) if need.mode == "ragged" else _paged(backend, need)
    for what, got, wanted in pairs:
        if library.fault is not None:
            return library.fault
        worst = float((got.float() - wanted.float()).abs().max())
        if not worst <= _TOLERANCE:  # NaN too
            return f"its {what} differs from PyTorch's by {worst:.3g}"
    return None


def _random(tokens: int, heads: int, need: AttentionNeed) -> Tensor:
    generator = torch.Generator(need.device).manual_seed(tokens * heads)
    shape = (tokens, heads, need.head_dim)
    return torch.randn(shape, generator=generator, device=need.device, dtype=torch.float32).to(need.dtype)


def _ragged(backend: FlashInferAttention, need: AttentionNeed) -> Iterator[tuple[str, Tensor, Tensor]]:
    stage = Stage(need.device)
    for lengths in (_PROMPTS, _CONTEXTS):
        total = sum(lengths)
        q, k, v = (_random(total, heads, need) for heads in (need.query_heads, need.kv_heads, need.kv_heads))
        for causal in (False, True):
            plans = backend.plan_ragged(lengths, stage, "check"), backend.torch_ragged(lengths, stage, "check")
            got, wanted = (plan.attend(q, k, v, causal=causal) for plan in plans)
            yield "attention within a step", got, wanted


def _paged(backend: FlashInferAttention, need: AttentionNeed) -> Iterator[tuple[str, Tensor, Tensor]]:
    size, stage = need.page_size, Stage(need.device)
    pages = -(-_MOST // size)
    memory = KVMemory(1, 3 * pages * size, need.kv_heads, need.head_dim, need.dtype, need.device)
    memory.data.copy_(_random(memory.data[0].numel() // need.head_dim, 1, need).view(memory.data.shape))
    tables = np.random.default_rng(0).permutation(3 * pages).astype(np.int32).reshape(3, pages)
    steps = (
        ("decoding", np.ones(3, np.int64), np.asarray(_CONTEXTS, np.int64)),
        ("prefill of long prompts", np.asarray(_PROMPTS, np.int64), np.asarray((2, 9), np.int64)),
        ("prefill of short prompts", np.asarray((5, 3), np.int64), np.asarray((20, 7), np.int64)),
    )
    for what, lengths, starts in steps:
        batch = KVBatch(lengths, starts, tables[: len(lengths)], size)
        q = _random(int(lengths.sum()), need.query_heads, need)
        plans = backend.plan_kv(memory, batch, stage, "check"), backend.torch_plan(memory, batch, stage, "check")
        for window in (None, _WINDOW) if need.windows else (None,):
            got, wanted = (plan.attend(0, q, None, None, window=window) for plan in plans)
            yield what, got, wanted

"""Attention written out in float64, one query at a time, and a driver that compares a KV resource with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mstar.resources.attention import AttentionBackend, AttentionNeed
from mstar.resources.attention.flashinfer import FlashInferAttention
from mstar.resources.attention.numba_cpu import NumbaAttention
from mstar.resources.attention.torch_sdpa import TorchAttention
from mstar.resources.base import Owner, Resource, ResourceContext, Row
from mstar.resources.staging import Stage


class FlashInferOnCPU(FlashInferAttention):
    """On the stand-in, which takes any dtype and head size."""

    def supports(self, need: AttentionNeed) -> str | None:
        return None


BACKENDS: dict[str, type[AttentionBackend]] = {
    "torch_sdpa": TorchAttention,
    "numba_cpu": NumbaAttention,
    "flashinfer": FlashInferOnCPU,
}
backend_in_use = "torch_sdpa"
"""Set by the fixture in ``conftest.py``, which runs a module's tests with every backend."""


def make_context(max_owners: int = 8, memory: int | None = None, dtype: torch.dtype = torch.float32) -> ResourceContext:
    backends = [BACKENDS[backend_in_use](), TorchAttention()]
    return ResourceContext(torch.device("cpu"), dtype, max_owners, memory, backends, stage=Stage("cpu"))


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    *,
    causal: bool = True,
    window: int | None = None,
    sink: int = 0,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Queries q ``[n, Hq, D]`` at positions start… over the whole history k, v ``[L, Hkv, D]``, in float64."""
    shared = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros_like(q)
    for i in range(q.shape[0]):
        position = start + i
        seen = [
            j
            for j in range(k.shape[0])
            if (j <= position if causal else True)
            and (window is None or j > position - window or j < sink or (not causal and j >= start))
        ]
        for head in range(q.shape[1]):
            logits = (k[seen, head // shared] @ q[i, head]) * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            out[i, head] = torch.softmax(logits, 0) @ v[seen, head // shared]
    return out


class Driver:
    """Runs steps on *resource* with random tensors and checks every row against :func:`reference`."""

    def __init__(self, resource: Resource, layers: int, heads: int, kv_heads: int, dim: int, seed: int = 0):
        self.resource, self.layers, self.shape = resource, layers, (heads, kv_heads, dim)
        self.random = torch.Generator().manual_seed(seed)
        self.history: dict[Owner, list[Tensor]] = {}
        self.windows: Sequence[int | None] = [None] * layers
        self.sink = 0

    def draw(self, n: int, heads: int) -> Tensor:
        return torch.randn(n, heads, self.shape[2], generator=self.random, dtype=torch.float32)

    def past(self, owner: Owner, layer: int) -> Tensor:
        """``[2, tokens, Hkv, D]`` float64."""
        empty = torch.zeros(2, 0, *self.shape[1:], dtype=torch.float64)
        return self.history.setdefault(owner, [empty] * self.layers)[layer]

    def step(
        self, rows: list[Row], *, frozen: bool = False, fail: bool = False, causal: bool = True, **options: Any
    ) -> list[Tensor]:
        heads, kv_heads, _ = self.shape
        view = self.resource.plan(rows, frozen)
        starts = [self.past(row.owner, 0).shape[1] for row in rows]
        expected_positions = [s + i for s, row in zip(starts, rows, strict=True) for i in range(row.length)]
        assert view.positions.tolist() == expected_positions
        total, grown, outs = sum(row.length for row in rows), [], []
        for layer in range(self.layers):
            q, k, v = self.draw(total, heads), self.draw(total, kv_heads), self.draw(total, kv_heads)
            out = view.attend(layer, q, k, v, causal=causal, **options)
            assert out.shape == q.shape
            assert out.dtype == q.dtype
            outs.append(out)
            begin = 0
            for row, start in zip(rows, starts, strict=True):
                part = slice(begin, begin + row.length)
                begin += row.length
                own = torch.stack((k[part], v[part])).double()
                full = torch.cat((self.past(row.owner, layer), own), 1)
                wanted = reference(
                    q[part].double(),
                    full[0],
                    full[1],
                    start,
                    causal=causal,
                    window=self.windows[layer],
                    sink=self.sink,
                    **options,
                )
                torch.testing.assert_close(out[part].double(), wanted, rtol=1e-5, atol=2e-6)
                grown.append((row.owner, layer, full))
        if fail:
            self.resource.rollback(rows, frozen)
            return outs
        self.resource.commit(rows, frozen)
        if not frozen:
            for owner, layer, full in grown:
                self.history[owner] = [full if i == layer else t for i, t in enumerate(self.history[owner])]
        return outs

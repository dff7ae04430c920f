"""A step without an engine: plain views over Python lists, as an independent oracle for nodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mstar.nn import ops
from mstar.nn.node import Sampled, Step
from mstar.nn.rotary import Rotation

sys.path.append(str(Path(__file__).parent))  # for seeing


class PlainKV:
    """Keys and values of some contexts as plain tensors; attention in float64, one row and one head group at a time."""

    def __init__(self, layers: int, contexts: int, windows: Sequence[int | None] = ()):
        self.windows = tuple(windows) or (None,) * layers
        self.cache: list[list[tuple[Tensor, Tensor] | None]] = [[None] * layers for _ in range(contexts)]
        self.rows: list[tuple[int, int]] = []  # (context, length) of the current step

    def attend_heads(
        self, layer: int, heads: Tensor, q_heads: int, rotation: Rotation, norms: ops.HeadNorms | None
    ) -> Tensor:
        q, k, v = ops.rotate_store(heads, q_heads, rotation.cos, rotation.sin, norms, None, None, None)
        out, begin = [], 0
        for context, length in self.rows:
            part = slice(begin, begin + length)
            out.append(self._row(layer, context, q[part], k[part], v[part]))
            begin += length
        return torch.cat(out)

    def _row(self, layer: int, context: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = self.cache[context][layer]
        if past is not None:
            k, v = torch.cat((past[0], k)), torch.cat((past[1], v))
        self.cache[context][layer] = (k.clone(), v.clone())
        keys = torch.arange(len(k))
        queries = keys[-len(q) :, None]
        seen = keys <= queries
        if self.windows[layer] is not None:
            seen &= keys > queries - self.windows[layer]
        group = q.shape[1] // k.shape[1]
        k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


class PlainPositions:
    def __init__(self, contexts: int):
        self.done = [0] * contexts
        self.positions = torch.zeros(0, dtype=torch.int64)

    def plan(self, rows: Sequence[tuple[int, int]]) -> None:
        spans = [torch.arange(self.done[context], self.done[context] + length) for context, length in rows]
        self.positions = torch.cat(spans)
        for context, length in rows:
            self.done[context] += length


class Greedy:
    """Takes the most likely token and remembers the logits."""

    def __init__(self) -> None:
        self.logits = torch.zeros(0)

    def sample(self, logits: Tensor) -> Sampled:
        self.logits = logits
        return Sampled(logits.argmax(-1))


class PlainRun:
    """Runs a causal LM's node step by step over *contexts* independent contexts."""

    def __init__(self, node: torch.nn.Module, layers: int, contexts: int, windows: Sequence[int | None] = ()):
        self.node = node
        self.kv, self.positions, self.sampler = PlainKV(layers, contexts, windows), PlainPositions(contexts), Greedy()

    def step(self, ids: dict[int, list[int]]) -> tuple[Tensor, Tensor]:
        """*ids*: context → its tokens of this step. Returns (logits ``[rows, V]``, greedy tokens ``[rows]``)."""
        rows = [(context, len(tokens)) for context, tokens in ids.items()]
        self.kv.rows = rows
        self.positions.plan(rows)
        lengths = [length for _, length in rows]
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        step = Step(
            lengths=lengths,
            offsets=offsets,
            last=offsets[1:] - 1,
            complete=[True] * len(rows),
            views={"kv": self.kv, "positions": self.positions, "sampler": self.sampler},
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        with torch.inference_mode():
            out = self.node(step, ids=torch.tensor([token for tokens in ids.values() for token in tokens]))
        return self.sampler.logits.clone(), out["token"].ids


@pytest.fixture
def plain_run() -> type[PlainRun]:
    return PlainRun

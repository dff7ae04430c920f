"""Attention that does not depend on the rest of the step: right, and the same bits however a step is made up.

Run by ``test_cuda_cases.py`` in Triton's interpreter, on the CPU; on a machine with a GPU ``pytest`` of this file runs
it there.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.nn.ops import cuda_invariant
from mstar.nn.ops.cuda_invariant import LINES, Scratch, attend
from mstar.resources.attention import KVBatch, KVMemory, batch_invariant
from mstar.resources.attention.batch_invariant import BatchInvariantAttention, tile_table
from mstar.resources.staging import Lane, Stage

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float16  # the interpreter multiplies no matrices of bfloat16
SIZE, PAGE = 64, 16

# numpy, which interprets the kernels, warns where a GPU computes infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _products(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's products differ in the last bit by where in a matrix a row stands; tensor cores' do not."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        terms = a.data.astype(np.float32)[:, None, :] * np.ascontiguousarray(b.data.astype(np.float32).T)[None]
        return TensorHandle(terms.sum(-1, dtype=np.float32) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short contexts have several."""
    monkeypatch.setattr(cuda_invariant, "PIECE", 64)


class Case:
    """Rows of known queries, keys and values, in shuffled pages."""

    def __init__(self, contexts: list[int], group: int, kv_heads: int = 1, most: int = 256):
        random = np.random.default_rng(len(contexts))
        torch.manual_seed(len(contexts) + group)
        self.contexts, self.heads, self.kv_heads = contexts, group * kv_heads, kv_heads
        per_row = most // PAGE
        self.tables = random.permutation(len(contexts) * per_row).astype(np.int32).reshape(len(contexts), per_row)
        self.memory = KVMemory(1, self.tables.size * PAGE, kv_heads, SIZE, DTYPE, DEVICE)
        self.memory.data.copy_(torch.randn(self.memory.data.shape).to(DTYPE))
        self.queries = [torch.randn(n, self.heads, SIZE).to(DTYPE).to(DEVICE) for n in contexts]
        self.backend = BatchInvariantAttention()

    def step(
        self, *spans: tuple[int, int, int], lane: Lane | None = None, stage: Stage | None = None, **how: Any
    ) -> Any:
        """Attention of (row, first, last + 1) queries each in one step; a tensor for each."""
        rows = [row for row, _, _ in spans]
        lengths = np.array([end - begin for _, begin, end in spans], np.int64)
        starts = np.array([begin for _, begin, _ in spans], np.int64)
        batch = KVBatch(lengths, starts, self.tables[rows], PAGE, query_heads=self.heads)
        stage = stage or Stage(DEVICE)
        stage.begin(lane)
        plan = self.backend.plan_kv(self.memory, batch, stage, "kv")
        stage.send()
        q = torch.cat([self.queries[row][begin:end] for row, begin, end in spans])
        return plan.attend(0, q, None, None, **how).split(lengths.tolist())

    def exact(self, row: int, window: int | None = None, causal: bool = True, softcap: float | None = None) -> Tensor:
        count = self.contexts[row]
        token = np.arange(count)
        places = torch.from_numpy(self.tables[row, token // PAGE].astype(np.int64) * PAGE + token % PAGE)
        k, v = (x[places.to(DEVICE)].float().view(count, self.kv_heads, SIZE).cpu() for x in self.memory.keys_values(0))
        shared = self.heads // self.kv_heads
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        logits = torch.einsum("qhd,khd->hqk", self.queries[row].float().cpu(), k) * SIZE**-0.5
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        at = torch.arange(count)
        hidden = (at[None, :] > at[:, None]) if causal else torch.zeros(count, count, dtype=torch.bool)
        if window is not None:
            hidden = hidden | (at[None, :] <= at[:, None] - window)
        return torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, float("-inf")).softmax(-1), v)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.float().cpu(), wanted, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("how", [{}, {"window": 50}, {"softcap": 3.0}, {"causal": False}])
def test_attention_is_right(group: int, how: dict[str, Any]) -> None:
    case = Case([150, 3], group, kv_heads=2)
    got = case.step((0, 140, 150), (1, 0, 3), **how)
    for row, result in enumerate(got):
        close(result, case.exact(row, **how)[-len(result) :])


@pytest.mark.parametrize("window", [None, 70])
def test_a_query_has_the_same_bits_in_any_step(window: int | None) -> None:
    """Alone and among others, in a prompt, in chunks and as a decoding row; by one program a context or several."""
    case = Case([150, 5, 20], 3)
    whole = case.step((0, 0, 150), (1, 0, 5), (2, 0, 20), window=window)
    for begin, end in ((0, 1), (63, 66), (67, 133), (146, 150)):
        chunk, decoded, other = case.step((0, begin, end), (1, 4, 5), (2, 7, 8), window=window)
        assert torch.equal(chunk, whole[0][begin:end])
        assert torch.equal(decoded, whole[1][4:])
        assert torch.equal(other, whole[2][7:8])
    for last in (1, 64, 65, 128, 129, 150):
        assert torch.equal(case.step((0, last - 1, last), window=window)[0], whole[0][last - 1 : last])


def test_how_many_programs_share_a_context_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([200, 190], 2)
    spans = ((0, 190, 200), (1, 189, 190))
    wanted, seen = None, set()
    for filled in (0, 1, 1000):
        monkeypatch.setattr(batch_invariant, "_FILLED", filled)
        monkeypatch.setattr(case.backend, "_scratch", {})
        real = case.backend.room

        def room(device: torch.device, shares: int, sums: int, counters: int, real: Any = real) -> Any:
            seen.add(counters > 1)
            return real(device, shares, sums, counters)

        monkeypatch.setattr(case.backend, "room", room)
        got = torch.cat(case.step(*spans))
        assert wanted is None or torch.equal(got, wanted)
        wanted = got
        for _, _, counters in case.backend._scratch.values():
            assert not counters.any()
    assert seen == {False, True}


@pytest.mark.parametrize("tokens", [4, 40])
def test_steps_on_a_lane_are_those_beside_it(tokens: int) -> None:
    """Decoding, and rows of several queries with padding; refilled with other steps."""
    case, stage = Case([200, 180, 9, 40], 3), Stage(DEVICE)
    lane = Lane(4, DEVICE, tokens=tokens)
    steps = {
        4: [((0, 199, 200), (1, 179, 180), (2, 8, 9), (3, 0, 1)), ((0, 17, 18), (1, 127, 128), (2, 2, 3), (3, 1, 2))],
        40: [((0, 180, 200), (1, 170, 180), (2, 0, 9), (3, 39, 40)), ((0, 0, 2), (1, 2, 38), (2, 8, 9), (3, 0, 1))],
    }[tokens]
    addresses = set()
    for spans in steps:
        got = torch.cat(case.step(*spans, lane=lane, stage=stage))
        addresses.add(lane.kept["kv.batch_invariant"]._tiles.data_ptr())
        assert torch.equal(got, torch.cat(case.step(*spans)))
    assert len(addresses) == 1


def test_garbage_beyond_a_context_is_not_read() -> None:
    case = Case([70], 2)
    wanted = case.step((0, 0, 70))[0]
    token = np.arange(70, 256)
    places = torch.from_numpy(case.tables[0, token // PAGE].astype(np.int64) * PAGE + token % PAGE).to(DEVICE)
    case.memory.data[0][:, places] = torch.nan
    assert torch.equal(case.step((0, 0, 70))[0], wanted)


def test_tiles() -> None:
    lengths, starts = np.array([1, 0, 7]), np.array([9, 3, 2])
    table = tile_table(lengths, starts, np.array([0, 1, 2, 3], np.int32), 5)
    assert table.tolist() == [[0, 1, 0, 9, 10], [1, 5, 2, 2, 9], [6, 2, 2, 7, 9]]


def test_tiles_without_queries_are_skipped() -> None:
    case = Case([5], 1)
    tiles = torch.zeros((2, 5), dtype=torch.int32, device=DEVICE)
    tiles[0] = torch.tensor([0, 5, 0, 0, 5])
    indices = torch.from_numpy(case.tables[0]).to(DEVICE)
    empty = torch.empty(0, device=DEVICE)
    scratch = Scratch(empty, empty, torch.zeros(2, dtype=torch.int32, device=DEVICE), 1, 1, LINES)
    got = attend(case.queries[0], *case.memory.keys_values(0), tiles, indices, PAGE, 1, scratch)
    close(got, case.exact(0))

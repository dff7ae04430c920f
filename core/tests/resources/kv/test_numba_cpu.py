"""What the numba backend promises beyond the tests that every backend passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kv_reference import reference

from mstar.resources.attention import AttentionNeed, KVBatch, KVMemory, numba_cpu
from mstar.resources.attention.numba_cpu import NumbaAttention
from mstar.resources.staging import Stage

TOKENS, PAGE = 512, 16


def filled(dtype: torch.dtype) -> KVMemory:
    memory = KVMemory(1, TOKENS, 2, 24, dtype, "cpu")
    memory.data.copy_(torch.randn(memory.data.shape, generator=torch.Generator().manual_seed(1)))
    return memory


def batch(*starts: int) -> KVBatch:
    pages = np.random.default_rng(2).permutation(TOKENS // PAGE).astype(np.int32)
    tables = np.stack([np.roll(pages, -7 * row)[:10] for row in range(len(starts))])
    return KVBatch(np.ones(len(starts), np.int64), np.asarray(starts), tables, PAGE)


def queries(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, 6, 24, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("starts", [(0,), (31, 32, 33), (159, 0, 77, 100, 5)])
def test_decode_equals_the_reference(dtype: torch.dtype, window: int | None, starts: tuple[int, ...]) -> None:
    memory, rows = filled(dtype), batch(*starts)
    q = queries(len(starts), dtype)
    got = NumbaAttention().plan_kv(memory, rows, Stage("cpu"), "kv").attend(0, q, None, None, window=window)
    places = (rows.tables[:, :, None] * PAGE + np.arange(PAGE)).reshape(len(starts), -1)
    for row, start in enumerate(starts):
        k, v = memory.data[0, :, torch.from_numpy(places[row, : start + 1])].double()
        wanted = reference(q[row : row + 1].double(), k, v, start, window=window)[0]
        limit = 2e-6 if dtype == torch.float32 else 2**-7  # one rounding of the result
        torch.testing.assert_close(got[row].double(), wanted, rtol=limit, atol=limit)


def test_a_memory_is_read_where_it_lies() -> None:
    """Of an encoder: the step has no keys of its own."""
    memory = filled(torch.float32)
    tables = np.array([[3], [0]], np.int32)
    rows = KVBatch(np.ones(2, np.int64), np.array([100, 60]), tables, 128, step_kv="none")
    q = queries(2, torch.float32)
    plan = NumbaAttention().plan_kv(memory, rows, Stage("cpu"), "kv")
    assert isinstance(plan, numba_cpu._NumbaKVPlan)
    got = plan.attend(0, q, None, None, causal=False)
    for row, (first, length) in enumerate([(384, 100), (0, 60)]):
        k, v = memory.data[0, :, first : first + length].double()
        wanted = reference(q[row : row + 1].double(), k, v, 0, causal=False)[0]
        torch.testing.assert_close(got[row].double(), wanted, rtol=2e-6, atol=2e-6)


def test_a_row_is_the_same_to_the_bit_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, backend, q = filled(torch.float32), NumbaAttention(), queries(5, torch.float32)
    starts, threads = (159, 140, 77, 100, 5), torch.get_num_threads()
    among = backend.plan_kv(memory, batch(*starts), Stage("cpu"), "kv").attend(0, q, None, None)
    alone = backend.plan_kv(memory, batch(*starts[:1]), Stage("cpu"), "kv").attend(0, q[:1], None, None)
    monkeypatch.setattr(numba_cpu, "_SHARED", 0)  # share even this little
    try:
        torch.set_num_threads(2)
        shared = backend.plan_kv(memory, batch(*starts), Stage("cpu"), "kv").attend(0, q, None, None)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(among[:1], alone)
    assert torch.equal(among, shared)


def test_what_it_does_not_support_is_said() -> None:
    backend = NumbaAttention()
    assert "CPU" in (backend.supports(AttentionNeed("kv", torch.device("cuda"), torch.float32, 4, 2, 8)) or "")
    assert "float16" in (backend.supports(AttentionNeed("kv", torch.device("cpu"), torch.float16, 4, 2, 8)) or "")
    assert "multiple" in (backend.supports(AttentionNeed("kv", torch.device("cpu"), torch.float32, 5, 2, 8)) or "")

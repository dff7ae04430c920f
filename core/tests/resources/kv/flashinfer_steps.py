"""Steps for the FlashInfer backend, and what they must give."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from kv_reference import reference

from mstar.resources.attention import KVBatch, KVMemory, KVPlan

PAGE, PAGES = 4, 12


def memory(kv_heads: int = 2, tokens: int = 16 * PAGE * PAGES, dtype: torch.dtype = torch.float32) -> KVMemory:
    made = KVMemory(1, tokens, kv_heads, 8, dtype, "cpu")
    made.data.copy_(torch.randn(made.data.shape, generator=torch.Generator().manual_seed(1)))
    return made


def batch(lengths: list[int], starts: list[int], **fields: Any) -> KVBatch:
    pages = np.random.default_rng(2).permutation(16 * PAGES).astype(np.int32)
    tables = pages[: len(lengths) * PAGES].reshape(len(lengths), PAGES)
    return KVBatch(np.asarray(lengths, np.int64), np.asarray(starts, np.int64), tables, PAGE, **fields)


def queries(count: int, heads: int = 4) -> torch.Tensor:
    return torch.randn(count, heads, 8, generator=torch.Generator().manual_seed(count))


def check(plan: KVPlan, rows: KVBatch, of: KVMemory, heads: int = 4, **how: Any) -> None:
    """*plan*'s results for random queries are the reference's."""
    q = queries(int(rows.lengths.sum()), heads)
    out, begin = plan.attend(0, q, None, None, **how), 0
    size = rows.page_size
    for row, (length, start) in enumerate(zip(rows.lengths.tolist(), rows.starts.tolist(), strict=True)):
        places = (rows.tables[row][:, None] * size + np.arange(size)).reshape(-1)
        end = start + (length if rows.step_kv == "written" else 0)
        k, v = of.data[0, :, torch.from_numpy(places[:end])].double()
        wanted = reference(q[begin : begin + length].double(), k, v, start, **how)
        torch.testing.assert_close(out[begin : begin + length].double(), wanted, rtol=1e-5, atol=2e-6)
        begin += length

"""Gated delta nets on the CPU: a step of the recurrence as a numba kernel, which goes through a matrix once to read it
and once to write the next one. Everything else is the reference's.

Importing this module compiles the kernel, or loads it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mstar.nn.ops import delta_reference as reference
from mstar.nn.ops.delta import StateSlots
from mstar.nn.ops.jit import claim, function, kernel, narrow, view, widen

__all__ = ["causal_conv", "gated_delta_net", "gated_delta_rule", "gated_rms_norm"]

causal_conv = reference.causal_conv
gated_rms_norm = reference.gated_rms_norm


@function
def _step(block, dtype):  # type: ignore[no-untyped-def]
    """A work item is a head of a row."""
    args = view(block, 18, np.int64)
    rows, heads, key, value, stride, places, kept = args[11], args[12], args[13], args[14], args[15], args[16], args[17]
    items, size = rows * heads, key * value
    q, k = view(args[1], items * key, np.float32), view(args[2], items * key, np.float32)
    v, out = view(args[3], items * value, np.float32), view(args[4], items * value, np.float32)
    left, beta = view(args[5], items, np.float32), view(args[6], items, np.float32)
    pool = view(args[7], (places - 1) * stride + heads * size, dtype)
    sources, targets = view(args[8], rows, np.int64), view(args[9], rows, np.int64)
    added = view(args[10], items * value, np.float32)
    item = claim(block, 1)
    while item < items:
        row, head = item // heads, item % heads
        begin = sources[row] * stride + head * size
        keys, queries = k[item * key : (item + 1) * key], q[item * key : (item + 1) * key]
        new, o = added[item * value : (item + 1) * value], out[item * value : (item + 1) * value]
        values = v[item * value : (item + 1) * value]
        decay, share = left[item], beta[item]
        for j in range(value):
            new[j] = np.float32(0)
        for i in range(key):
            line = pool[begin + i * value : begin + (i + 1) * value]
            for j in range(value):
                new[j] += keys[i] * widen(line[j])
        for j in range(value):
            new[j] = (values[j] - decay * new[j]) * share
            o[j] = np.float32(0)
        target = targets[row] * stride + head * size
        for i in range(key):
            line = pool[begin + i * value : begin + (i + 1) * value]
            if kept:
                after = pool[target + i * value : target + (i + 1) * value]
                for j in range(value):
                    s = widen(line[j]) * decay + keys[i] * new[j]
                    o[j] += queries[i] * s
                    after[j] = narrow(s, after[j])
            else:
                for j in range(value):
                    o[j] += queries[i] * (widen(line[j]) * decay + keys[i] * new[j])
        item = claim(block, 1)


@kernel(17)
def _step_f32(block: int) -> None:
    _step(block, np.float32)


@kernel(17)
def _step_bf16(block: int) -> None:
    _step(block, np.uint16)


_KERNELS = {torch.float32: _step_f32, torch.bfloat16: _step_bf16}


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: StateSlots) -> Tensor:
    pool = state.pool
    which = _KERNELS.get(pool.dtype)
    if which is None or not pool[:1].is_contiguous():
        return reference.step(q, k, v, g, beta, state)
    rows, heads, key = q.shape
    given = [x.contiguous() for x in (q, k, v, torch.empty_like(v), g.exp(), beta)]
    places = [x.contiguous() for x in (state.source, state.source if state.target is None else state.target)]
    added = torch.empty_like(v, memory_format=torch.contiguous_format)
    which(
        rows * heads > 1,
        *(x.data_ptr() for x in given),
        pool.data_ptr(),
        *(x.data_ptr() for x in places),
        added.data_ptr(),
        rows,
        heads,
        key,
        v.shape[2],
        pool.stride(0),
        pool.shape[0],
        int(state.target is not None),
    )
    return given[3]


gated_delta_rule = reference.ruled(step)
gated_delta_net = reference.netted(gated_delta_rule)

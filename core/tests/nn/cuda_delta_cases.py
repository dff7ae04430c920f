"""The Triton kernels of gated delta nets against the plain torch operations in float32, from the same rounded inputs.

Run by ``test_cuda_cases.py`` in Triton's interpreter, on the CPU; on a machine with a GPU ``pytest`` of this file runs
them there.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import Tensor

from mstar.nn.ops import cuda_delta, cuda_delta_step, delta_reference
from mstar.nn.ops.cuda_delta_step import Way
from mstar.nn.ops.delta import GatedNorm, Spans, StateSlots

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
K_HEADS, V_HEADS, WIDTH = 1, 2, 4
# Of the largest value. In bfloat16 the factors of products within chunks are rounded, and what was added goes through
# several of them.
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 3e-2}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def close(got: Tensor, exact: Tensor, limit: float) -> None:
    largest = exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(got.float(), exact.float(), rtol=limit, atol=limit * largest)


def slots(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> StateSlots:
    pool = draw(2 * rows + 1, 3, *shape, dtype=dtype)[:, 1]  # a layer of three
    order = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(rows)).to(DEVICE) + 1
    return StateSlots(pool, order[:rows], order[rows:])


def wide(state: StateSlots) -> StateSlots:
    return state._replace(pool=state.pool.float().clone())


@pytest.mark.parametrize(
    ("dtype", "kept", "lengths", "key", "value"),
    [
        (torch.float32, True, [1, 1, 1], 32, 64),
        (torch.bfloat16, False, [1, 1, 1], 32, 64),
        (torch.bfloat16, True, [1], 16, 16),
        (torch.float32, True, [70, 1, 0, 5], 16, 16),
        (torch.bfloat16, True, [1, 65], 16, 32),
        (torch.float32, False, [9, 1], 16, 16),
    ],
)
@pytest.mark.parametrize("normed", [False, True])
def test_a_layer(dtype: torch.dtype, kept: bool, lengths: list[int], key: int, value: int, normed: bool) -> None:
    n, channels = sum(lengths), 2 * K_HEADS * key + V_HEADS * value
    fused = draw(n, channels + V_HEADS * value + 2 * V_HEADS, dtype=dtype)
    mixed, z, a, b = fused.split((channels, V_HEADS * value, V_HEADS, V_HEADS), 1)
    weight, a_log, dt_bias = draw(channels, WIDTH, dtype=dtype), draw(V_HEADS) - 2, draw(V_HEADS, dtype=dtype)
    spans = Spans(torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE), n)
    window = slots(len(lengths), channels, WIDTH - 1, dtype=dtype)
    state = slots(len(lengths), V_HEADS, key, value)
    if not kept:
        window, state = window._replace(target=None), state._replace(target=None)
    exact_window, exact_state = wide(window), wide(state)
    norm = exact_norm = None
    if normed:
        norm = GatedNorm(z.view(n, V_HEADS, value), draw(value, dtype=dtype), 1e-6)
        exact_norm = norm._replace(gate=norm.gate.float(), weight=norm.weight.float())
    got = cuda_delta.gated_delta_net(mixed, a, b, weight, a_log, dt_bias, spans, window, state, norm)
    wider = (x.float() for x in (mixed, a, b, weight, a_log, dt_bias))
    exact = delta_reference.gated_delta_net(*wider, spans, exact_window, exact_state, exact_norm)
    assert got.dtype == dtype
    close(got, exact, LIMIT[dtype])
    close(state.pool, exact_state.pool, LIMIT[dtype])
    assert torch.equal(window.pool, exact_window.pool.to(dtype))


@pytest.mark.parametrize(
    ("way", "state_dtype", "lengths"),
    [
        (Way(4), torch.float32, [1] * 5),
        (Way(4), torch.bfloat16, [1, 2, 1]),
        (Way(4, groups=4), torch.bfloat16, [1] * 5),
        (Way(4, groups=4, registers=168), torch.float32, [1, 2, 1]),
        (Way(4, groups=2, resident=2, stages=2), torch.float32, [1] * 5),
        (Way(4, groups=4, resident=1, stages=3), torch.bfloat16, [1] * 5),
        (Way(4, resident=1, stages=3), torch.float32, [1, 2, 1]),
    ],
)
def test_all_ways_of_a_step_are_right(way: Way, state_dtype: torch.dtype, lengths: list[int]) -> None:
    """At the size that published models have; rows of more tokens are left alone."""
    key, rows, n, channels = 128, len(lengths), sum(lengths), 2 * K_HEADS * 128 + V_HEADS * 128
    mixed, a, b = draw(n, channels + 2 * V_HEADS).split((channels, V_HEADS, V_HEADS), 1)
    weight, a_log, dt_bias = draw(channels, WIDTH), draw(V_HEADS) - 2, draw(V_HEADS)
    window, state = slots(rows, channels, WIDTH - 1), slots(rows, V_HEADS, key, key, dtype=state_dtype)
    norm = GatedNorm(draw(n, V_HEADS, key), draw(key), 1e-6)
    before, exact_window, exact_state = state.pool.clone(), wide(window), wide(state)
    assert state.target is not None
    spans = Spans(torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE), n)
    inputs = (mixed, a, b, weight, a_log, dt_bias)
    out = mixed.new_zeros((n, V_HEADS, key))
    cuda_delta_step.step(*inputs, spans, window, state, norm, out, way)
    exact = delta_reference.gated_delta_net(*inputs, spans, exact_window, exact_state, norm)
    ones = [row for row, length in enumerate(lengths) if length == 1]
    tokens = spans.offsets[ones]
    close(out[tokens], exact[tokens], 2e-5)
    assert not out[[token for token in range(n) if token not in tokens.tolist()]].any()
    alone = state.target[ones]
    close(state.pool[alone], exact_state.pool[alone], 2e-5 if state_dtype is torch.float32 else 2**-7)
    assert torch.equal(window.pool[alone], exact_window.pool[alone])
    untouched = [place for place in range(len(before)) if place not in alone.tolist()]
    assert torch.equal(state.pool[untouched], before[untouched])


@pytest.mark.parametrize("rows", [1, 5])
def test_what_follows_changes_no_result(rows: int) -> None:
    channels = 2 * K_HEADS * 128 + V_HEADS * 128
    mixed, a, b = draw(rows, channels + 2 * V_HEADS).split((channels, V_HEADS, V_HEADS), 1)
    inputs = (mixed, a, b, draw(channels, WIDTH), draw(V_HEADS) - 2, draw(V_HEADS))
    window, state = slots(rows, channels, WIDTH - 1), slots(rows, V_HEADS, 128, 128)
    spans = Spans(torch.arange(rows + 1, device=DEVICE), rows)
    found = []
    for following in (None, draw(300, 1024, dtype=torch.bfloat16), draw(3, 24, dtype=torch.bfloat16)):
        kept = state._replace(pool=state.pool.clone()), window._replace(pool=window.pool.clone())
        out = cuda_delta.gated_delta_net(*inputs, spans, kept[1], kept[0], following=following)
        found.append((out, kept[0].pool, kept[1].pool))
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("lengths", [[70], [1, 1]])
def test_the_rule_by_itself(lengths: list[int]) -> None:
    n = sum(lengths)
    q, k, v = draw(n, K_HEADS, 32), draw(n, K_HEADS, 32, seed=2), draw(n, V_HEADS, 16)
    g, beta = -draw(n, V_HEADS).exp() / 50, draw(n, V_HEADS).sigmoid()
    spans = Spans(torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE), n)
    state = slots(len(lengths), V_HEADS, 32, 16)
    exact_state = state._replace(pool=state.pool.clone())
    got = cuda_delta.gated_delta_rule(q, k, v, g, beta, spans, state)
    close(got, delta_reference.gated_delta_rule(q, k, v, g, beta, spans, exact_state), 2e-5)
    close(state.pool, exact_state.pool, 2e-5)


@pytest.mark.parametrize(
    ("dtype", "key", "value", "limit"),
    [
        (torch.float32, 32, 16, 1e-4),
        # The interpreter cuts bfloat16 off where a GPU rounds to nearest (0.06 and 0.02 of the largest value).
        (torch.bfloat16, 128, 128, 1e-1 if INTERPRETED else 3e-2),
    ],
)
def test_keys_that_repeat_stay_finite(dtype: torch.dtype, key: int, value: int, limit: float) -> None:
    """The triangular system of equal keys has powers that no float32 holds."""
    k = draw(1, K_HEADS, key, dtype=dtype).expand(64, -1, -1).contiguous()
    v, g, beta = (
        draw(64, V_HEADS, value, dtype=dtype),
        torch.full((64, V_HEADS), -1e-4, device=DEVICE),
        torch.ones(64, V_HEADS, device=DEVICE),
    )
    spans = Spans(torch.tensor([0, 64], device=DEVICE), 64)
    state = slots(1, V_HEADS, key, value)
    exact_state = state._replace(pool=state.pool.clone())
    got = cuda_delta.gated_delta_rule(k, k, v, g, beta, spans, state)
    exact = delta_reference.gated_delta_rule(k.float(), k.float(), v.float(), g, beta, spans, exact_state)
    close(got, exact, limit)
    close(state.pool, exact_state.pool, limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1, 1], [2, 1, 0, 9], [20, 0, 1, 13]])
def test_the_convolution_with_a_bias(dtype: torch.dtype, lengths: list[int]) -> None:
    n = sum(lengths)
    x, weight, bias = draw(n, 70, dtype=dtype)[:, :60], draw(60, WIDTH, dtype=dtype), draw(60, dtype=dtype)
    spans = Spans(torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE), n)
    window = slots(len(lengths), 60, WIDTH - 1, dtype=dtype)
    exact_window = window._replace(pool=window.pool.float().clone())
    got = cuda_delta.causal_conv(x, weight, bias, spans, window)
    exact = delta_reference.causal_conv(x.float(), weight.float(), bias.float(), spans, exact_window)
    close(got, exact, 2e-6 if dtype is torch.float32 else 2**-7)
    assert torch.equal(window.pool, exact_window.pool.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_rms_norm(dtype: torch.dtype) -> None:
    x, weight = draw(3, 5, 24, dtype=dtype), draw(24, dtype=dtype)
    gate = draw(3, 5 * 24 + 7, dtype=dtype)[:, : 5 * 24].view(3, 5, 24)
    got = cuda_delta.gated_rms_norm(x, gate, weight, 1e-6)
    assert got.dtype == dtype
    exact = delta_reference.gated_rms_norm(x.float(), gate.float(), weight.float(), 1e-6)
    close(got, exact, 4e-6 if dtype is torch.float32 else 2**-7)


def test_sizes_without_a_kernel_go_to_the_reference() -> None:
    q, v, g = draw(3, K_HEADS, 24), draw(3, V_HEADS, 16), -draw(3, V_HEADS).exp()
    spans, state = Spans(torch.tensor([0, 3], device=DEVICE), 3), slots(1, V_HEADS, 24, 16)
    exact_state = state._replace(pool=state.pool.clone())
    exact = delta_reference.gated_delta_rule(q, q, v, g, g.sigmoid(), spans, exact_state)
    assert torch.equal(cuda_delta.gated_delta_rule(q, q, v, g, g.sigmoid(), spans, state), exact)

"""Gated delta nets in plain torch, against transformers' layer and its recurrence."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as published

from mstar.nn import ops
from mstar.nn.ops import delta, delta_reference
from mstar.nn.ops.delta import Spans, StateSlots

K_HEADS, V_HEADS, K, V, WIDTH = 2, 4, 16, 8, 4
CHANNELS = 2 * K_HEADS * K + V_HEADS * V


def spans(lengths: list[int]) -> Spans:
    return Spans(torch.tensor([0, *itertools.accumulate(lengths)]), sum(lengths))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def slots(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> StateSlots:
    """Rows whose places are in another order than they are; the layer is one of three in each place."""
    pool = draw(2 * rows + 1, 3, *shape).to(dtype)[:, 1]
    order = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(rows)) + 1
    return StateSlots(pool, order[:rows], order[rows:])


def rule(lengths: list[int], dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, ...], StateSlots]:
    n = sum(lengths)
    g = -draw(n, V_HEADS, seed=1).exp()
    inputs = (draw(n, K_HEADS, K), draw(n, K_HEADS, K, seed=5), draw(n, V_HEADS, V), g, draw(n, V_HEADS).sigmoid())
    return inputs, slots(len(lengths), V_HEADS, K, V, dtype=dtype)


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [5], [64], [200], [1, 63, 0, 65, 1, 130], [0, 2]])
def test_the_rule_is_the_published_recurrence(lengths: list[int]) -> None:
    inputs, state = rule(lengths)
    before = state.pool.clone()
    got = delta.gated_delta_rule(*inputs, spans(lengths), state)
    start = 0
    for row, length in enumerate(lengths):
        first = before[state.source[row]]
        parts = [x[None, start : start + length] for x in inputs]
        exact, last = published.torch_recurrent_gated_delta_rule(
            *parts[:3], *parts[3:], initial_state=first[None], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        torch.testing.assert_close(got[start : start + length], exact[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state.pool[state.target[row]], last[0], rtol=1e-5, atol=1e-5)
        start += length
    others = [place for place in range(len(before)) if place not in state.target.tolist()]
    assert torch.equal(state.pool[others], before[others])


def test_prompts_in_parts_end_in_the_same_state() -> None:
    inputs, state = rule([150])
    whole = delta.gated_delta_rule(*inputs, spans([150]), state)
    last = state.pool[state.target].clone()
    for cuts in ([1, 149], [64, 86], [77, 1, 72], [149, 1]):
        source, target, out, start = state.source, state.target, [], 0
        for length in cuts:
            part = [x[start : start + length] for x in inputs]
            out.append(delta.gated_delta_rule(*part, spans([length]), StateSlots(state.pool, source, target)))
            source, target, start = target, torch.zeros(1, dtype=torch.int64) + 3 - target, start + length
        torch.testing.assert_close(torch.cat(out), whole, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state.pool[source], last, rtol=1e-5, atol=1e-5)
        state.pool.copy_(rule([150])[1].pool)


def test_keys_that_repeat_and_gates_that_forget_all_stay_finite() -> None:
    n = 128
    k = draw(1, K_HEADS, K).expand(n, -1, -1)
    g = torch.where(torch.arange(n)[:, None] % 3 == 0, -120.0, -1e-4).expand(n, V_HEADS)
    state = slots(1, V_HEADS, K, V)
    first = state.pool[state.source].clone()
    v, beta = draw(n, V_HEADS, V), torch.ones(n, V_HEADS)
    got = delta.gated_delta_rule(k, k, v, g, beta, spans([n]), state)
    exact, last = published.torch_recurrent_gated_delta_rule(
        k[None],
        k[None],
        v[None],
        g[None],
        beta[None],
        initial_state=first,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(got, exact[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.pool[state.target], last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [[1, 1], [7], [2, 1, 0, 9, 3]])
@pytest.mark.parametrize("biased", [False, True])
def test_the_convolution_goes_on_where_the_window_ends(lengths: list[int], biased: bool) -> None:
    x, weight, window = draw(sum(lengths), 10), draw(10, WIDTH), slots(len(lengths), 10, WIDTH - 1)
    bias = draw(10, seed=3) if biased else None
    got = delta.causal_conv(x, weight, bias, spans(lengths), window)
    start = 0
    for row, length in enumerate(lengths):
        history = torch.cat((window.pool[window.source[row]], x[start : start + length].T), 1)
        if length:
            exact = torch.nn.functional.conv1d(history[None], weight[:, None], bias, groups=10)[0].T
            torch.testing.assert_close(got[start : start + length], torch.nn.functional.silu(exact))
        assert torch.equal(window.pool[window.target[row]], history[:, -(WIDTH - 1) :])
        start += length


def test_a_state_that_is_not_kept_changes_nothing() -> None:
    inputs, state = rule([3, 1])
    before = state.pool.clone()
    kept = delta.gated_delta_rule(*inputs, spans([3, 1]), StateSlots(state.pool.clone(), *state[1:]))
    left = delta.gated_delta_rule(*inputs, spans([3, 1]), state._replace(target=None))
    torch.testing.assert_close(left, kept, rtol=1e-6, atol=1e-6)
    assert torch.equal(state.pool, before)


@pytest.mark.parametrize("lengths", [[70], [1, 1]])
def test_a_state_in_bfloat16_is_rounded_once_a_step(lengths: list[int]) -> None:
    inputs, state = rule(lengths, torch.bfloat16)
    wide = StateSlots(state.pool.float(), *state[1:])
    exact = delta.gated_delta_rule(*inputs, spans(lengths), wide)
    got = delta.gated_delta_rule(*inputs, spans(lengths), state)
    torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.pool[state.target].float(), wide.pool[wide.target], rtol=2**-8, atol=1e-6)


def test_kernels_can_be_loaded_before_the_first_step() -> None:
    code = (
        "import sys, torch; from mstar.nn.ops import cpu_kernels_fault, delta\n"
        "delta.prepare(torch.device('cpu'))\n"
        "assert cpu_kernels_fault() is not None or 'mstar.nn.ops.cpu_delta' in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_numba_torch_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, state = rule([1, 1, 1])
    plain = state._replace(pool=state.pool.clone())
    got = delta.gated_delta_rule(*inputs, spans([1, 1, 1]), state)
    monkeypatch.setattr(ops, "cpu_kernels_fault", lambda: "not installed")
    assert delta._on(state.pool) is delta_reference
    torch.testing.assert_close(got, delta.gated_delta_rule(*inputs, spans([1, 1, 1]), plain), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.pool, plain.pool, rtol=1e-5, atol=1e-5)


def test_a_row_that_decodes_beside_prompts_gets_what_it_gets_alone() -> None:
    inputs, state = rule([1, 9, 1])
    before = state.pool.clone()
    beside = delta.gated_delta_rule(*inputs, spans([1, 9, 1]), state)
    at = torch.tensor([0, 10])
    alone_state = StateSlots(before, state.source[[0, 2]], state.target[[0, 2]])
    alone = delta.gated_delta_rule(*(x[at] for x in inputs), spans([1, 1]), alone_state)
    assert torch.equal(beside[at], alone)
    assert torch.equal(before[alone_state.target], state.pool[alone_state.target])


def layer() -> published.Qwen3_5GatedDeltaNet:
    config = published.Qwen3_5TextConfig(
        hidden_size=32, linear_num_key_heads=K_HEADS, linear_num_value_heads=V_HEADS, linear_key_head_dim=K,
        linear_value_head_dim=V, linear_conv_kernel_dim=WIDTH, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    module = published.Qwen3_5GatedDeltaNet(config, 0).float().eval()
    for parameter in (module.dt_bias, module.norm.weight):
        torch.nn.init.normal_(parameter)
    return module


@torch.inference_mode()
def test_a_layer_of_qwen3_5() -> None:
    module = layer()
    window, state = slots(1, CHANNELS, WIDTH - 1), slots(1, V_HEADS, K, V)
    window.pool.zero_()
    state.pool.zero_()
    hidden = draw(1, 90, 32)
    exact = module(hidden)[0]
    got, start, places = [], 0, (window.source, window.target)
    for length in (70, 1, 16, 1, 1, 1):
        x = hidden[0, start : start + length]
        # One fused projection, as a family may lay it out.
        fused = torch.cat((module.in_proj_qkv(x), module.in_proj_a(x), module.in_proj_b(x), module.in_proj_z(x)), 1)
        mixed, a, b, z = fused.split((CHANNELS, V_HEADS, V_HEADS, V_HEADS * V), 1)
        mixed = delta.gated_delta_net(
            mixed, a, b, module.conv1d.weight.squeeze(1), module.A_log, module.dt_bias, spans([length]),
            StateSlots(window.pool, *places), StateSlots(state.pool, *places),
        )  # fmt: skip
        z = z.unflatten(1, (V_HEADS, V))
        normed = delta.gated_rms_norm(mixed, z, module.norm.weight, module.layer_norm_epsilon)
        got.append(module.out_proj(normed.flatten(1)))
        places, start = places[::-1], start + length
    torch.testing.assert_close(torch.cat(got), exact, rtol=1e-4, atol=1e-5)

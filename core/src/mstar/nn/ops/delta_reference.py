"""The operations of :mod:`mstar.nn.ops.delta` in plain torch, for any device and dtype.

Rows of one token take one step of the recurrence; longer ones are computed in chunks. So a row that decodes beside
prompts gets what it gets alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from mstar.nn.ops.delta import GatedNorm, Spans, StateSlots

__all__ = [
    "causal_conv",
    "gated_delta_net",
    "gated_delta_rule",
    "gated_rms_norm",
    "gates",
    "netted",
    "ruled",
    "step",
    "unit",
]

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, "StateSlots"], Tensor]
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, "Spans", "StateSlots"], Tensor]


class Net(Protocol):
    """``gated_delta_net``."""

    def __call__(
        self,
        mixed: Tensor,
        a: Tensor,
        b: Tensor,
        conv_weight: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        spans: Spans,
        window: StateSlots,
        state: StateSlots,
        norm: GatedNorm | None = None,
    ) -> Tensor: ...


_EPS = 1e-6  # of the lengths of queries and keys


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g float32 and beta of all tokens and heads, ``[N, v_heads]``."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.sigmoid()


def unit(x: Tensor) -> Tensor:
    """*x* ``[..., K]`` in float32, over its length."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normed * F.silu(gate.float())).to(x.dtype)


# --- the convolution --------------------------------------------------------------------------------------------------
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, spans: Spans, window: StateSlots) -> Tensor:
    channels, width = weight.shape
    before = window.pool.index_select(0, window.source)
    if _single(spans):
        if window.target is not None:
            after = torch.cat((before[:, :, 1:], x.unsqueeze(2).to(before.dtype)), 2)
            window.pool.index_copy_(0, window.target, after)
        return _activated(x, [before[:, :, -back] for back in range(1, width)], weight, bias)
    before = before.transpose(1, 2)  # [rows, width - 1, channels]
    # Every row with its window before it, so that all taps of all rows are one slice each.
    shift, device = width - 1, x.device
    row = torch.arange(spans.rows, device=device)
    tokens = torch.arange(spans.tokens, device=device) + (spans.row_of + 1) * shift
    tap = torch.arange(shift, device=device)
    heads = (spans.offsets[:-1] + row * shift)[:, None] + tap
    joined = x.new_empty(spans.tokens + spans.rows * shift, channels)
    joined.index_copy_(0, tokens, x)
    joined.index_copy_(0, heads.flatten(), before.flatten(0, 1).to(x.dtype))
    if window.target is not None:
        tails = (spans.offsets[1:] + row * shift)[:, None] + tap
        after = joined.index_select(0, tails.flatten()).view(spans.rows, shift, channels).transpose(1, 2)
        window.pool.index_copy_(0, window.target, after.to(window.pool.dtype))
    return _activated(x, [joined.index_select(0, tokens - back) for back in range(1, width)], weight, bias)


def _activated(x: Tensor, older: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of *x* ``[N, channels]`` and, newest first, the inputs before each."""
    out = x.float() * weight[:, -1].float()
    for back, inputs in enumerate(older, 2):
        out.addcmul_(inputs.float(), weight[:, -back].float())
    if bias is not None:
        out += bias
    return F.silu(out).to(x.dtype)


def _single(spans: Spans) -> bool:
    """Whether each row has one token. As many tokens as rows may also be two of one row and none of another, where
    steps are not captured; on a GPU nobody asks."""
    return spans.single and (spans.offsets.is_cuda or max(spans.lengths, default=1) == 1)


# --- the rule ---------------------------------------------------------------------------------------------------------
def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: StateSlots) -> Tensor:
    """One token of each row: outputs ``[rows, H, V]``; *state* is written. All float32 ``[rows, H, …]``, *q* and *k* of
    the lengths that they are to have."""
    s = state.pool.index_select(0, state.source).float() * g.exp()[..., None, None]
    held = (k.unsqueeze(-2) @ s).squeeze(-2)
    s = torch.baddbmm(
        s.flatten(0, 1), k.flatten(0, 1).unsqueeze(2), ((v - held) * beta.unsqueeze(-1)).flatten(0, 1).unsqueeze(1)
    ).view_as(s)
    if state.target is not None:
        state.pool.index_copy_(0, state.target, s.to(state.pool.dtype))
    return (q.unsqueeze(-2) @ s).squeeze(-2)


def ruled(step: Step) -> Rule:
    """``gated_delta_rule`` with *step* for rows of one token."""

    def gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, spans: Spans, state: StateSlots
    ) -> Tensor:
        group = v.shape[1] // q.shape[1]
        q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
        q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
        values, beta = v.float(), beta.float()
        if _single(spans):
            return step(q, k, values, g, beta, state).to(v.dtype)
        out = torch.empty_like(values)
        ones = torch.tensor([r for r, length in enumerate(spans.lengths) if length == 1], device=v.device).long()
        if len(ones):
            at = spans.offsets[ones]
            out[at] = step(q[at], k[at], values[at], g[at], beta[at], _of(state, ones))
        others = [r for r, length in enumerate(spans.lengths) if length != 1]
        mine = _of(state, torch.tensor(others, device=v.device).long())
        s = mine.pool.index_select(0, mine.source).float()
        _chunked(q, k, values, g, beta, out, s, [spans.bounds[r] for r in others])
        if mine.target is not None:
            mine.pool.index_copy_(0, mine.target, s.to(mine.pool.dtype))
        return out.to(v.dtype)

    return gated_delta_rule


def _of(state: StateSlots, rows: Tensor) -> StateSlots:
    return state._replace(source=state.source[rows], target=None if state.target is None else state.target[rows])


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    out: Tensor,
    s: Tensor,
    rows: list[tuple[int, int]],
) -> None:
    """The rows *rows* (first token, end) by chunks: what the tokens of a chunk are to each other for all chunks at
    once, then the state through the chunks of each row, all rows abreast. *s* ``[rows, H, K, V]`` is advanced in
    place."""
    from mstar.nn.ops.delta import CHUNK

    device = v.device
    parts = [
        (r, first, min(first + CHUNK, end)) for r, (begin, end) in enumerate(rows) for first in range(begin, end, CHUNK)
    ]
    if not parts:
        return
    first = torch.tensor([part[1] for part in parts], device=device)
    count = torch.tensor([part[2] - part[1] for part in parts], device=device)
    at = torch.arange(CHUNK, device=device)
    inside = (at < count[:, None]).unsqueeze(1)  # [parts, 1, CHUNK]
    index = (first[:, None] + at).clamp_(max=v.shape[0] - 1)

    def cut(x: Tensor) -> Tensor:
        """``[parts, H, CHUNK, …]``, with zeros beyond a part's tokens."""
        pieces = x[index].transpose(1, 2)
        return pieces * (inside if x.ndim == 2 else inside.unsqueeze(-1))

    q, k, v, g, beta = cut(q), cut(k), cut(v), cut(g), cut(beta)
    decay = g.cumsum(-1)  # logarithm of what is left at each token of the state before the chunk
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).triu(1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    # What each token adds follows from what those before it added: a triangular system, solved for the values and for
    # the part that depends on the state, which is not known yet.
    own = (k * beta.unsqueeze(-1)) @ k.transpose(-1, -2) * between
    sides = torch.cat((v * beta.unsqueeze(-1), k * (beta * decay.exp()).unsqueeze(-1)), -1)
    added, dependent = torch.linalg.solve_triangular(own, sides, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    seen = q @ k.transpose(-1, -2) * between
    q = q * decay.exp().unsqueeze(-1)
    k = k * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    left = decay[..., -1].exp()[..., None, None]

    number = [0] * len(parts)  # of a part within its row
    for i in range(1, len(parts)):
        number[i] = number[i - 1] + 1 if parts[i][0] == parts[i - 1][0] else 0
    for turn in range(max(number) + 1):
        now = torch.tensor([i for i, n in enumerate(number) if n == turn], device=device)
        owner = torch.tensor([parts[i][0] for i, n in enumerate(number) if n == turn], device=device)
        states = s[owner]
        new = added[now] - dependent[now] @ states
        o = q[now] @ states + seen[now] @ new
        s[owner] = states * left[now] + k[now].transpose(-1, -2) @ new
        real = inside[now, 0]
        out[index[now][real]] = o.transpose(1, 2)[real]


gated_delta_rule = ruled(step)


def netted(rule: Rule) -> Net:
    """``gated_delta_net`` with *rule*."""

    def gated_delta_net(
        mixed: Tensor,
        a: Tensor,
        b: Tensor,
        conv_weight: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        spans: Spans,
        window: StateSlots,
        state: StateSlots,
        norm: GatedNorm | None = None,
        following: Tensor | None = None,
    ) -> Tensor:
        _, v_heads, key, value = state.pool.shape
        mixed = causal_conv(mixed, conv_weight, None, spans, window)
        keys = (mixed.shape[1] - v_heads * value) // 2
        g, beta = gates(a, b, a_log, dt_bias)
        n, heads = mixed.shape[0], keys // key
        q, k = mixed[:, :keys].view(n, heads, key), mixed[:, keys : 2 * keys].view(n, heads, key)
        out = rule(q, k, mixed[:, 2 * keys :].view(n, v_heads, value), g, beta, spans, state)
        return out if norm is None else gated_rms_norm(out, *norm)

    return gated_delta_net


gated_delta_net = netted(gated_delta_rule)

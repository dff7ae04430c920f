"""Gated delta nets: linear attention whose state is a matrix that forgets and is corrected.

A head keeps a matrix ``S [K, V]``. A token decays it and writes its value under its key, less what the matrix holds
there already::

    S ← exp(g) S;   S ← S + k ⊗ ((v − kᵀS) β);   o = qᵀS

Sources: "Gated Delta Networks" (arXiv:2412.06464), and "Parallelizing Linear Transformers with the Delta Rule"
(arXiv:2406.06484) for many tokens at once; what a layer does around it as in transformers 5.24's Qwen3.5.

The operations read a row's state in one place and write the next one to another, so that nothing which a repeated step
would read changes (:mod:`mstar.resources.recurrent`). Each has a plain torch version
(:mod:`mstar.nn.ops.delta_reference`), which says what it means, a numba
kernel for decoding on the CPU (:mod:`mstar.nn.ops.cpu_delta`), and Triton kernels on CUDA
(:mod:`mstar.nn.ops.cuda_delta`, :mod:`mstar.nn.ops.cuda_delta_chunks`). State is computed in float32, whatever its
dtype.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, pairwise
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from mstar.nn import ops
from mstar.nn.eager import never_compiled
from mstar.nn.ops import delta_reference

__all__ = [
    "CHUNK",
    "GatedNorm",
    "Spans",
    "StateSlots",
    "causal_conv",
    "gated_delta_net",
    "gated_delta_rule",
    "gated_rms_norm",
    "prepare",
]

CHUNK = 64
"""Tokens of a row that are computed at once."""


class StateSlots(NamedTuple):
    """Where the rows of a step have one tensor of their state.

    :param pool: ``[places, *shape]``, contiguous within a place. :param source: int64 ``[rows]``: the place of each
        row's state. :param target: likewise, of its state after the step: never a place that some row of the step
        reads; ``None``: it is not kept.
    """

    pool: Tensor
    source: Tensor
    target: Tensor | None


class GatedNorm(NamedTuple):
    """The norm behind a layer's rule: :func:`gated_rms_norm`'s other arguments."""

    gate: Tensor
    weight: Tensor
    eps: float


class Spans:
    """The rows of a step along its packed tokens. Make one for each forward: its layers share what is derived from it.

    :param offsets: int64 ``[rows + 1]``: where each row begins (:attr:`mstar.nn.node.Step.offsets`).
    :param tokens: of all rows. As many as rows means one of each; :attr:`single` says so.
    """

    def __init__(self, offsets: Tensor, tokens: int):
        self.offsets, self.tokens = offsets, tokens
        self.rows = offsets.shape[0] - 1
        self.single = tokens == self.rows

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row, on the host: waits for the device, and cannot be had while a graph is captured."""
        lengths: list[int] = self.offsets.diff().tolist()
        return lengths

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """First token of each row and the one behind its last; as :attr:`lengths`."""
        return list(pairwise(accumulate(self.lengths, initial=0)))

    @cached_property
    def row_of(self) -> Tensor:
        """The row of each token, int64 ``[tokens]``."""
        place = torch.arange(self.tokens, device=self.offsets.device)
        return torch.bucketize(place, self.offsets[1:], right=True)

    @cached_property
    def chunks(self) -> Tensor:
        """A table of :data:`CHUNK` tokens of one row each, int32 ``[3, chunks]``: first token, number of tokens, tokens
        of the whole row; those of a row one after the other. There are as many as there might be; those at the end have
        no tokens."""
        most = self.tokens // CHUNK + self.rows
        counts = (self.offsets.diff() + (CHUNK - 1)) // CHUNK
        ends = counts.cumsum(0)
        number = torch.arange(most, device=self.offsets.device)
        row = torch.bucketize(number, ends, right=True).clamp_(max=self.rows - 1)
        first = self.offsets[row] + (number - (ends - counts)[row]) * CHUNK
        count = (self.offsets[row + 1] - first).clamp_(0, CHUNK)
        return torch.stack((first, count, self.offsets.diff()[row])).to(torch.int32)

    @cached_property
    def first_chunks(self) -> Tensor:
        """Where each row's lines of :attr:`chunks` begin, and where the last row's end: int32 ``[rows + 1]``."""
        counts = (self.offsets.diff() + (CHUNK - 1)) // CHUNK
        ends = counts.cumsum(0).to(torch.int32)
        return torch.cat((ends.new_zeros(1), ends))


def prepare(device: torch.device) -> None:
    """Load the kernels for *device*, or compile them, so that the first step need not: for :meth:`Model.loaded
    <mstar.nn.model.Model.loaded>`. Triton's are compiled at their first use all the same."""
    _on(torch.empty(0, device=device))


def _on(x: Tensor) -> ModuleType:
    if x.is_cpu and ops.cpu_kernels_fault() is None:
        from mstar.nn.ops import cpu_delta

        return cpu_delta
    if not x.is_cuda or ops.cuda_kernels_fault() is not None:
        return delta_reference
    from mstar.nn.ops import cuda_delta

    return cuda_delta


@never_compiled
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
    """What a layer does between its projections, ``[N, v_heads, V]`` in the dtype of *mixed*.

    That is: a causal convolution with silu, queries and keys of length 1 (queries over ``sqrt(K)``), the gates
    ``β = sigmoid(b)`` and ``g = −exp(a_log) softplus(a + dt_bias)``, the delta rule, and *norm* if there is one. Both
    states are written.

    *mixed*, *a* and *b* may be columns of one wider tensor.

    :param mixed: ``[N, 2 * k_heads * K + v_heads * V]``: queries, keys, values. Each of ``k_heads`` serves
        ``v_heads / k_heads`` heads of values that follow one another.
    :param a: and *b*: ``[N, v_heads]``.
    :param conv_weight: ``[channels of mixed, width]``, the newest token's weight last.
    :param a_log: and *dt_bias*: ``[v_heads]``, floating point of any dtype.
    :param window: of ``[places, channels, width - 1]``: the last inputs of the convolution, oldest first.
    :param state: of ``[places, v_heads, K, V]``, float32 or bfloat16.
    :param following: as :func:`mstar.nn.ops.add_rms_norm`'s.
    """
    return _on(mixed).gated_delta_net(  # type: ignore[no-any-return]
        mixed, a, b, conv_weight, a_log, dt_bias, spans, window, state, norm, following
    )


@never_compiled
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, spans: Spans, window: StateSlots) -> Tensor:
    """``silu`` of a causal depthwise convolution along each row, ``[N, channels]`` in the dtype of *x*.

    :param x: ``[N, channels]``. :param weight: ``[channels, width]``. :param bias: ``[channels]``.
    :param window: see :func:`gated_delta_net`; it is written.
    """
    return _on(x).causal_conv(x, weight, bias, spans, window)  # type: ignore[no-any-return]


@never_compiled
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, spans: Spans, state: StateSlots
) -> Tensor:
    """The rule by itself, ``[N, v_heads, V]`` in the dtype of *v*; *state* is written.

    :param q: and *k*: ``[N, k_heads, K]``; their lengths are made 1 here. :param v: ``[N, v_heads, V]``.
    :param g: logarithm of what is kept, at most 0, float32 ``[N, v_heads]``.
    :param beta: ``[N, v_heads]``, 0 to 1. :param state: see :func:`gated_delta_net`.
    """
    return _on(v).gated_delta_rule(q, k, v, g, beta, spans, state)  # type: ignore[no-any-return]


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight * silu(gate)`` over the last dimension, in the dtype of *x*.

    :param x: and *gate*: ``[N, heads, V]``; *gate* may be a view of a wider tensor. :param weight: ``[V]``.
    """
    if torch.compiler.is_compiling():
        return delta_reference.gated_rms_norm(x, gate, weight, eps)
    return _on(x).gated_rms_norm(x, gate, weight, eps)  # type: ignore[no-any-return]

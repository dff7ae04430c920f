"""What transformers that are steered by vectors do between matrix products: modulated norms, gated additions, turned
heads, an activation behind attention.

Scales, shifts and gates are the same for all tokens of a row ("adaLN", Peebles & Xie 2023, arXiv:2212.09748). Each
function has a plain torch version (:mod:`mstar.nn.ops.modulate_reference`), which says what it means and runs on the
CPU and in compiled code, and a Triton kernel (:mod:`mstar.nn.ops.cuda_modulate`). Norms come as modules of PyTorch's:
the plain version calls them, so what is set on a module (that a compiler must leave it alone, say) holds there.

``x`` is ``[rows, tokens, width]`` and a vector ``[rows, 1, width]`` of the same dtype throughout; both may be views of
something wider, as long as the last dimension is one run of memory. Nothing that is given is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.ops import modulate_reference

__all__ = ["Addition", "Heads", "Norm", "add", "add_modulate", "modulate", "swiglu", "turn_heads"]

Norm = nn.LayerNorm | nn.RMSNorm
"""Over the last dimension, with or without a weight; a layer norm without a bias."""


class Addition(NamedTuple):
    """What is added to a stream: ``gate * norm(delta)``.

    :param delta: ``[rows, tokens, width]``. :param gate: ``[rows, 1, width]``; ``None``: 1. :param norm: or ``None``.
    :param bounded: the hyperbolic tangent of *gate* is the gate.
    """

    delta: Tensor
    gate: Tensor | None = None
    norm: Norm | None = None
    bounded: bool = False


def modulate(x: Tensor, norm: Norm, scale: Tensor | None, shift: Tensor | None = None) -> Tensor:
    """``(1 + scale) * norm(x) + shift`` ``[rows, tokens, width]``; without *scale* and *shift* the norm alone."""
    return _on(x).modulate(x, norm, scale, shift)  # type: ignore[no-any-return]


def add(x: Tensor, addition: Addition) -> Tensor:
    """``x + addition``, a new tensor."""
    return _on(x).add(x, addition)  # type: ignore[no-any-return]


def add_modulate(
    x: Tensor, addition: Addition, norm: Norm, scale: Tensor | None, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`add`, and :func:`modulate` of its result; gives both."""
    return _on(x).add_modulate(x, addition, norm, scale, shift)  # type: ignore[no-any-return]


class Heads(NamedTuple):
    """Queries, keys and values of some tokens as one projection leaves them, and the norms of the first two.

    :param fused: ``[rows, tokens, 3, heads, head_dim]``; tokens may be parts of wider rows. :param q_norm: and
        *k_norm*: over a head, with weights.
    """

    fused: Tensor
    q_norm: nn.RMSNorm
    k_norm: nn.RMSNorm


def turn_heads(parts: Sequence[Heads], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate the queries and keys of *parts*, whose tokens follow one another.

    A rotation turns pairs of neighbours, in float32: ``(a cos − b sin, b cos + a sin)``.

    :param cos: and *sin*: float32 ``[tokens of all parts, head_dim / 2]``.
    :returns: q, k and v ``[rows, tokens of all parts, heads, head_dim]``; of one part v is a view.
    """
    return _on(parts[0].fused).turn_heads(parts, cos, sin)  # type: ignore[no-any-return]


def swiglu(gate_up: Tensor, before: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` of *gate_up* ``[rows, tokens, 2 * hidden]``, gate first (Shazeer 2020, arXiv:2002.05202).

    :param before: ``[rows, tokens, width]``, what stands before it in one tensor ``[rows, tokens, width + hidden]``.
    """
    return _on(gate_up).swiglu(gate_up, before)  # type: ignore[no-any-return]


def _on(x: Tensor) -> ModuleType:
    if torch.compiler.is_compiling() or not x.is_cuda or ops.cuda_kernels_fault() is not None:
        return modulate_reference
    from mstar.nn.ops import cuda_modulate

    return cuda_modulate

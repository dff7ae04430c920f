"""Operations that a compiler must leave alone (``compile_exact_ops``).

A distilled sampler of a few steps makes much of the last bits that a compiler's reductions change. Modules of the kinds
named keep their plain kernels: the compiled code stops at each and goes on behind it.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Activation", "keep_exact"]


class Activation(nn.Module):
    """Base of activations that are modules of their own, so that they can be kept."""


_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "norms": (nn.RMSNorm, nn.LayerNorm),
    "activations": (Activation,),
}


def keep_exact(module: nn.Module, wanted: bool | tuple[str, ...]) -> None:
    """Have a compiler call *module*'s operations of the kinds *wanted* (true: all) as they are."""
    names = tuple(_KINDS) if wanted is True else wanted or ()
    kinds = tuple(kind for name in names for kind in _KINDS[name])
    for part in module.modules():
        if kinds and isinstance(part, kinds):
            part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]

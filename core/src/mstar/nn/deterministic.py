"""Nodes of ``engine.deterministic`` on a GPU: which can be, and how their products are told."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from mstar.nn import ops
from mstar.nn.decoder import Attention, DecoderLayer, DecoderStack, GatedMLP
from mstar.nn.linear import ColumnLinear, Linear, LMHead, MergedLinear, QKVLinear, RowLinear, VocabEmbedding
from mstar.nn.node import Node, says
from mstar.nn.norm import OffsetRMSNorm, RMSNorm
from mstar.nn.rotary import Rotary

__all__ = ["deterministic_faults", "prepare_deterministic"]

_LINEAR = (Linear, ColumnLinear, RowLinear, MergedLinear, QKVLinear, LMHead)
_OURS = (Attention, DecoderLayer, DecoderStack, GatedMLP, *_LINEAR, OffsetRMSNorm, RMSNorm, Rotary, VocabEmbedding)
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Identity)


def deterministic_faults(name: str, node: Node) -> Iterator[str]:
    """Why *node*, called *name*, is not batch invariant; nothing if it is. A node without its weights will do."""
    if not _says_so(type(node)):
        yield (
            f"node {name!r} cannot be deterministic: {type(node).__name__} does not say that its rows are computed "
            "apart (batch_invariant = True)"
        )
        return
    for path, module in node.named_modules():
        if path and not isinstance(module, _HOLDERS) and not _says_so(type(module)):
            yield (
                f"node {name!r} cannot be deterministic: its module {path!r} is a {type(module).__name__}, whose "
                "results may depend on the number of rows"
            )


def prepare_deterministic(name: str, node: Node) -> Iterator[str]:
    """Have all linear layers of *node*, which has its weights, compute each row alike; the faults of those that
    cannot."""
    for path, module in node.named_modules():
        if isinstance(module, Linear):
            reason = ops.deterministic_fault(module.weight, module.bias)
            if reason is not None:
                yield f"node {name!r} cannot be deterministic: layer {path!r}: {reason}"
            module.deterministic = True


def _says_so(kind: type) -> bool:
    return says(kind, "batch_invariant", _OURS)

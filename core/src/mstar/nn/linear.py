"""Linear layers, named after how tensor parallelism cuts them, and the fused ones that read several published tensors.

A fused layer (:class:`MergedLinear`, :class:`QKVLinear`) has one parameter for several published ones, concatenated
along the output dimension: one matrix product instead of three. :mod:`mstar.weights.names` maps each published tensor
to its rows, so that the loader reads it straight into place.

*Tensor parallelism* is an argument, *tp*, of the layers that it divides; by default it is that of the node being built
(:func:`mstar.nn.mesh.building`). Their sizes are given for the whole model, their parameters are this rank's share. A
column-parallel layer gives this rank's output features, a row-parallel one takes this rank's input features and adds
all ranks' products up: one sum for each pair of them. :class:`Linear` itself is never divided.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.mesh import Group, current_mesh
from mstar.nn.norm import RMSNorm
from mstar.nn.shards import Cut, Division, Part, Share, shares

__all__ = [
    "ColumnLinear",
    "ColumnWeight",
    "LMHead",
    "Linear",
    "MergedLinear",
    "QKVLinear",
    "RowLinear",
    "VocabEmbedding",
]

_ALIGNED = 8
"""Rows of a vocabulary come in so many: 16 bytes of 16-bit logits."""

Product = Callable[[Tensor, Tensor | None], Tensor]


class Linear(nn.Module):
    """``x @ weight.T + bias``; *weight* ``[out_features, in_features]``, *x* ``[..., in_features]``.

    :ivar product: set by :func:`mstar.nn.cpu_linear.prepare_cpu` to a faster way to multiply; ``weight`` is empty then.
    :ivar deterministic: set by :func:`mstar.nn.deterministic.prepare_deterministic`: see :func:`mstar.nn.ops.linear`.
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.product: Product | None = None
        self.deterministic = False

    def forward(self, x: Tensor) -> Tensor:
        return self._multiplied(x, self.bias)

    def _multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.product is not None:
            return self.product(x, bias)
        return ops.linear(x, self.weight, bias, self.deterministic)

    def after(self, norm: RMSNorm, x: Tensor, delta: Tensor | None) -> Tensor:
        """``self(norm(x, delta))``, in one kernel where there is one."""
        out = self._fused_after(norm, x, delta)
        return self(norm(x, delta, self.weight)) if out is None else out

    def _fused_after(self, norm: RMSNorm, x: Tensor, delta: Tensor | None) -> Tensor | None:
        if delta is not None or self.product is not None:
            return None
        return ops.norm_linear(x, norm.weight, norm.eps, self.weight, self.bias, self.deterministic)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor | None:
        """Add ``self(x)`` to *residual* in place where one kernel does both.

        :returns: what is still to be added: ``None``, ``self(x)``, or its parts (:func:`mstar.nn.ops.divided_linear`).
        """
        if self.product is not None:
            return self(x)  # type: ignore[no-any-return]
        if ops.add_linear(residual, x, self.weight, self.bias, self.deterministic):
            return None
        parts = None if self.bias is not None or self.deterministic else ops.divided_linear(x, self.weight)
        return self(x) if parts is None else parts

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"


class ColumnLinear(Linear):
    """Output features are what tensor parallelism divides: every rank computes some of them from the whole input.

    :param unit: features that stay together (those of a head). :param sections: where one published matrix computes
        several things side by side: their output features, each of which is divided.
    :param own_features: this rank's output features, where a subclass divides them in a way of its own.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        unit: int = 1,
        sections: tuple[int, ...] = (),
        tp: Group | None = None,
        own_features: int | None = None,
    ):
        self.tp = tp or current_mesh().tp
        self.divisions = _divisions("output", sections or (out_features,), unit)
        self._cut = Cut(0, out_features, shares(sections or (out_features,), self.tp, unit))
        super().__init__(in_features, self._cut.length if own_features is None else own_features, bias)

    def published_parts(self, name: str) -> Iterator[Part]:
        """What of published tensors fills parameter *name*."""
        yield Part("", cut=_unless_whole(self._cut))


class RowLinear(Linear):
    """Input features are what tensor parallelism divides: every rank's product is a part of the sum, which all get.

    The bias is added once, by the first rank. *unit* and *sections* as :class:`ColumnLinear`'s, of the input features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        unit: int = 1,
        sections: tuple[int, ...] = (),
        tp: Group | None = None,
    ):
        self.tp = tp or current_mesh().tp
        self.divisions = _divisions("input", sections or (in_features,), unit)
        runs = shares(sections or (in_features,), self.tp, unit)
        super().__init__(sum(run.length for run in runs), out_features, bias)
        self._cut = Cut(1, in_features, runs)

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return self._multiplied(x, self.bias)
        out: Tensor = self.tp.all_reduce(self._part(x))
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor | None:
        if self.tp.size == 1:
            return super().add_to(residual, x)
        part = self._part(x)
        if self.tp.add_reduced(residual, part):
            return None
        out: Tensor = self.tp.all_reduce(part)
        return out

    def _part(self, x: Tensor) -> Tensor:
        """What this rank adds to the sum."""
        return self._multiplied(x, self.bias if self.tp.rank == 0 else None)

    def published_parts(self, name: str) -> Iterator[Part]:
        yield Part("", cut=_unless_whole(self._cut) if name == "weight" else None)


class MergedLinear(ColumnLinear):
    """Several column-parallel layers with one input, computed as one.

    :param parts: published module name → its output features, in the order of the output; those of its sections, if it
        computes several things side by side.
    :param bias: whether the parts have biases, or the names of those that do: the others' rows of the bias are 0.
    :param unit: features that stay together; of each part, where they differ.
    :ivar widths: published module name → this rank's output features.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int | tuple[int, ...]],
        bias: bool | Collection[str] = False,
        *,
        unit: int | Mapping[str, int] = 1,
        tp: Group | None = None,
    ):
        tp = tp or current_mesh().tp
        sections = {name: (size,) if isinstance(size, int) else size for name, size in parts.items()}
        units = {name: unit if isinstance(unit, int) else unit.get(name, 1) for name in parts}
        self.parts = {name: sum(sizes) for name, sizes in sections.items()}
        self._cuts = {
            name: Cut(0, self.parts[name], shares(sizes, tp, units[name])) for name, sizes in sections.items()
        }
        self.widths = {name: cut.length for name, cut in self._cuts.items()}
        super().__init__(
            in_features, sum(self.parts.values()), bool(bias), tp=tp, own_features=sum(self.widths.values())
        )
        found = [division for name in parts for division in _divisions("output", sections[name], units[name])]
        self.divisions = tuple(dict.fromkeys(found))
        self.biased = frozenset(parts) if bias is True else frozenset(bias or ())
        if unknown := self.biased - self.parts.keys():
            raise ValueError(f"a bias for {sorted(unknown)}, which are none of the parts {list(self.parts)}")

    def published_parts(self, name: str) -> Iterator[Part]:
        start = 0
        for part, cut in self._cuts.items():
            if name != "bias" or part in self.biased:
                yield Part(part, start, cut.length, _unless_whole(cut))
            else:
                yield Part(None, start, cut.length)
            start += cut.length


class QKVLinear(MergedLinear):
    """Query, key and value projections with grouped heads; output ``[..., (heads + 2 * kv_heads) * head_dim]``.

    Heads are divided, each with the key and value heads that it looks at. Where there are fewer key-value heads than
    ranks, several ranks hold the same one.

    :ivar heads: of this rank; *kv_heads*: likewise.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool | Collection[str] = False,
        names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
        *,
        tp: Group | None = None,
    ):
        sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        super().__init__(hidden, dict(zip(names, sizes, strict=True)), bias, unit=head_dim, tp=tp)
        self.divisions = (Division("query heads", heads), Division("key-value heads", kv_heads, copied=True))
        self.heads, self.kv_heads = (self.widths[name] // head_dim for name in names[:2])


class ColumnWeight(nn.Module):
    """A parameter ``[out_features, *shape]`` beside column-parallel layers, with an entry for each of their output
    features: the taps of a depthwise convolution, say. *unit* and *sections* as :class:`ColumnLinear`'s."""

    def __init__(
        self,
        out_features: int,
        shape: tuple[int, ...] = (),
        *,
        unit: int = 1,
        sections: tuple[int, ...] = (),
        tp: Group | None = None,
    ):
        super().__init__()
        tp = tp or current_mesh().tp
        self.divisions = _divisions("output", sections or (out_features,), unit)
        self._cut = Cut(0, out_features, shares(sections or (out_features,), tp, unit))
        self.weight = nn.Parameter(torch.empty(self._cut.length, *shape), requires_grad=False)

    def published_parts(self, name: str) -> Iterator[Part]:
        yield Part("", cut=_unless_whole(self._cut))


class VocabEmbedding(nn.Module):
    """Token ids (integers, any shape) → rows of *weight* ``[vocab, hidden]``.

    Tensor parallelism divides the vocabulary, the last share padded with zeros: any size will do. A rank gives zeros
    for ids of others, and the sum is exact. A single rank's *weight* is padded as well where a head may share it.
    """

    def __init__(self, vocab: int, hidden: int, *, tp: Group | None = None):
        super().__init__()
        self.vocab, self.tp = vocab, tp or current_mesh().tp
        self._rows = _vocab_rows(vocab, self.tp)
        self._first = self.tp.rank * self._rows
        self.weight = nn.Parameter(torch.empty(self._rows, hidden), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        own = ids - self._first
        elsewhere = (own < 0) | (own >= self._rows)
        rows = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        found: Tensor = self.tp.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0))
        return found

    def published_parts(self, name: str) -> Iterator[Part]:
        yield from _vocab_parts(self.vocab, self.tp)


class LMHead(Linear):
    """Hidden states ``[N, hidden]`` → logits ``[N, vocab]``. Given *tied*, it shares that embedding's parameter.

    Under tensor parallelism each rank computes the logits of its share of the vocabulary, and all gather them: every
    rank samples, from the same bits with the same random numbers, so that nobody waits to be told what was chosen and
    samplers know nothing of ranks. That moves *vocab* numbers a sampled row, little beside a layer's sums over a
    prompt, and one transfer beside two sums a layer in decoding.

    Where the vocabulary is no multiple of 8 the weight has rows of zeros at its end and what they give is cut off:
    16-bit logits of 156,940 tokens begin at addresses that no fast kernel of cuBLAS takes, and a step of 100 rows needs
    0.88 ms for them instead of 0.3 (H200).
    """

    def __init__(self, hidden: int, vocab: int, tied: VocabEmbedding | None = None, *, tp: Group | None = None):
        self.vocab, self.tp = vocab, tp or current_mesh().tp
        super().__init__(hidden, _vocab_rows(vocab, self.tp))
        if tied is not None:
            self.weight = tied.weight

    def forward(self, x: Tensor) -> Tensor:
        return self._whole(self._multiplied(x, self.bias))

    def _fused_after(self, norm: RMSNorm, x: Tensor, delta: Tensor | None) -> Tensor | None:
        own = super()._fused_after(norm, x, delta)
        return None if own is None else self._whole(own)

    def _whole(self, own: Tensor) -> Tensor:
        if self.tp.size == 1:
            return own[..., : self.vocab]
        every: Tensor = self.tp.all_gather(own)
        return every[..., : self.vocab].contiguous()

    def published_parts(self, name: str) -> Iterator[Part]:
        yield from _vocab_parts(self.vocab, self.tp)


def _divisions(side: str, sections: tuple[int, ...], unit: int) -> tuple[Division, ...]:
    what = f"{side} features" if unit == 1 else f"groups of {unit} {side} features"
    return tuple(Division(what, size) for size in dict.fromkeys(size // unit for size in sections))


def _unless_whole(cut: Cut) -> Cut | None:
    return None if cut.whole else cut


def _vocab_rows(vocab: int, tp: Group) -> int:
    """How many rows of an embedding each rank has, those that pad it among them."""
    own = -(-vocab // tp.size)
    return -(-own // _ALIGNED) * _ALIGNED


def _vocab_parts(vocab: int, tp: Group) -> Iterator[Part]:
    """A rank's rows of an embedding, and those that pad it."""
    rows = _vocab_rows(vocab, tp)
    if rows == vocab:
        yield Part("")
        return
    first = min(tp.rank * rows, vocab)
    held = min(rows, vocab - first)
    yield Part("", 0, held, Cut(0, vocab, (Share(first, held),)))
    if held < rows:
        yield Part(None, held, rows - held)

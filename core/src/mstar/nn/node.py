"""The contract between the engine and a node's module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

__all__ = ["Node", "Packed", "Sampled", "Step", "says"]


@dataclass(slots=True)
class Step:
    """What one step of one entry looks like: its rows and the resources' views. Passed to the node first.

    :param lengths: items of each row along the packed inputs in this step (1 for rows without a packed input).
    :param offsets: int64 ``[rows + 1]``: where each row begins along a packed input.
    :param last: int64 ``[rows]``: index of each row's last item along a packed input.
    :param complete: per row, whether the row's call ends with this step; other rows are chunks whose non-packed outputs
        are discarded (compute them anyway: shapes stay regular).
    :param views: resource name → that resource's view of this step. ``step["kv"]`` is the way to one.
    :param lane: what the engine planned the step on, if a captured graph may run it
        (:mod:`mstar.resources.staging`). Its rows are then padded: a node must not tell rows apart on the host. If rows
        have several tokens, reading *lengths* or *complete* there is an error, and the step runs without a graph.
    :param entry: which entry of the node it is.
    """

    lengths: Sequence[int]
    offsets: Tensor
    last: Tensor
    complete: Sequence[bool]
    views: Mapping[str, Any]
    device: torch.device
    dtype: torch.dtype
    lane: Any = None
    entry: str = "forward"

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def __getitem__(self, resource: str) -> Any:
        try:
            return self.views[resource]
        except KeyError:
            declared = ", ".join(map(repr, self.views)) or "none"
            raise LookupError(
                f"entry {self.entry!r} uses resource {resource!r}, which it does not declare (it declares {declared}): "
                f"list it in Entry({self.entry!r}, resources=(…, {resource!r}))"
            ) from None


@dataclass(slots=True)
class Packed:
    """A packed output whose rows' lengths differ from the input's. ``data`` is ``[sum(lengths), ...]``."""

    data: Tensor
    lengths: Sequence[int]


@dataclass(slots=True)
class Sampled:
    """What a sampler returns: token ids int64 ``[rows]``. An id of −1 marks a row whose logits were no numbers: its
    request fails, the others go on.

    Return it from an entry under a stacked int64 port; the engine uses the ids as the value and passes the
    log-probabilities on with what the port emits.

    :param report: called when the step has been launched; gives what reads the log-probabilities of the rows that asked
        for them (one entry a row, ``None`` for the others) once the step is done, or ``None`` if no row did.
    """

    ids: Tensor
    report: Callable[[], Callable[[], Sequence[Any]] | None] | None = None


def says(kind: type, flag: str, trusted: tuple[type, ...] = ()) -> bool:
    """Whether class *kind* states *flag* (of :class:`Node`'s class variables), and no class below the one that does has
    methods of its own. *trusted*: classes of which it is known."""
    for base in kind.__mro__:
        if base in trusted:
            return True
        stated = vars(base).get(flag)
        if stated is not None:
            return bool(stated)
        if any(inspect.isfunction(value) and name != "__init__" for name, value in vars(base).items()):
            return False
    return False


class Node(nn.Module):
    """Base of all nodes. An entry is a method ``(step, **inputs) -> dict`` of outputs by port name.

    A node is pure until its step is committed: it writes per-request state only through the views in ``step`` and keeps
    nothing about a request on itself, so that a failed step can be repeated with fewer rows (promise P7).

    :cvar batch_invariant: what its own code computes for a row follows from the row alone, bit for bit: it uses nothing
        but modules that say the same (those of a Llama's decoder do), indexing and elementwise operations. Needed for
        ``engine.deterministic`` on a GPU. A subclass with methods of its own must say it again.
    :cvar tensor_parallel: it can be divided among ranks: it is made of layers that take their share when they are built
        (:mod:`mstar.nn.linear`), asks these for its numbers of heads, and what it computes beside them is the same on
        every rank. A subclass with methods of its own must say it again, here too.
    :cvar sequence_parallel: its tokens can be divided: it hands them out and gathers them with
        :class:`mstar.nn.sequence.SequenceShards`. As above.
    """

    batch_invariant: ClassVar[bool] = False
    tensor_parallel: ClassVar[bool] = False
    sequence_parallel: ClassVar[bool] = False

    def regions(self) -> Iterator[tuple[str, nn.Module]]:
        """What ``engine.compile`` compiles, each module by itself, with its name in the node. By default the items of
        every ``ModuleList`` that is called ``layers``. Regions are called as modules (``layer(x)``) and hold the steps'
        views, which are not compiled, as arguments only."""
        for path, module in self.named_modules():
            if isinstance(module, nn.ModuleList) and path.rpartition(".")[2] == "layers":
                yield from ((f"{path}.{index}", item) for index, item in enumerate(module))

    def step_bytes(self, items: int, device: torch.device, dtype: torch.dtype) -> int:
        """What a step of an entry with a chunk port, of *items* items, has allocated at its largest, beside its inputs
        and outputs; also of a piece that has more items and is not cut. Memory for it is kept free of pools on a GPU.
        0, the default: what is kept for every model is enough (a gigabyte; that of a language model's 1,024 tokens)."""
        return 0

"""Sequence parallelism: a step's tokens divided among ranks, which exchange heads for tokens where tokens attend.

Source: "DeepSpeed Ulysses" (Jacobs et al. 2023, arXiv:2309.14509). Outside of attention a rank computes its tokens with
all heads. For attention each rank gets all tokens of some heads, attends, and gives the results back: two exchanges of
the size of what is exchanged, however many ranks there are, and no rank waits for another's keys in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mstar.nn.eager import never_compiled
from mstar.nn.mesh import Group, current_mesh

__all__ = ["SequenceShards"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q, k, v ``[rows, tokens, heads, head_dim]``; gives such a tensor with q's heads."""


class SequenceShards:
    """How the tokens of one sequence lie on the ranks of *group*: of each of its parts every rank has one stretch.

    Tokens must be told apart by what they carry (a rotation, say), not by where they stand: with several parts a rank's
    stretches follow each other, and attention sees the ranks' tokens in the order of the ranks. Lengths that the ranks
    do not divide are padded with zeros at their ends, which attention does not see; heads likewise. One rank: all
    methods give back what they get.

    :param lengths: tokens of each part, for instance the picture's and the text's.
    :param group: by default that of the node being built.
    """

    def __init__(self, lengths: Sequence[int], group: Group | None = None):
        self.group = group or current_mesh().sp
        self.lengths = tuple(lengths)
        self._own = tuple(-(-length // self.group.size) for length in self.lengths)

    def beside(self, length: int) -> SequenceShards:
        """These parts, and one more of *length* tokens."""
        return SequenceShards((*self.lengths, length), self.group)

    @property
    def tokens(self) -> int:
        """That a rank has, padding included."""
        return sum(self._own)

    def own(self, x: Tensor, part: int = 0, dim: int = 1) -> Tensor:
        """This rank's stretch of part *part*, of which *x* holds all tokens along *dim*."""
        if self.group.size == 1:
            return x
        each, length = self._own[part], self.lengths[part]
        first = min(self.group.rank * each, length)
        held = x.narrow(dim, first, min(each, length - first))
        missing = each - held.shape[dim]
        return held if not missing else F.pad(held, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, missing])

    def whole(self, x: Tensor, part: int = 0) -> Tensor:
        """All tokens of part *part*: *x* ``[rows, tokens, …]`` holds this rank's of all parts."""
        if self.group.size == 1:
            return x.narrow(1, sum(self.lengths[:part]), self.lengths[part])
        own = x.narrow(1, sum(self._own[:part]), self._own[part])
        every: Tensor = self.group.all_gather(own, 1)
        return every.narrow(1, 0, self.lengths[part])

    @never_compiled
    def attend(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """*attend* over the whole sequence. *q*, *k*, *v* ``[rows, tokens, heads, head_dim]``: this rank's tokens, all
        of the same heads. Returns such a tensor."""
        size = self.group.size
        if size == 1:
            return attend(q, k, v)
        heads = q.shape[2]
        if k.shape[2] != heads or v.shape[2] != heads:
            raise ValueError(f"{heads} heads of queries, {k.shape[2]} of keys: the ranks divide heads of one number")
        seen = self._seen(q.device)
        gathered = self._to_heads(torch.stack((q, k, v)))
        if seen is not None:
            gathered = gathered.index_select(2, seen)
        mixed = attend(*gathered.unbind(0))
        if seen is not None:
            around = mixed.new_zeros(mixed.shape[0], size * self.tokens, *mixed.shape[2:])
            mixed = around.index_copy_(1, seen, mixed)
        return self._to_tokens(mixed)[:, :, :heads]

    def _to_heads(self, x: Tensor) -> Tensor:
        """``[3, rows, own tokens, heads, d]`` → ``[3, rows, all tokens, own heads, d]``."""
        size = self.group.size
        x = F.pad(x, (0, 0, 0, -x.shape[3] % size))
        given = x.reshape(*x.shape[:3], size, -1, x.shape[4]).permute(3, 0, 1, 2, 4, 5)
        taken: Tensor = self.group.exchange(given)  # [ranks' tokens, 3, rows, own tokens, own heads, d]
        return taken.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)

    def _to_tokens(self, x: Tensor) -> Tensor:
        """``[rows, all tokens, own heads, d]`` → ``[rows, own tokens, heads, d]``."""
        given = x.reshape(x.shape[0], self.group.size, -1, *x.shape[2:]).permute(1, 0, 2, 3, 4)
        taken: Tensor = self.group.exchange(given)  # [ranks' heads, rows, own tokens, own heads, d]
        return taken.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _seen(self, device: torch.device) -> Tensor | None:
        """Where in the ranks' tokens, one after the other, the real ones stand; ``None``: all are."""
        size = self.group.size
        if all(length % size == 0 for length in self.lengths):
            return None
        places, start = [], 0
        for length, own in zip(self.lengths, self._own, strict=True):
            token = torch.arange(length, device=device)
            places.append(token // own * self.tokens + start + token % own)
            start += own
        return torch.cat(places).sort().values

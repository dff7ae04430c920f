"""One step of the sampler, as the node has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from mstar.nn import sampling
from mstar.nn.node import Sampled
from mstar.resources.sampler_edits import Edits
from mstar.resources.sampler_rows import RowParams
from mstar.resources.staging import Late
from mstar.spec.request import TokenLogprob

if TYPE_CHECKING:
    from mstar.resources.sampler import SamplerResource

__all__ = ["SamplerView", "Variant"]


class Variant(NamedTuple):
    """What a captured step does: whether unlikely tokens are dropped, whether logits are edited before, and how many
    entries of ``logit_bias`` there may be."""

    filters: bool = False
    edits: bool = False
    bias: int = 0


class SamplerView:
    """One step of the sampler. ``step["sampler"].sample(logits)``."""

    index: Tensor
    numbers_sent: Tensor

    def __init__(self, resource: SamplerResource):
        self._resource = resource
        self._logits: list[Tensor] = []
        self.sampled: list[Tensor] = []
        """int64 ``[rows]``, one for each call of :meth:`sample`."""

    def fill(
        self,
        rows: RowParams,
        index: Tensor,
        numbers: Tensor,
        real: int,
        filters: bool,
        edits: Edits | None,
        replay: bool,
    ) -> None:
        """Plan a step of *rows*, of which the first *real* are no padding.

        :param index: int64 ``[rows]``: each row's slot. :param numbers: float64 ``[calls, rows]``: random numbers for
            so many uses of the sampler. :param replay: the node is not called; a graph repeats what its calls did.
        """
        self.rows, self.index, self.numbers_sent, self.real = rows, index, numbers, real
        self.filters, self.edits = filters, edits
        if not replay:
            self.sampled, self._logits = [], []

    def sample(self, logits: Tensor) -> Sampled:
        """Choose one token per row. *logits*: ``[rows, vocab]`` in row order, any float dtype; they are not changed.

        May be called several times in a step (one call per codebook): each call uses random numbers of its own;
        penalties, ``min_tokens`` and constraints see tokens of earlier steps only. Rows whose call is not complete are
        sampled to no consequence.
        """
        expected = (len(self.rows.slots), self._resource.spec.vocab)
        if tuple(logits.shape) != expected:
            raise ValueError(
                f"{self._resource.name}: logits are {tuple(logits.shape)}, expected [rows, vocab] {expected}"
            )
        call = len(self.sampled)
        ids = self._resource.choose(logits, self, call)
        self.sampled.append(ids)
        self._logits.append(logits)
        return Sampled(ids, partial(self._report, call))

    def numbers(self, call: int) -> Tensor:
        """The rows' random numbers for the *call*-th use, float64 ``[rows]``; anything if no row draws."""
        if call < len(self.numbers_sent):
            return self.numbers_sent[call]
        return self._resource.more_numbers(self.rows, call)  # it is used more often than ever before

    def _report(self, call: int) -> Callable[[], list[TokenLogprob | None]] | None:
        wanted, count = self.rows.reports, self.real
        if wanted is None:
            return None
        sampled = self.sampled[call][wanted.where]
        tables = sampling.token_logprobs(self._logits[call][wanted.where], sampled, max(wanted.alternatives))
        late = [Late(tensor) for tensor in (sampled, *tables)]

        def read() -> list[TokenLogprob | None]:
            reports: list[TokenLogprob | None] = [None] * count
            ids, chosen, values, tokens = (one.values() for one in late)
            found = sampling.as_reports(ids, chosen, values, tokens, wanted.alternatives)
            for row, report in zip(wanted.rows, found, strict=True):
                reports[row] = report
            return reports

        return read

"""How a step's tokens are chosen from its logits: by the device's kernels, or in plain operations."""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.nn import ops, sampling
from mstar.resources.sampler_history import TokenHistories
from mstar.resources.sampler_rows import RowParams, SlotTable
from mstar.resources.sampler_view import SamplerView

__all__ = ["Choosing"]


class Choosing:
    """Reads the parameters in *table* and the token counts in *histories*.

    :ivar fused: sampling in few kernels; ``None`` where there are none.
    """

    def __init__(self, vocab: int, device: torch.device, table: SlotTable, histories: TokenHistories):
        self._vocab, self._device, self._table, self._histories = vocab, device, table, histories
        self._scratch = torch.empty(2, 0, vocab, device=device)
        self.fused = ops.fused_sample(device)

    def choose(self, logits: Tensor, view: SamplerView, numbers: Tensor) -> Tensor:
        """Token ids int64 ``[rows]``; −1 for a row whose logits hold a NaN or +inf.

        :param logits: ``[rows, vocab]``, any float dtype, not changed. :param numbers: float64 ``[rows]``: the rows'
            random numbers.
        """
        rows = view.rows
        if self.fused is not None:
            return self.fused(*self._read(logits, view, numbers))
        scores = self._changed(logits, view)
        if rows.all_greedy:
            ids = sampling.argmax(scores)
            # A NaN anywhere in a row wins its argmax.
            return _marked(ids, scores.gather(1, ids.unsqueeze(1)).squeeze(1))
        greedy = sampling.argmax(scores) if rows.greedy is not None else None
        work, keep = self._workspace(len(logits))
        torch.mul(scores, rows.inverse_temperature, out=work)
        best = work.amax(dim=-1)
        if rows.filters:
            torch.ge(work, self._threshold(work, best, rows).unsqueeze(1), out=keep)
        weights = work.sub_(best.unsqueeze(1)).exp_()
        if rows.filters:
            weights.mul_(keep)
        ids = sampling.draw(weights, numbers)
        if rows.greedy is not None and greedy is not None:
            ids = torch.where(rows.greedy, greedy, ids)
        return _marked(ids, best)

    def _workspace(self, rows: int) -> tuple[Tensor, Tensor]:
        """Two float32 ``[rows, vocab]``, kept between steps: fresh memory of this size costs more than the maths on it.
        The second holds 0 and 1: comparing into float32 and multiplying is faster than a mask of booleans."""
        if self._scratch.shape[1] < rows:
            with torch.inference_mode(False):
                self._scratch = torch.empty(2, rows, self._vocab, device=self._device)
        return self._scratch[0, :rows], self._scratch[1, :rows]

    def _read(
        self, logits: Tensor, view: SamplerView, numbers: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool, sampling.Changes | None]:
        """What the kernels read: they change logits by masks and penalties as they come by, and by no bias."""
        changes = None if view.edits is None else view.edits.changes(self._histories)
        if view.edits is not None and changes is None:
            logits = self._changed(logits, view)
        elif view.edits is not None and view.edits.bias is not None:
            logits = self._copy(logits)
            sampling.add_bias(logits, *view.edits.bias)
        return logits, view.index, self._table.floats, self._table.top_k, numbers, view.filters, changes

    def _changed(self, logits: Tensor, view: SamplerView) -> Tensor:
        """The logits with bias, masks and penalties: *logits* itself when nothing applies, else a float32 copy."""
        if view.edits is None:
            return logits
        scores = self._copy(logits)
        view.edits.apply(scores, view.index, self._table.floats, self._histories)
        return scores

    def _copy(self, logits: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return self._workspace(len(logits))[0].copy_(logits)
        return logits.to(torch.float32, copy=True)  # of a graph's own memory, which graphs share

    @staticmethod
    def _threshold(scores: Tensor, best: Tensor, rows: RowParams) -> Tensor:
        """The least logit that top-k, top-p and min-p keep in each row: ``[rows]``, minus infinity without a filter."""
        threshold = torch.full_like(best, -torch.inf)
        if rows.sorting is not None:
            index, top_k, top_p, max_k = rows.sorting
            part = scores if index is None else scores[index]
            found = sampling.filter_threshold(part, top_k, top_p, max_k)
            threshold = found if index is None else threshold.index_copy_(0, index, found)
        if rows.min_p is not None:
            threshold = torch.maximum(threshold, sampling.min_p_threshold(best, rows.min_p))
        return threshold


def _marked(ids: Tensor, best: Tensor) -> Tensor:
    """*ids* with −1 in the rows whose best score is no finite number."""
    return ids.masked_fill_(best.isfinite().logical_not_(), -1)

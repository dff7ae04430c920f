"""The sampler: turns logits into tokens under each request's own parameters."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.nn import sampling
from mstar.nn.node import Sampled
from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row
from mstar.resources.sampler_rows import Constraint, ConstraintFactory, RowParams, SlotParams, SlotTable
from mstar.resources.slotted import SlotResource
from mstar.spec.errors import RequestError
from mstar.spec.request import EngineRequest, SamplingParams, TokenLogprob
from mstar.spec.resources import Sampler

__all__ = ["Constraint", "ConstraintFactory", "SamplerResource", "SamplerView"]


class SamplerView:
    """One step of the sampler. ``step["sampler"].sample(logits)``."""

    def __init__(self, resource: SamplerResource, rows: RowParams):
        self._resource, self._rows = resource, rows
        self.sampled: list[Tensor] = []
        """int64 ``[rows]``, one for each call of :meth:`sample`."""

    def sample(self, logits: Tensor) -> Sampled:
        """Choose one token per row. *logits*: ``[rows, vocab]`` in row order, any float dtype; they are not changed.

        May be called several times in a step (one call per codebook): each call uses random numbers of its own; penalties
        and constraints see tokens of earlier steps only. Rows whose call is not complete are sampled to no consequence.
        """
        expected = (len(self._rows.slots), self._resource.spec.vocab)
        if tuple(logits.shape) != expected:
            raise ValueError(f"{self._resource.name}: logits are {tuple(logits.shape)}, expected [rows, vocab] {expected}")
        ids = self._resource.choose(logits, self._rows, len(self.sampled))
        self.sampled.append(ids)
        return Sampled(ids, self._report(logits, ids))

    def _report(self, logits: Tensor, ids: Tensor) -> list[TokenLogprob | None] | None:
        wanted = self._rows.reports
        if wanted is None:
            return None
        found = sampling.token_logprobs(logits[wanted.index], ids[wanted.index], wanted.alternatives)
        reports: list[TokenLogprob | None] = [None] * len(ids)
        for row, report in zip(wanted.rows, found, strict=True):
            reports[row] = report
        return reports


class _Histories:
    """Which tokens a slot has seen. Only slots with a penalty get a row; the tensors grow by doubling."""

    def __init__(self, vocab: int, device: torch.device):
        self.prompt = torch.zeros(0, vocab, dtype=torch.bool, device=device)
        self.counts = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def take(self) -> int:
        """A row without history."""
        if not self._free:
            held = len(self.prompt)
            more = max(held, 4)
            with torch.inference_mode(False):  # ordinary tensors: they are written in and out of inference mode
                self.prompt = torch.cat([self.prompt, self.prompt.new_zeros(more, self.prompt.shape[1])])
                self.counts = torch.cat([self.counts, self.counts.new_zeros(more, self.counts.shape[1])])
            self._free = list(range(held + more - 1, held - 1, -1))
        row = self._free.pop()
        self.prompt[row] = False
        self.counts[row] = 0
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def to_prompt(self, row: int) -> None:
        """What was generated so far counts as prompt from now on."""
        self.prompt[row] |= self.counts[row] > 0
        self.counts[row] = 0

    @property
    def used(self) -> int:
        return len(self.prompt) - len(self._free)


class SamplerResource(SlotResource):
    """Kind ``sampler``: one slot per owner with its parameters, its random stream and, for penalties, its history.

    Opening an owner that is open already (a session's next request) reads the new request's parameters and restarts the
    random stream; what the session generated before counts as prompt, if a penalty kept track of it.

    The random numbers of a step come from :func:`mstar.nn.sampling.uniforms` on the host: one float64 a row. A captured
    graph reads them from a static tensor that ``plan`` fills.

    :param constraints: makes the constraint of a request with a grammar; ``None``: such requests are refused.
    """

    kind = "sampler"
    spec: Sampler

    def __init__(
        self, name: str, spec: Sampler, context: ResourceContext, constraints: ConstraintFactory | None = None
    ):
        super().__init__(name, spec, context, slots=context.max_owners)
        self._device = torch.device(context.device)
        self._constraints = constraints
        self._table = SlotTable(context.max_owners, self._device)
        self._states: dict[int, SlotParams] = {}
        self._keys = np.zeros(context.max_owners, dtype=np.uint64)
        self._drawn = np.zeros(context.max_owners, dtype=np.int64)
        self._histories = _Histories(spec.vocab, self._device)
        self._scratch = torch.empty(0, spec.vocab, device=self._device)
        self._gathered: tuple[tuple[int, ...], RowParams] | None = None
        self._pending: SamplerView | None = None

    # --- life -------------------------------------------------------------------------------------------------------
    def open(self, owner: Owner, request: EngineRequest) -> None:
        slot = self._slots[owner]
        params = request.sampling.get(self.name) or SamplingParams()
        state = SlotParams.build(params, self.spec.vocab, self._device)
        if params.grammar is not None:
            state.constraint = self._constraint(params.grammar)
        self._adopt_history(state, self._states.get(slot), request)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._keys[slot] = sampling.stream_key(seed, self.name, owner.context)
        self._drawn[slot] = 0
        self._table.set(slot, params)
        self._states[slot] = state
        self._open.add(owner)
        self._gathered = None

    def _constraint(self, grammar: str) -> Constraint:
        if self._constraints is None:
            raise RequestError(
                "structured output is not available: this server has no constraint backend",
                param="response_format",
                code="unsupported_value",
            )
        return self._constraints(grammar, self.spec.vocab)

    def _adopt_history(self, state: SlotParams, before: SlotParams | None, request: EngineRequest) -> None:
        held = before.history if before is not None else None
        if not state.penalized:
            if held is not None:
                self._histories.give_back(held)
            return
        state.history = self._histories.take() if held is None else held
        self._histories.to_prompt(state.history)
        if self.spec.prompt is not None and request.inputs.get(self.spec.prompt) is not None:
            ids = np.asarray(request.inputs[self.spec.prompt]).reshape(-1)
            # Placeholders of media may lie outside the vocabulary; they are no tokens that could repeat.
            ids = np.unique(ids[(ids >= 0) & (ids < self.spec.vocab)]).astype(np.int64)
            self._histories.prompt[state.history, torch.from_numpy(ids).to(self._device)] = True

    def close(self, owner: Owner) -> None:
        state = self._states.pop(self._slots[owner], None)
        if state is not None and state.history is not None:
            self._histories.give_back(state.history)
        self._gathered = None
        super().close(owner)

    def match(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> int | None:
        return None

    def skip(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> None:
        """Nothing to do: the prompt's ids were read from the request."""

    # --- a step -------------------------------------------------------------------------------------------------------
    def plan(self, rows: Sequence[Row], frozen: bool = False) -> SamplerView:
        slots = tuple([self._slots[row.owner] for row in rows])
        if self._gathered is None or self._gathered[0] != slots:
            states = [self._states[slot] for slot in slots]
            self._gathered = (slots, RowParams.gather(slots, states, self._table))
        self._pending = SamplerView(self, self._gathered[1])
        return self._pending

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        view, self._pending = self._pending, None
        if view is None:
            raise IntegrityError(f"{self.name}: commit without a plan")
        if frozen or not view.sampled:
            return
        params = view._rows
        complete = np.fromiter((row.complete for row in rows), dtype=bool, count=len(rows))
        self._drawn[params.slots[complete]] += len(view.sampled)
        for ids in view.sampled:
            if params.penalties is not None:
                self._count(ids, params, complete)
            if params.constraints:
                self._accept(ids, params, complete)

    def _count(self, ids: Tensor, params: RowParams, complete: np.ndarray) -> None:
        assert params.penalties is not None
        # Rows that are not complete add 0: shapes do not depend on them.
        amount = torch.from_numpy(complete.astype(np.int32)).to(self._device)[params.penalties.rows]
        where = (params.penalties.histories, ids[params.penalties.rows])
        self._histories.counts.index_put_(where, amount, accumulate=True)

    def _accept(self, ids: Tensor, params: RowParams, complete: np.ndarray) -> None:
        tokens = ids.tolist()
        for row, constraint in params.constraints:
            if complete[row]:
                constraint.accept(tokens[row])

    def rollback(self, rows: Sequence[Row], frozen: bool = False) -> None:
        self._pending = None

    # --- choosing -----------------------------------------------------------------------------------------------------
    def choose(self, logits: Tensor, rows: RowParams, call: int) -> Tensor:
        """Token ids int64 ``[rows]`` for the step's *call*-th use of the sampler. Called by the view."""
        scores = self._edited(logits, rows, call)
        if rows.all_greedy:
            return sampling.argmax(scores)
        greedy = sampling.argmax(scores) if rows.greedy is not None else None
        work = torch.mul(scores, rows.inverse_temperature, out=self._workspace(len(logits)))
        best = work.amax(dim=-1)
        if rows.filters:
            self._filter(work, best, rows)
        weights = work.sub_(best.unsqueeze(1)).exp_()
        numbers = sampling.uniforms(self._keys[rows.slots], self._drawn[rows.slots] + call)
        ids = sampling.draw(weights, torch.from_numpy(numbers).to(self._device))
        return ids if rows.greedy is None or greedy is None else torch.where(rows.greedy, greedy, ids)

    def _workspace(self, rows: int) -> Tensor:
        """float32 ``[rows, vocab]``, kept between steps: fresh memory of this size costs more than the maths on it."""
        if len(self._scratch) < rows:
            with torch.inference_mode(False):
                self._scratch = torch.empty(rows, self.spec.vocab, device=self._device)
        return self._scratch[:rows]

    def _edited(self, logits: Tensor, rows: RowParams, call: int) -> Tensor:
        """The logits with bias, masks and penalties: *logits* itself when nothing applies, else a float32 copy."""
        unstoppable = [entry for entry in rows.minimums if self._drawn[entry[1]] + call < entry[2]]
        if not rows.edits and not unstoppable:
            return logits
        scores = self._workspace(len(logits)).copy_(logits)
        if rows.bias is not None:
            sampling.add_bias(scores, *rows.bias)
        for row, _, _, stops in unstoppable:
            sampling.forbid(scores, torch.full_like(stops, row), stops)
        if rows.allowed is not None:
            sampling.allow_only(scores, *rows.allowed)
        if rows.constraints:
            self._constrain(scores, rows)
        if rows.penalties is not None:
            self._penalize(scores, rows)
        return scores

    def _constrain(self, scores: Tensor, rows: RowParams) -> None:
        words = torch.zeros(len(rows.constraints), -(-self.spec.vocab // 32), dtype=torch.int32)
        for word, (_, constraint) in zip(words, rows.constraints, strict=True):
            constraint.mask(word)
        index = torch.tensor([row for row, _ in rows.constraints], device=self._device)
        sampling.allow_only(scores, index, sampling.unpack_bitmask(words.to(self._device), self.spec.vocab))

    def _penalize(self, scores: Tensor, rows: RowParams) -> None:
        assert rows.penalties is not None
        index, histories, repetition, frequency, presence = rows.penalties
        counts = self._histories.counts[histories]
        seen = self._histories.prompt[histories] | (counts > 0)
        edited = sampling.penalize_repetition(scores[index], seen, repetition)
        scores.index_copy_(0, index, sampling.penalize_counts(edited, counts, frequency, presence))

    @staticmethod
    def _filter(work: Tensor, best: Tensor, rows: RowParams) -> None:
        """Drop what top-k, top-p and min-p do not keep, in place."""
        threshold = torch.full_like(best, -torch.inf)
        if rows.sorting is not None:
            index, top_k, top_p, max_k = rows.sorting
            part = work if index is None else work[index]
            found = sampling.filter_threshold(part, top_k, top_p, max_k)
            threshold = found if index is None else threshold.index_copy_(0, index, found)
        if rows.min_p is not None:
            threshold = torch.maximum(threshold, sampling.min_p_threshold(best, rows.min_p))
        if rows.filtered is None:
            work.masked_fill_(work < threshold.unsqueeze(1), -torch.inf)
        else:
            part = work[rows.filtered]
            part.masked_fill_(part < threshold[rows.filtered].unsqueeze(1), -torch.inf)
            work.index_copy_(0, rows.filtered, part)

    # --- books --------------------------------------------------------------------------------------------------------
    def check(self, owners: Sequence[Owner]) -> None:
        super().check(owners)
        held = sum(state.history is not None for state in self._states.values())
        if held != self._histories.used:
            raise IntegrityError(f"{self.name}: {self._histories.used} token histories in use, {held} owned by slots")

"""The sampler: turns logits into tokens under each request's own parameters."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mstar.nn import ops, sampling
from mstar.nn.node import Sampled
from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row
from mstar.resources.sampler_history import TokenHistories
from mstar.resources.sampler_rows import Constraint, ConstraintFactory, RowParams, SlotParams, SlotTable
from mstar.resources.slotted import SlotResource
from mstar.resources.staging import Late, Stage, to_device
from mstar.spec.errors import RequestError
from mstar.spec.request import EngineRequest, SamplingParams, TokenLogprob
from mstar.spec.resources import Sampler

__all__ = ["Constraint", "ConstraintFactory", "SamplerResource", "SamplerView"]

_REMEMBERED = 8
"""Sets of rows whose parameters are kept: a step's, with and without padding, and those of steps that take turns."""


class SamplerView:
    """One step of the sampler. ``step["sampler"].sample(logits)``."""

    index: Tensor
    numbers_sent: Tensor

    def __init__(self, resource: SamplerResource):
        self._resource = resource
        self._logits: list[Tensor] = []
        self.sampled: list[Tensor] = []
        """int64 ``[rows]``, one for each call of :meth:`sample`."""

    def fill(self, rows: RowParams, index: Tensor, numbers: Tensor, real: int, filters: bool, replay: bool) -> None:
        """Plan a step of *rows*, of which the first *real* are no padding.

        :param index: int64 ``[rows]``: each row's slot. :param numbers: float64 ``[calls, rows]``: random numbers for
            so many uses of the sampler. :param replay: the node is not called; a graph repeats what its calls did.
        """
        self.rows, self.index, self.numbers_sent, self.real, self.filters = rows, index, numbers, real, filters
        if not replay:
            self.sampled, self._logits = [], []

    def sample(self, logits: Tensor) -> Sampled:
        """Choose one token per row. *logits*: ``[rows, vocab]`` in row order, any float dtype; they are not changed.

        May be called several times in a step (one call per codebook): each call uses random numbers of its own;
        penalties and constraints see tokens of earlier steps only. Rows whose call is not complete are sampled to no
        consequence.
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


class SamplerResource(SlotResource):
    """Kind ``sampler``: one slot per owner with its parameters, its random stream and, for penalties, its history.

    Opening an owner that is open already (a session's next request) reads the new request's parameters and restarts the
    random stream; what the session generated before counts as prompt, if a penalty kept track of it.

    The random numbers of a step come from :func:`mstar.nn.sampling.uniforms` on the host: one float64 a row, copied to
    the device. They are known when a step is planned, so a captured graph can read them from a static tensor that is
    filled then.

    :param constraints: makes the constraint of a request with a grammar; ``None``: such requests are refused.
    """

    kind = "sampler"
    speculates = True
    batch_invariant = True
    capturable = True
    capturable_chunks = True
    spec: Sampler

    def __init__(
        self, name: str, spec: Sampler, context: ResourceContext, constraints: ConstraintFactory | None = None
    ):
        super().__init__(name, spec, context, slots=context.max_owners)
        self._device = torch.device(context.device)
        self._constraints = constraints
        self._fused = ops.fused_sample(self._device)
        # The last slot is that of the rows which pad a captured step.
        self._padding = context.max_owners
        self._table = SlotTable(context.max_owners + 1, self._device)
        self._states: dict[int, SlotParams] = {self._padding: SlotParams(SamplingParams(temperature=0.0))}
        self._table.set(self._padding, self._states[self._padding].params)
        self._keys = np.zeros(context.max_owners + 1, dtype=np.uint64)
        self._drawn = np.zeros(context.max_owners + 1, dtype=np.int64)
        self._histories = TokenHistories(spec.vocab, self._device)
        self._scratch = torch.empty(2, 0, spec.vocab, device=self._device)
        self._gathered: dict[tuple[int, ...], RowParams] = {}  # by slots, until a slot changes hands
        self._pending: SamplerView | None = None
        self._most_calls = 1  # uses of the sampler in one step, so far
        self._calls = np.zeros(context.max_owners, dtype=np.int64)  # of each slot's last step
        self._recent: dict[int, list[Tensor]] = {}  # what it sampled there, for slots with penalties

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
        self._gathered.clear()

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
            self._histories.add_prompt(state.history, ids)

    def close(self, owner: Owner) -> None:
        state = self._states.pop(self._slots[owner], None)
        if state is not None and state.history is not None:
            self._histories.give_back(state.history)
        self._recent.pop(self._slots[owner], None)
        self._gathered.clear()
        super().close(owner)

    def match(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> int | None:
        return None

    def skip(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> None:
        """Nothing to do: the prompt's ids were read from the request."""

    # --- a step -------------------------------------------------------------------------------------------------------
    def variant(self, rows: Sequence[Row], frozen: bool = False) -> Hashable | None:
        """Whether unlikely tokens are dropped. Rows whose logits are edited first run without a graph."""
        params = self._params(rows, len(rows))
        return None if params.edits or self._unstoppable(params, 0) else self._filtered(params)

    @property
    def variants(self) -> Sequence[Hashable]:
        return ("plain", "filtered")

    @staticmethod
    def _filtered(params: RowParams) -> str:
        return "filtered" if params.filters else "plain"

    def plan(self, rows: Sequence[Row], frozen: bool = False) -> SamplerView:
        stage = self.context.stage
        lane = stage.lane
        params = self._params(rows, stage.rows(len(rows)))
        replay = lane is not None and lane.graph is not None
        calls = len(self._view(stage).numbers_sent) if replay else self._most_calls
        index = stage.put(f"{self.name}.slots", params.slots)
        sent = stage.put(f"{self.name}.numbers.{calls}", self._draws(params, np.arange(calls)[:, None]))
        view = self._view(stage)
        filtered = params.filters if lane is None else lane.variants[self.name] == "filtered"
        view.fill(params, index, sent, len(rows), filtered, replay=replay)
        self._pending = view
        return view

    def _view(self, stage: Stage) -> SamplerView:
        view: SamplerView = stage.keep(f"{self.name}.view", lambda: SamplerView(self))
        return view

    def _params(self, rows: Sequence[Row], count: int) -> RowParams:
        """The parameters of *rows*, and of padding up to *count*."""
        slots = (*(self._slots[row.owner] for row in rows), *[self._padding] * (count - len(rows)))
        found = self._gathered.get(slots)
        if found is None:
            if len(self._gathered) >= _REMEMBERED:
                self._gathered.clear()
            states = [self._states[slot] for slot in slots]
            found = RowParams.gather(slots, states, self._table, by_slot=self._fused is not None)
            self._gathered[slots] = found
        return found

    def _draws(self, rows: RowParams, calls: np.ndarray) -> np.ndarray:
        """Random numbers for the *calls*-th uses of the sampler in a step."""
        return sampling.uniforms(self._keys[rows.slots], self._drawn[rows.slots] + calls)

    def more_numbers(self, rows: RowParams, call: int) -> Tensor:
        self._most_calls = max(self._most_calls, call + 1)
        lane = self.context.stage.lane
        if lane is not None and not lane.trial:
            raise IntegrityError(f"{self.name}: a captured step uses the sampler more often than its trial did")
        return to_device(self._draws(rows, np.array(call)), self._device)

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        view, self._pending = self._pending, None
        if view is None:
            raise IntegrityError(f"{self.name}: commit without a plan")
        if frozen or not view.sampled:
            return
        params = view.rows
        complete = np.zeros(len(params.slots), dtype=bool)  # padding counts for nothing
        complete[: len(rows)] = [row.complete for row in rows]
        done = params.slots[complete]
        self._drawn[done] += len(view.sampled)
        self._calls[done] = len(view.sampled)
        if params.penalties is not None:
            for row in params.penalties.host_rows.tolist():
                self._recent[int(params.slots[row])] = [ids[row] for ids in view.sampled]
        for ids in view.sampled:
            if params.penalties is not None:
                self._histories.add(params.penalties, ids, complete)
            if params.constraints:
                self._accept(ids, params, complete)

    def retract(self, row: Row) -> None:
        if not row.complete:
            return  # it counted for nothing
        slot = self._slots[row.owner]
        self._drawn[slot] -= self._calls[slot]
        history = self._states[slot].history
        if history is not None:
            for token in reversed(self._recent.pop(slot)):
                self._histories.take_back(history, token)

    def _accept(self, ids: Tensor, params: RowParams, complete: np.ndarray) -> None:
        tokens = ids.tolist()
        for row, constraint in params.constraints:
            if complete[row]:
                constraint.accept(tokens[row])

    def rollback(self, rows: Sequence[Row], frozen: bool = False) -> None:
        self._pending = None

    # --- choosing -----------------------------------------------------------------------------------------------------
    def choose(self, logits: Tensor, view: SamplerView, call: int) -> Tensor:
        """Token ids int64 ``[rows]`` for the step's *call*-th use of the sampler, called by the view; −1 for a row
        whose logits hold a NaN or +inf."""
        rows, numbers = view.rows, view.numbers(call)
        scores = self._edited(logits, rows, call)
        if self._fused is not None:
            return self._fused(scores, view.index, self._table.floats, self._table.top_k, numbers, view.filters)
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
                self._scratch = torch.empty(2, rows, self.spec.vocab, device=self._device)
        return self._scratch[0, :rows], self._scratch[1, :rows]

    def _edited(self, logits: Tensor, rows: RowParams, call: int) -> Tensor:
        """The logits with bias, masks and penalties: *logits* itself when nothing applies, else a float32 copy."""
        unstoppable = self._unstoppable(rows, call)
        if not rows.edits and not unstoppable:
            return logits
        scores = self._workspace(len(logits))[0].copy_(logits)
        if rows.bias is not None:
            sampling.add_bias(scores, *rows.bias)
        for row, _, _, stops in unstoppable:
            sampling.forbid(scores, torch.full_like(stops, row), stops)
        if rows.allowed is not None:
            sampling.allow_only(scores, *rows.allowed)
        if rows.constraints:
            self._constrain(scores, rows)
        if rows.penalties is not None:
            self._histories.penalize(scores, rows.penalties)
        return scores

    def _unstoppable(self, rows: RowParams, call: int) -> list[tuple[int, int, int, Tensor]]:
        """The rows that may not stop yet."""
        return [entry for entry in rows.minimums if self._drawn[entry[1]] + call < entry[2]]

    def _constrain(self, scores: Tensor, rows: RowParams) -> None:
        words = torch.zeros(len(rows.constraints), -(-self.spec.vocab // 32), dtype=torch.int32)
        for word, (_, constraint) in zip(words, rows.constraints, strict=True):
            constraint.mask(word)
        index = to_device([row for row, _ in rows.constraints], self._device)
        sampling.allow_only(scores, index, sampling.unpack_bitmask(to_device(words, self._device), self.spec.vocab))

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

    # --- books --------------------------------------------------------------------------------------------------------
    def device_bytes(self) -> int:
        return self._table.floats.nbytes + self._table.top_k.nbytes

    def check(self, owners: Sequence[Owner]) -> None:
        super().check(owners)
        held = sum(state.history is not None for state in self._states.values())
        if held != self._histories.used:
            raise IntegrityError(f"{self.name}: {self._histories.used} token histories in use, {held} owned by slots")


def _marked(ids: Tensor, best: Tensor) -> Tensor:
    """*ids* with −1 in the rows whose best score is no finite number."""
    return ids.masked_fill_(best.isfinite().logical_not_(), -1)

"""The sampler: turns logits into tokens under each request's own parameters."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mstar.nn import ops, sampling
from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row, State
from mstar.resources.grammars import GrammarCompiler
from mstar.resources.sampler_choosing import Choosing
from mstar.resources.sampler_edits import Edits, Masks, bias_room
from mstar.resources.sampler_history import TokenHistories, flags_of
from mstar.resources.sampler_rows import Constraint, ConstraintFactory, RowParams, SlotParams, SlotTable
from mstar.resources.sampler_view import SamplerView, Variant
from mstar.resources.slotted import SlotResource, check_budget
from mstar.resources.staging import Late, Stage, to_device
from mstar.spec.errors import RequestError
from mstar.spec.request import EngineRequest, SamplingParams
from mstar.spec.resources import Sampler

__all__ = ["Constraint", "ConstraintFactory", "SamplerResource"]

_REMEMBERED = 8
"""Sets of rows whose parameters are kept: a step's, with and without padding, and those of steps that take turns."""


class SamplerResource(SlotResource):
    """Kind ``sampler``: one slot per owner with its parameters, its random stream and, for penalties, its history.

    Opening an owner that is open already (a session's next request) reads the new request's parameters and restarts the
    random stream; what the session generated before counts as prompt, if a penalty kept track of it.

    The random numbers of a step come from :func:`mstar.nn.sampling.uniforms` on the host: one float64 a row, copied to
    the device. They are known when a step is planned, so a captured graph can read them from a static tensor that is
    filled then.

    *Edits.* Masks (of a grammar, of allowed tokens, of stop tokens before ``min_tokens``) are made on the host when a
    step is planned and travel with it. Penalties read a table of token counts: on a GPU one of fixed size, a row for
    each owner, which captured graphs can read; on the CPU one that grows with those who use a penalty.

    *Constraints.* What a step sampled in a constrained row is read when the row's next step is planned. Such a step is
    never launched ahead (:meth:`mstar.graph.run.RequestRun.foresee`), so nobody waits for it.

    :param constraints: makes the constraint of a request with a grammar; by default xgrammar's, for the vocabulary in
        *context*. Without either such requests are refused.
    """

    kind = "sampler"
    moves = True
    looks_at = ("prompt",)
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
        if constraints is None and context.vocabulary is not None:
            constraints = GrammarCompiler(context.vocabulary, spec.vocab).matcher
        self._constraints = constraints
        fixed = self._device.type == "cuda"
        if fixed:
            what = f"the token counts of {context.max_owners} contexts"
            check_budget(name, what, context.max_owners, 4 * spec.vocab + flags_of(spec.vocab), context, spare=1)
            # without the kernels, filters ask the device
            self.capturable = self.capturable_chunks = ops.fused_sample(self._device) is not None
        # The last slot is that of the rows which pad a captured step.
        self._padding = context.max_owners
        self._table = SlotTable(context.max_owners + 1, self._device)
        self._states: dict[int, SlotParams] = {self._padding: SlotParams(SamplingParams(temperature=0.0), spec.vocab)}
        self._table.set(self._padding, self._states[self._padding].params)
        self._keys = np.zeros(context.max_owners + 1, dtype=np.uint64)
        self._drawn = np.zeros(context.max_owners + 1, dtype=np.int64)
        self._histories = TokenHistories(spec.vocab, self._device, rows=context.max_owners if fixed else None)
        self._choosing = Choosing(spec.vocab, self._device, self._table, self._histories)
        self._gathered: dict[tuple[int, ...], RowParams] = {}  # by slots, until a slot changes hands
        self._pending: SamplerView | None = None
        self._most_calls = 1  # uses of the sampler in one step, so far
        self._calls = np.zeros(context.max_owners, dtype=np.int64)  # of each slot's last step
        self._recent: dict[int, tuple[list[Tensor], int]] = {}  # what it sampled, by row; for slots with penalties
        # What constraints were not told yet, by slot: the step's constrained tokens, and which of them is the slot's.
        self._untold: dict[int, list[tuple[Late, int]]] = {}
        self._accepted: dict[int, list[int]] = {}  # what constraints were told, by slot

    # --- life -------------------------------------------------------------------------------------------------------
    def open(self, owner: Owner, request: EngineRequest) -> None:
        slot = self._slots[owner]
        params = request.sampling.get(self.name) or SamplingParams()
        state = SlotParams.build(params, self.spec.vocab)
        if params.grammar is not None:
            state.constraint = self._constraint(params)
        self._adopt_history(state, self._states.get(slot), request)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._keys[slot] = sampling.stream_key(seed, self.name, owner.context)
        self._drawn[slot] = 0
        self._table.set(slot, params)
        self._states[slot] = state
        self._untold.pop(slot, None)
        self._accepted.pop(slot, None)
        self._open.add(owner)
        self._gathered.clear()

    def _constraint(self, params: SamplingParams) -> Constraint:
        if self._constraints is None:
            raise RequestError(
                "structured output is not available: the vocabulary of this model is not known",
                param="response_format",
                code="unsupported_value",
            )
        return self._constraints(params.grammar or "", params.stop_token_ids)

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
        self._untold.pop(self._slots[owner], None)
        self._accepted.pop(self._slots[owner], None)
        self._gathered.clear()
        super().close(owner)

    def export(self, owner: Owner) -> State:
        """How many tokens were drawn and which of them a constraint was told; the history of penalties, if any."""
        slot = self._slots[owner]
        state = self._states[slot]
        self._tell(slot, state)
        facts = {"drawn": int(self._drawn[slot]), "accepted": self._accepted.get(slot, [])}
        return State(facts, {} if state.history is None else self._histories.seen(state.history))

    def adopt(self, owner: Owner, request: EngineRequest, state: State) -> None:
        self.open(owner, request)
        slot = self._slots[owner]
        mine = self._states[slot]
        self._drawn[slot] = state.facts["drawn"]
        if mine.constraint is not None:
            for token in state.facts["accepted"]:
                self._accept(slot, mine.constraint, token)
        if mine.history is not None:
            self._histories.put(mine.history, state.tensors)

    def match(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> int | None:
        return None

    def skip(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> None:
        """Nothing to do: the prompt's ids were read from the request."""

    # --- a step -------------------------------------------------------------------------------------------------------
    def variant(self, rows: Sequence[Row], frozen: bool = False) -> Variant | None:
        params = self._params(rows, len(rows))
        if not self.capturable:
            return None
        if not self._edited(params):
            return Variant(params.filters)
        room = bias_room(params)
        return None if room is None else Variant(params.filters, True, room)

    @property
    def variants(self) -> Sequence[Variant]:
        """Steps with edits are captured when they come, unless all have them; those without filters, unless few have
        none."""
        edits = self.spec.penalised
        return (Variant(True, edits),) if self.spec.filtered else (Variant(False, edits), Variant(True, edits))

    def plan(self, rows: Sequence[Row], frozen: bool = False) -> SamplerView:
        stage = self.context.stage
        lane = stage.lane
        params = self._params(rows, stage.rows(len(rows)))
        replay = lane is not None and lane.graph is not None
        calls = len(self._view(stage).numbers_sent) if replay else self._most_calls
        index = stage.put(f"{self.name}.slots", params.slots)
        sent = stage.put(f"{self.name}.numbers.{calls}", self._draws(params, np.arange(calls)[:, None]))
        view = self._view(stage)
        variant = Variant(params.filters, self._edited(params)) if lane is None else lane.variants[self.name]
        assert isinstance(variant, Variant)
        edits = self._edits(stage, params, rows, variant) if variant.edits else None
        view.fill(params, index, sent, len(rows), variant.filters, edits, replay=replay)
        self._pending = view
        return view

    def _edited(self, rows: RowParams) -> bool:
        """Whether the logits are changed in this step."""
        return rows.always or any(self._drawn[slot] < least for slot, least in rows.minimums)

    def _edits(self, stage: Stage, params: RowParams, rows: Sequence[Row], variant: Variant) -> Edits:
        masks = self._masks(params, rows)
        if stage.lane is not None:
            return Edits.by_row(stage, self.name, params, masks, variant.bias, self.spec.vocab)
        if self._device.type != "cpu":
            return Edits.by_row(stage, self.name, params, masks, None, self.spec.vocab)
        return Edits.sparse(stage, self.name, params, masks, self.spec.vocab)

    def _masks(self, params: RowParams, rows: Sequence[Row]) -> Masks:
        masks = []
        for row, state in params.masked:
            slot = int(params.slots[row])
            self._tell(slot, state)
            words = state.mask(int(self._drawn[slot]), rows[row].complete)
            if words is not None:
                masks.append((row, words))
        return masks

    def _tell(self, slot: int, state: SlotParams) -> None:
        """Tell *state*'s constraint what was committed."""
        if slot in self._untold and state.constraint is not None:
            for late, place in self._untold[slot]:
                self._accept(slot, state.constraint, late.values()[place])
            del self._untold[slot]

    def _accept(self, slot: int, constraint: Constraint, token: int) -> None:
        constraint.accept(token)
        self._accepted.setdefault(slot, []).append(token)

    def _view(self, stage: Stage) -> SamplerView:
        view: SamplerView = stage.keep(f"{self.name}.view", lambda: SamplerView(self))
        return view

    def _params(self, rows: Sequence[Row], count: int) -> RowParams:
        """The parameters of *rows*, and of padding up to *count*."""
        slots = (*self._slots.of(rows).tolist(), *[self._padding] * (count - len(rows)))
        found = self._gathered.get(slots)
        if found is None:
            if len(self._gathered) >= _REMEMBERED:
                self._gathered.clear()
            states = [self._states[slot] for slot in slots]
            found = RowParams.gather(slots, states, self._table, by_slot=self._choosing.fused is not None)
            self._gathered[slots] = found
        return found

    def _draws(self, rows: RowParams, calls: np.ndarray) -> np.ndarray:
        """Random numbers for the *calls*-th uses of the sampler in a step. Whoever is greedy reads none."""
        if rows.all_greedy:
            return np.zeros(np.broadcast_shapes(rows.slots.shape, calls.shape))
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
            kept = [ids.clone() for ids in view.sampled]  # the next replay of a graph overwrites them
            for row in params.penalties.host_rows.tolist():
                self._recent[int(params.slots[row])] = kept, row
            for ids in view.sampled:
                self._histories.add(params.penalties, ids, complete)
        if params.constrained:
            self._remember(view, complete)

    def _remember(self, view: SamplerView, complete: np.ndarray) -> None:
        """What constrained rows sampled goes to the host; their constraints are told when it is there."""
        rows = view.rows.constrained
        index = to_device(rows, self._device)
        late = [Late(ids[index]) for ids in view.sampled]
        for place, row in enumerate(rows):
            if complete[row]:
                self._untold[int(view.rows.slots[row])] = [(one, place) for one in late]

    def retract(self, row: Row) -> None:
        if not row.complete:
            return  # it counted for nothing
        slot = self._slots[row.owner]
        self._drawn[slot] -= self._calls[slot]
        self._untold.pop(slot, None)
        history = self._states[slot].history
        if history is not None:
            sampled, place = self._recent.pop(slot)
            for ids in reversed(sampled):
                self._histories.take_back(history, ids[place])

    def rollback(self, rows: Sequence[Row], frozen: bool = False) -> None:
        self._pending = None

    def choose(self, logits: Tensor, view: SamplerView, call: int) -> Tensor:
        """Token ids int64 ``[rows]`` for the step's *call*-th use of the sampler, called by the view; −1 for a row
        whose logits hold a NaN or +inf."""
        return self._choosing.choose(logits, view, view.numbers(call))

    # --- books --------------------------------------------------------------------------------------------------------
    def device_bytes(self) -> int:
        """On the CPU token counts grow with use, and are not counted."""
        growing = self._histories.listed is not None
        counts = 0 if growing else self._histories.nbytes
        return self._table.floats.nbytes + self._table.top_k.nbytes + counts

    def check(self, owners: Sequence[Owner]) -> None:
        super().check(owners)
        held = sum(state.history is not None for state in self._states.values())
        if held != self._histories.used:
            raise IntegrityError(f"{self.name}: {self._histories.used} token histories in use, {held} owned by slots")

"""Fixed-size state per context: conv windows, SSM and DeltaNet states, LSTM cells, codec state, latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.nn.ops.delta import StateSlots
from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row, State, Usage
from mstar.resources.budget import DoesNotFit
from mstar.resources.checkpoints import Checkpoints, Lineage
from mstar.resources.slotted import SlotResource, check_budget, slot_count
from mstar.resources.state_places import Places, StatePlaces
from mstar.spec.errors import SetupError, nearest
from mstar.spec.request import EngineRequest
from mstar.spec.resources import RecurrentState
from mstar.spec.sizes import bytes_in_words

__all__ = ["RecurrentStateResource", "RecurrentStateView"]


class RecurrentStateView:
    """One step of the state: each tensor as ``[rows, *shape]`` in row order, or the places of it in the pool."""

    def __init__(self, resource: RecurrentStateResource):
        self._resource = resource
        self._staged: dict[tuple[str, int], Tensor] = {}
        self.written: dict[str, set[int]] = {}

    def fill(self, places: Places, sent: Tensor, runs: bool, frozen: bool, replay: bool) -> None:
        """Plan a step.

        :param places: int64 ``[2, names, rows]``: where each row's state is, and where the next one goes.
        :param sent: *places* on the device. :param runs: each line of them is a run of places.
        :param replay: the node is not called; a graph repeats what its calls did.
        """
        self._places, self._sent, self._runs, self._frozen = places, sent, runs, frozen
        self.rows = places.shape[2]
        self._staged = {}
        if not replay:
            self.written = {}

    def read(self, name: str, layer: int = 0) -> Tensor:
        """The rows' state ``[rows, *shape]``, or what this step wrote. It may share memory with the pool: never change
        it in place, :meth:`write` a new tensor."""
        if (name, layer) in self._staged:
            return self._staged[name, layer]
        pool, number = self._resource.pool(name, layer), self._resource.numbers[name]
        if self._runs:
            return pool[self._run(0, number)]
        return pool.index_select(0, self._sent[0, number])

    def write(self, name: str, value: Tensor, layer: int = 0) -> None:
        """Make *value* ``[rows, *shape]`` the rows' state once the step is committed; the dtype is the pool's. The view
        keeps *value* itself: do not change it afterwards. In a frozen step the value lasts until the step ends.

        A step that writes a tensor writes it in every layer."""
        pool = self._resource.pool(name, layer)
        expected = (self.rows, *pool.shape[1:])
        if tuple(value.shape) != expected:
            raise ValueError(f"{self._resource.name}: state {name!r} is {tuple(value.shape)}, expected {expected}")
        self._staged[name, layer] = value
        if self._frozen:
            return
        self.written.setdefault(name, set()).add(layer)
        number = self._resource.numbers[name]
        if self._runs:
            pool[self._run(1, number)].copy_(value)
        else:
            pool.index_copy_(0, self._sent[1, number], value.to(pool.dtype))

    def slots(self, name: str, layer: int = 0) -> StateSlots:
        """For an operation that reads and writes the state itself (:mod:`mstar.nn.ops.delta`), and does write it. Take
        it once a step, and neither :meth:`read` nor :meth:`write` that tensor beside it."""
        pool, number = self._resource.pool(name, layer), self._resource.numbers[name]
        if self._frozen:
            return StateSlots(pool, self._sent[0, number], None)
        self.written.setdefault(name, set()).add(layer)
        return StateSlots(pool, self._sent[0, number], self._sent[1, number])

    def _run(self, side: int, number: int) -> slice:
        first = int(self._places[side, number, 0])
        return slice(first, first + self.rows)


class RecurrentStateResource(SlotResource):
    """Kind ``recurrent_state``: one tensor ``[places, layers, *shape]`` per name. Slot 0 is for the rows that pad a
    captured step.

    A new owner starts from zeros; one that is open already (a session) goes on. Every row of a step advances, chunks of
    an incomplete call included.

    A step reads a state in one place and writes the next one to another, and states that are kept are not copied:
    :mod:`mstar.resources.state_places`. Places are staged tensors; outside of captured steps, rows whose places follow
    one another are read and written as slices, and reading copies nothing.
    """

    kind = "recurrent_state"
    capturable = True
    capturable_chunks = True
    moves = True
    looks_at = ()
    speculates = True
    spec: RecurrentState

    def __init__(self, name: str, spec: RecurrentState, context: ResourceContext):
        _check(name, spec)
        slots = slot_count(name, spec.slots, context)
        super().__init__(name, spec, context, slots=slots, first=1)
        shapes = {
            key: (tuple(shape), _dtype(name, spec, dtype, context)) for key, (shape, dtype) in spec.tensors.items()
        }
        one = spec.layers * sum(dtype.itemsize * torch.Size(shape).numel() for shape, dtype in shapes.values())
        check_budget(name, f"{slots + 1} slots of 2 × {one} bytes", slots, 2 * one, context, spare=1)
        self._one = one
        kept = _checkpoints(name, spec, context, one, slots)
        self._books = StatePlaces(len(shapes), slots + 1, kept)
        self.checkpoints = Checkpoints(kept, spec.page, self._books)
        self._lineages: dict[Owner, Lineage] = {}
        self._apart = max(spec.checkpoint_tokens // spec.page, 1) * spec.page
        self._pools = {
            key: torch.zeros(self._books.size, spec.layers, *shape, dtype=dtype, device=context.device)
            for key, (shape, dtype) in shapes.items()
        }
        self._layers = {key: pool.unbind(1) for key, pool in self._pools.items()}
        self.numbers = {key: number for number, key in enumerate(self._pools)}
        self._pending: RecurrentStateView | None = None

    def pool(self, name: str, layer: int = 0) -> Tensor:
        """All places of one tensor of a layer, ``[places, *shape]``."""
        if name not in self._pools:
            raise KeyError(f"{self.name}: no state {name!r}{nearest(name, self._pools)}")
        layers = self._layers[name]
        if not 0 <= layer < len(layers):
            raise IndexError(f"{self.name}: no layer {layer} of {name!r}; there are {len(layers)}, from 0")
        return layers[layer]

    # --- life -------------------------------------------------------------------------------------------------------
    def open(self, owner: Owner, request: EngineRequest) -> None:
        fresh = owner not in self._open
        super().open(owner, request)
        if not fresh:
            return
        for pool, place in zip(self._pools.values(), self._books.begin(self._slots[owner]).tolist(), strict=True):
            pool[place].zero_()
        if self.checkpoints.most:
            self._lineages[owner] = Lineage(self.checkpoints, request.cache_salt)

    def close(self, owner: Owner) -> None:
        lineage = self._lineages.pop(owner, None)
        if lineage is not None:
            lineage.end()
        super().close(owner)

    # --- from one rank to another -------------------------------------------------------------------------------------
    def export(self, owner: Owner) -> State:
        """Each tensor by its name, ``[layers, *shape]``. States that are kept for the prefix cache stay."""
        places = self._books.now(self._slots[owner]).tolist()
        tensors = {name: pool[place].clone() for (name, pool), place in zip(self._pools.items(), places, strict=True)}
        lineage = self._lineages.get(owner)
        return State({} if lineage is None else {"lineage": lineage.facts()}, tensors)

    def adopt(self, owner: Owner, request: EngineRequest, state: State) -> None:
        self.open(owner, request)
        places = self._books.now(self._slots[owner]).tolist()
        for (name, pool), place in zip(self._pools.items(), places, strict=True):
            pool[place].copy_(state.tensors[name])
        lineage = self._lineages.get(owner)
        if lineage is not None and "lineage" in state.facts:
            lineage.restore(state.facts["lineage"])

    # --- prefix reuse -----------------------------------------------------------------------------------------------
    def match(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> int | None:
        lineage = self._lineages.get(owner)
        found = None if lineage is None else self.checkpoints.find(lineage.salt, ids[:-1])
        return 0 if found is None else found.length

    def skip(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> None:
        if not len(ids):
            return
        lineage = self._lineages[owner]
        found = self.checkpoints.find(lineage.salt, ids)
        if lineage.length or found is None or found.length != len(ids):
            raise IntegrityError(
                f"{owner} cannot begin behind {len(ids)} tokens in {self.name!r}: no state is kept there"
            )
        self._books.adopt(self._slots[owner], found.places)
        lineage.skip(ids)

    def missed(self, owner: Owner, tokens: int) -> None:
        lineage = self._lineages.get(owner)
        if lineage is not None:
            lineage.branch = tokens // self.spec.page * self.spec.page

    def cut(self, owner: Owner, tokens: int) -> int:
        lineage = self._lineages.get(owner)
        return tokens if lineage is None else lineage.cut(tokens, self._apart)

    def cuts(self, owner: Owner, tokens: int) -> Sequence[int]:
        lineage = self._lineages.get(owner)
        return () if lineage is None else lineage.cuts(tokens, self._apart)

    # --- a step -------------------------------------------------------------------------------------------------------
    def plan(self, rows: Sequence[Row], frozen: bool = False) -> RecurrentStateView:
        stage = self.context.stage
        slots = np.zeros(stage.rows(len(rows)), np.int64)
        slots[: len(rows)] = self._slots.of(rows)
        places = self._books.rows(slots)
        sent = stage.put(f"{self.name}.places", places)
        view: RecurrentStateView = stage.keep(f"{self.name}.view", lambda: RecurrentStateView(self))
        replay = stage.lane is not None and stage.lane.graph is not None
        view.fill(places, sent, self._in_runs(places), frozen, replay)
        self._pending = view
        return view

    def _in_runs(self, places: Places) -> bool:
        """Whether slices will do: not on a lane, whose places differ from replay to replay."""
        return self.context.stage.lane is None and bool((np.diff(places) == 1).all())

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        view, self._pending = self._pending, None
        if view is None:
            raise IntegrityError(f"{self.name}: commit without a plan")
        if frozen:
            return
        slots = self._slots.of(rows)
        self._books.advance(slots, self._written(view))
        if self._lineages:
            for row, slot in zip(rows, slots.tolist(), strict=True):
                self._lineages[row.owner].advance(slot, row.length, row.ids, row.complete)

    def _written(self, view: RecurrentStateView) -> npt.NDArray[np.bool_]:
        for name, layers in view.written.items():
            if len(layers) < self.spec.layers:
                missing = sorted(set(range(self.spec.layers)) - layers)
                raise RuntimeError(f"{self.name}: a step wrote state {name!r} in some layers, but not in {missing}")
        return np.array([name in view.written for name in self._pools], bool)

    def retract(self, row: Row) -> None:
        self._books.undo(self._slots[row.owner])
        lineage = self._lineages.get(row.owner)
        if lineage is not None:
            lineage.retract(row.length)

    def learn(self, owner: Owner, ids: Sequence[int]) -> None:
        lineage = self._lineages.get(owner)
        if lineage is not None:
            lineage.learn(ids)

    def rollback(self, rows: Sequence[Row], frozen: bool = False) -> None:
        """What was written lies in places that nothing reads."""
        self._pending = None

    # --- books --------------------------------------------------------------------------------------------------------
    def usage(self) -> Usage:
        return super().usage()._replace(cached=len(self.checkpoints))

    def check(self, owners: Sequence[Owner]) -> None:
        super().check(owners)
        self._books.check(self.checkpoints.check())

    def checkpoint_counts(self) -> Mapping[str, int] | None:
        kept = self.checkpoints
        return {"made": kept.made, "evicted": kept.evicted} if kept.most else None

    def device_bytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools.values())

    def slot_bytes(self) -> float:
        return 2 * self._one

    def size_in_words(self) -> str:
        kept = self.checkpoints.most
        return super().size_in_words() + (f", {kept:,} checkpoints" if kept else "")


# --- what a declaration says ----------------------------------------------------------------------------------------
def _check(name: str, spec: RecurrentState) -> None:
    for field in ("layers", "page", "checkpoint_tokens"):
        if getattr(spec, field) < 1:
            raise SetupError(f"resource {name!r}: {field}={getattr(spec, field)}; it must be 1 or more")


def _dtype(resource: str, spec: RecurrentState, name: str, context: ResourceContext) -> torch.dtype:
    if name == "model":
        dtype = context.dtype
    elif name == "state":
        dtype = getattr(torch, spec.state_dtype, None)
        if dtype not in (torch.float32, torch.bfloat16):
            raise SetupError(f"resource {resource!r}: state_dtype={spec.state_dtype!r}; use 'float32' or 'bfloat16'")
    else:
        dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SetupError(f"resource {resource!r}: {name!r} is no dtype; use 'model', 'state' or a torch dtype's name")
    return dtype


def _checkpoints(name: str, spec: RecurrentState, context: ResourceContext, one: int, slots: int) -> int:
    """How many states of *one* bytes are kept beside those of *slots* slots (promise P3)."""
    left = None if context.memory is None else context.memory - 2 * (slots + 1) * one
    if spec.checkpoints is None:
        wanted = 2 * context.max_owners  # of each the end of its prompt and of its answer
        return wanted if left is None or not one else min(wanted, left // 8 // one)
    if left is None or context.memory is None or spec.checkpoints * one <= left:
        return spec.checkpoints
    needed = (2 * (slots + 1) + spec.checkpoints) * one
    raise DoesNotFit(
        f"resource {name!r}: {slots + 1} slots of 2 × {one} bytes and {spec.checkpoints} checkpoints of {one} need "
        f"{bytes_in_words(needed)}, more than the memory budget of {bytes_in_words(context.memory)}",
        needed,
        context.memory,
        [f"resources.{name}.checkpoints: {left // one}"],
        2 * one,
    )

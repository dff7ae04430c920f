"""Fixed-size state per context: conv windows, SSM and DeltaNet states, LSTM cells, codec state, latents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row
from mstar.resources.slotted import SlotResource, check_budget, slot_count
from mstar.spec.errors import SetupError, nearest
from mstar.spec.request import EngineRequest
from mstar.spec.resources import RecurrentState

__all__ = ["RecurrentStateResource", "RecurrentStateView"]

_Places = npt.NDArray[np.int64]


class RecurrentStateView:
    """One step of the state: each tensor as ``[rows, *shape]`` in row order."""

    def __init__(self, resource: RecurrentStateResource):
        self._resource = resource
        self._staged: dict[str, Tensor] = {}
        self.written: set[str] = set()

    def fill(self, places: _Places, sent: Tensor | None, frozen: bool, replay: bool) -> None:
        """Plan a step.

        :param places: int64 ``[2, names, rows]``: where each row's state is, and where the next one goes.
        :param sent: *places* on the device; ``None``: each line is a run of places.
        :param replay: the node is not called; a graph repeats what its calls did.
        """
        self._places, self._sent, self._frozen, self.rows = places, sent, frozen, places.shape[2]
        self._staged = {}
        if not replay:
            self.written = set()

    def read(self, name: str) -> Tensor:
        """The rows' state ``[rows, *shape]``, or what this step wrote. It may share memory with the pool: never change
        it in place, :meth:`write` a new tensor."""
        if name in self._staged:
            return self._staged[name]
        pool, number = self._resource.pool(name), self._resource.numbers[name]
        if self._sent is None:
            return pool[self._run(0, number)]
        return pool.index_select(0, self._sent[0, number])

    def write(self, name: str, value: Tensor) -> None:
        """Make *value* ``[rows, *shape]`` the rows' state once the step is committed; the dtype is the pool's. The view
        keeps *value* itself: do not change it afterwards. In a frozen step the value lasts until the step ends."""
        pool = self._resource.pool(name)
        expected = (self.rows, *pool.shape[1:])
        if tuple(value.shape) != expected:
            raise ValueError(f"{self._resource.name}: state {name!r} is {tuple(value.shape)}, expected {expected}")
        self._staged[name] = value
        if self._frozen:
            return
        self.written.add(name)
        number = self._resource.numbers[name]
        if self._sent is None:
            pool[self._run(1, number)].copy_(value)
        else:
            pool.index_copy_(0, self._sent[1, number], value.to(pool.dtype))

    def _run(self, side: int, number: int) -> slice:
        first = int(self._places[side, number, 0])
        return slice(first, first + self.rows)


class RecurrentStateResource(SlotResource):
    """Kind ``recurrent_state``: one tensor ``[2 * (slots + 1), *shape]`` per name. Slot 0 is for the rows that pad a
    captured step.

    A new owner starts from zeros; one that is open already (a session) goes on. Every row of a step advances, chunks of
    an incomplete call included.

    *Two sides.* A slot has a place on either side of each tensor. One holds the state, a step writes the next state
    into the other, and its commit says that the state is there now. So nothing that a repeated step would read changes
    before the commit, in a captured graph too; and until the owner's next step the state before is still there, which
    is all that :meth:`retract` needs. Places for reading and writing are staged tensors; outside of captured steps,
    rows whose places follow one another are read and written as slices, and reading copies nothing.
    """

    kind = "recurrent_state"
    capturable = True
    capturable_chunks = True
    speculates = True
    spec: RecurrentState

    def __init__(self, name: str, spec: RecurrentState, context: ResourceContext):
        slots = slot_count(name, spec.slots, context)
        super().__init__(name, spec, context, slots=slots, first=1)
        shapes = {key: (tuple(shape), _dtype(name, dtype, context)) for key, (shape, dtype) in spec.tensors.items()}
        one = sum(dtype.itemsize * torch.Size(shape).numel() for shape, dtype in shapes.values())
        check_budget(name, f"{slots + 1} slots of 2 × {one} bytes", slots, 2 * one, context, spare=1)
        self._pools = {
            key: torch.zeros(2 * (slots + 1), *shape, dtype=dtype, device=context.device)
            for key, (shape, dtype) in shapes.items()
        }
        self.numbers = {key: number for number, key in enumerate(self._pools)}
        # Of each tensor and slot: the side that holds its state; whether the owner's last step has changed it.
        self._side = np.zeros((len(self._pools), slots + 1), np.int64)
        self._moved = np.zeros((len(self._pools), slots + 1), bool)
        self._pending: RecurrentStateView | None = None

    def pool(self, name: str) -> Tensor:
        """Both sides of all slots of one tensor, ``[2 * (slots + 1), *shape]``."""
        if name not in self._pools:
            raise KeyError(f"{self.name}: no state {name!r}{nearest(name, self._pools)}")
        return self._pools[name]

    # --- life -------------------------------------------------------------------------------------------------------
    def open(self, owner: Owner, request: EngineRequest) -> None:
        fresh = owner not in self._open
        super().open(owner, request)
        slot = self._slots[owner]
        self._moved[:, slot] = False
        if fresh:
            self._side[:, slot] = 0
            for pool in self._pools.values():
                pool[slot].zero_()

    # --- a step -------------------------------------------------------------------------------------------------------
    def plan(self, rows: Sequence[Row], frozen: bool = False) -> RecurrentStateView:
        stage = self.context.stage
        slots = np.zeros(stage.rows(len(rows)), np.int64)
        slots[: len(rows)] = [self._slots[row.owner] for row in rows]
        side, length = self._side[:, slots], self._side.shape[1]
        places = np.stack((side, 1 - side)) * length + slots
        sent = None if self._in_runs(places) else stage.put(f"{self.name}.places", places)
        view: RecurrentStateView = stage.keep(f"{self.name}.view", lambda: RecurrentStateView(self))
        view.fill(places, sent, frozen, replay=stage.lane is not None and stage.lane.graph is not None)
        self._pending = view
        return view

    def _in_runs(self, places: _Places) -> bool:
        """Whether slices will do: not on a lane, whose places differ from replay to replay."""
        return self.context.stage.lane is None and bool((np.diff(places) == 1).all())

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        view, self._pending = self._pending, None
        if view is None:
            raise IntegrityError(f"{self.name}: commit without a plan")
        if frozen:
            return
        slots = [self._slots[row.owner] for row in rows]
        moved = np.array([name in view.written for name in self._pools], bool)
        self._moved[:, slots] = moved[:, None]
        self._side[:, slots] ^= moved[:, None]

    def retract(self, row: Row) -> None:
        slot = self._slots[row.owner]
        self._side[:, slot] ^= self._moved[:, slot]
        self._moved[:, slot] = False

    def rollback(self, rows: Sequence[Row], frozen: bool = False) -> None:
        """What was written lies on the side that nothing reads."""
        self._pending = None

    def device_bytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools.values())


def _dtype(resource: str, name: str, context: ResourceContext) -> torch.dtype:
    dtype = context.dtype if name == "model" else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SetupError(f"resource {resource!r}: {name!r} is no dtype; use 'model' or a torch dtype's name")
    return dtype

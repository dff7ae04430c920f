"""Fixed-size state per context: conv windows, SSM and DeltaNet states, LSTM cells, codec state, latents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row
from mstar.resources.slotted import SlotResource, check_budget, slot_count
from mstar.resources.staging import to_device
from mstar.spec.errors import SetupError, nearest
from mstar.spec.request import EngineRequest
from mstar.spec.resources import RecurrentState

__all__ = ["RecurrentStateResource", "RecurrentStateView"]


class RecurrentStateView:
    """One step of the state: each tensor as ``[rows, *shape]`` in row order."""

    def __init__(self, resource: RecurrentStateResource, index: slice | Tensor, rows: int):
        self._resource, self._index, self._rows = resource, index, rows
        self.staged: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """The rows' state ``[rows, *shape]``, or what this step wrote. It may share memory with the pool: never change
        it in place, :meth:`write` a new tensor."""
        if name in self.staged:
            return self.staged[name]
        pool = self._resource.pool(name)
        return pool[self._index] if isinstance(self._index, slice) else pool.index_select(0, self._index)

    def write(self, name: str, value: Tensor) -> None:
        """Make *value* ``[rows, *shape]`` the rows' state once the step is committed; the dtype is the pool's. The view
        keeps *value* itself: do not change it afterwards. In a frozen step the value lasts until the step ends."""
        expected = (self._rows, *self._resource.pool(name).shape[1:])
        if tuple(value.shape) != expected:
            raise ValueError(f"{self._resource.name}: state {name!r} is {tuple(value.shape)}, expected {expected}")
        self.staged[name] = value

    def apply(self) -> None:
        """Move what was written into the pool."""
        for name, value in self.staged.items():
            pool = self._resource.pool(name)
            if isinstance(self._index, slice):
                pool[self._index].copy_(value)
            else:
                pool.index_copy_(0, self._index, value.to(pool.dtype))


class RecurrentStateResource(SlotResource):
    """Kind ``recurrent_state``: one tensor ``[slots + 1, *shape]`` per name; slot 0 takes what padding rows write.

    A new owner starts from zeros; one that is open already (a session) goes on. Every row of a step advances, chunks of
    an incomplete call included. When the rows' slots follow one another, reading copies nothing.
    """

    kind = "recurrent_state"
    spec: RecurrentState

    def __init__(self, name: str, spec: RecurrentState, context: ResourceContext):
        slots = slot_count(name, spec.slots, context)
        super().__init__(name, spec, context, slots=slots, first=1)
        shapes = {key: (tuple(shape), _dtype(name, dtype, context)) for key, (shape, dtype) in spec.tensors.items()}
        one = sum(dtype.itemsize * torch.Size(shape).numel() for shape, dtype in shapes.values())
        check_budget(name, f"{slots + 1} slots of {one} bytes", slots, one, context, spare=1)
        self._pools = {
            key: torch.zeros(slots + 1, *shape, dtype=dtype, device=context.device)
            for key, (shape, dtype) in shapes.items()
        }
        self._device = torch.device(context.device)
        self._indexed: tuple[tuple[int, ...], slice | Tensor] | None = None
        self._pending: RecurrentStateView | None = None

    def pool(self, name: str) -> Tensor:
        """All slots of one tensor ``[slots + 1, *shape]``."""
        if name not in self._pools:
            raise KeyError(f"{self.name}: no state {name!r}{nearest(name, self._pools)}")
        return self._pools[name]

    # --- life -------------------------------------------------------------------------------------------------------
    def open(self, owner: Owner, request: EngineRequest) -> None:
        fresh = owner not in self._open
        super().open(owner, request)
        for pool in self._pools.values() if fresh else ():
            pool[self._slots[owner]].zero_()

    # --- a step -------------------------------------------------------------------------------------------------------
    def plan(self, rows: Sequence[Row], frozen: bool = False) -> RecurrentStateView:
        slots = tuple([self._slots[row.owner] for row in rows])
        if self._indexed is None or self._indexed[0] != slots:
            self._indexed = (slots, self._index(slots))
        self._pending = RecurrentStateView(self, self._indexed[1], len(slots))
        return self._pending

    def _index(self, slots: tuple[int, ...]) -> slice | Tensor:
        if slots == tuple(range(slots[0], slots[0] + len(slots))):
            return slice(slots[0], slots[0] + len(slots))
        return to_device(slots, self._device)

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        view, self._pending = self._pending, None
        if view is None:
            raise IntegrityError(f"{self.name}: commit without a plan")
        if not frozen:
            view.apply()

    def rollback(self, rows: Sequence[Row], frozen: bool = False) -> None:
        self._pending = None

    def device_bytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools.values())


def _dtype(resource: str, name: str, context: ResourceContext) -> torch.dtype:
    dtype = context.dtype if name == "model" else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SetupError(f"resource {resource!r}: {name!r} is no dtype; use 'model' or a torch dtype's name")
    return dtype

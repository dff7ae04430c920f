"""What all resources share that give each owner one slot. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mstar.resources.base import Owner, Resource, ResourceContext, Usage
from mstar.resources.slots import SlotPool

__all__ = ["SlotResource"]


class SlotResource(Resource):
    """A resource whose unit is the slot: admission and books. Subclasses keep their state by slot number.

    :param slots: how many owners it holds. :param first: number of the first slot (lower ones belong to the subclass).
    """

    def __init__(self, name: str, spec: Any, context: ResourceContext, *, slots: int, first: int = 0):
        super().__init__(name, spec, context)
        self._slots = SlotPool(slots, first)
        self._open: set[Owner] = set()

    def units(self, tokens: int) -> int:
        return 1

    def capacity(self) -> int:
        return self._slots.slots

    def reserve(self, owner: Owner, units: int) -> bool:
        return self._slots.reserve(owner)

    def close(self, owner: Owner) -> None:
        self._slots.release(owner)
        self._open.discard(owner)

    def usage(self) -> Usage:
        return self._slots.usage()

    def check(self, owners: Sequence[Owner]) -> None:
        self._slots.check(owners)

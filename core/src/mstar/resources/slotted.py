"""What all resources share that give each owner one slot. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mstar.resources.base import IntegrityError, Owner, Resource, ResourceContext, Usage
from mstar.resources.budget import DoesNotFit
from mstar.resources.slots import SlotPool
from mstar.spec.errors import SetupError
from mstar.spec.request import EngineRequest
from mstar.spec.sizes import bytes_in_words

__all__ = ["SlotResource", "check_budget", "slot_count"]


def slot_count(name: str, slots: int | None, context: ResourceContext) -> int:
    """Slots of a resource with one slot per context: *slots*, or as many as contexts may be open (promise P3)."""
    if slots is None:
        return context.max_owners
    if slots < context.max_owners:
        raise SetupError(
            f"resource {name!r}: slots={slots}, but {context.max_owners} contexts may be open at once "
            "(max_concurrent_requests × contexts, plus sessions); raise slots, or lower max_concurrent_requests or "
            "max_sessions"
        )
    return slots


def check_budget(name: str, what: str, slots: int, slot_bytes: int, context: ResourceContext, spare: int = 0) -> None:
    """Refuse a pool of *slots* and *spare* slots of *slot_bytes* that exceeds the memory budget (promise P3).

    :param what: the slots in words. :param spare: slots of the resource itself, which no owner gets.
    """
    needed = (slots + spare) * slot_bytes
    if context.memory is None or needed <= context.memory:
        return
    fit = context.memory // slot_bytes - spare
    message = (
        f"resource {name!r}: {what} need {bytes_in_words(needed)}, more than the memory budget of "
        f"{bytes_in_words(context.memory)}"
    )
    settings = [f"resources.{name}.slots: {fit}"] if context.max_owners <= fit else []
    raise DoesNotFit(message, needed, context.memory, settings, slot_bytes)


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

    def open(self, owner: Owner, request: EngineRequest) -> None:
        if owner not in self._slots:
            raise IntegrityError(f"{owner} has no reservation in {self.name!r}")
        self._open.add(owner)

    def close(self, owner: Owner) -> None:
        if owner not in self._slots:
            raise IntegrityError(f"{owner} has no slot in {self.name!r}")
        self._slots.release(owner)
        self._open.discard(owner)

    def usage(self) -> Usage:
        return self._slots.usage()

    def check(self, owners: Sequence[Owner]) -> None:
        self._slots.check(owners)

    def slot_bytes(self) -> float:
        """What each slot more or less would take of the device."""
        return self.device_bytes() / (self.capacity() + 1)  # some have a slot of their own beside

    def size_in_words(self) -> str:
        return f"{self.capacity():,} slots"

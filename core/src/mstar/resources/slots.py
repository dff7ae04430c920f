"""Books of a fixed number of slots, one per owner. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mstar.resources.base import IntegrityError, Owner, Row, Usage

__all__ = ["SlotPool"]


class SlotPool:
    """Hands out slot numbers ``first … first + slots - 1``; lowest free number first, so that live slots stay dense.

    :param first: number of the first slot; the ones before it are the caller's (a sink slot for padding rows).
    """

    def __init__(self, slots: int, first: int = 0):
        self.slots, self.first = slots, first
        self._free = list(range(first + slots - 1, first - 1, -1))
        self._held: dict[Owner, int] = {}
        self._last: tuple[tuple[Row, ...], npt.NDArray[np.int64]] = ((), np.zeros(0, np.int64))

    def reserve(self, owner: Owner) -> bool:
        """Give *owner* a slot; ``True`` also when it has one already."""
        if owner in self._held:
            return True
        if not self._free:
            return False
        self._held[owner] = self._free.pop()
        return True

    def __getitem__(self, owner: Owner) -> int:
        return self._held[owner]

    def of(self, rows: Sequence[Row]) -> npt.NDArray[np.int64]:
        """The slots of the owners of *rows*, int64 ``[rows]``; not to be changed. As long as a loop runs
        the same rows, which are the same objects then, they are not looked up again."""
        known, slots = self._last
        same = (*rows,)
        if same != known:
            slots = np.array([self._held[row.owner] for row in rows], np.int64)
            self._last = (same, slots)
        return slots

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._held

    def release(self, owner: Owner) -> int:
        slot = self._held.pop(owner)
        self._last = ((), self._last[1][:0])
        self._free.append(slot)
        if len(self._free) > 1 and self._free[-2] < slot:
            self._free.sort(reverse=True)
        return slot

    def usage(self) -> Usage:
        return Usage(len(self._held), self.slots)

    def check(self, owners: Sequence[Owner]) -> None:
        if set(owners) != set(self._held):
            raise IntegrityError(f"slots held by {sorted(self._held)} but open owners are {sorted(owners)}")
        numbers = sorted([*self._free, *self._held.values()])
        if numbers != list(range(self.first, self.first + self.slots)):
            raise IntegrityError(f"slot numbers do not add up: {numbers}")

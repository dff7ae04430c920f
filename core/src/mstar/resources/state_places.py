"""Books of the places that recurrent states lie in. No torch.

*Two places.* A slot has two places in each tensor: the state is in the one, a step writes the next state into the
other, and its commit says that the state is there now. Nothing that a repeated step would read changes before the
commit, in a captured graph too; and until the slot's next step the state before is still there, which is all that it
takes to undo a step.

*Sharing.* A state that is to be kept is not copied: its place is held once more. Whoever has it as its state reads it
there, writes the next state elsewhere, and two steps later, when it would have to write into it, gets another place.
Each slot holds two places and each kept state one, so with as many places as that there is always a free one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mstar.resources.base import IntegrityError

__all__ = ["Places", "StatePlaces"]

Places = npt.NDArray[np.int64]
"""One place of each tensor, int64 ``[tensors]``, or of each of some slots, ``[tensors, slots]``."""


class StatePlaces:
    """The places of *tensors* tensors, each of which a step may write or not.

    :param slots: numbers 0 … slots − 1. :param kept: states that may be kept beside theirs.
    :ivar size: places of each tensor. The first *slots* are the slots' in order, then come their second ones.
    """

    def __init__(self, tensors: int, slots: int, kept: int):
        self.size = 2 * slots + kept
        self._now = np.tile(np.arange(slots), (tensors, 1))
        self._next = self._now + slots
        self._moved = np.zeros((tensors, slots), bool)  # the slot's last step wrote the tensor and may be undone
        self._holders = np.ones((tensors, self.size), np.int64)
        self._holders[:, 2 * slots :] = 0
        self._free = [list(range(self.size - 1, 2 * slots - 1, -1)) for _ in range(tensors)]
        self._shares = kept > 0

    def begin(self, slot: int) -> Places:
        """Places of *slot* that nobody else reads, for a state that begins."""
        self._moved[:, slot] = False
        for tensor, place in enumerate(self._now[:, slot]):
            if self._holders[tensor, place] > 1:
                self._replace(self._now, tensor, slot)
        return self._now[:, slot]

    def rows(self, slots: npt.NDArray[np.int64]) -> Places:
        """Where the state of each of *slots* is, and where its next one goes: int64 ``[2, tensors, slots]``.

        From now on their last steps cannot be undone."""
        if self._shares:
            at = np.arange(len(self._next))[:, None]
            for tensor, number in np.argwhere(self._holders[at, self._next[:, slots]] > 1):
                self._replace(self._next, int(tensor), int(slots[number]))
        return np.stack((self._now[:, slots], self._next[:, slots]))

    def advance(self, slots: Sequence[int] | npt.NDArray[np.int64], written: npt.NDArray[np.bool_]) -> None:
        """A step of *slots* is committed, which wrote those of the tensors that *written* ``[tensors]`` says."""
        now, after = self._now[:, slots], self._next[:, slots]
        if written.all():  # as in all steps of most models
            self._moved[:, slots], self._now[:, slots], self._next[:, slots] = True, after, now
            return
        self._moved[:, slots] = written[:, None]
        self._now[:, slots] = np.where(written[:, None], after, now)
        self._next[:, slots] = np.where(written[:, None], now, after)

    def undo(self, slot: int) -> None:
        """Go back to the state before *slot*'s last step."""
        moved = self._moved[:, slot]
        now, after = self._now[:, slot], self._next[:, slot]
        self._now[:, slot], self._next[:, slot] = np.where(moved, after, now), np.where(moved, now, after)
        self._moved[:, slot] = False

    def now(self, slot: int) -> Places:
        """Where *slot*'s state is."""
        return self._now[:, slot]

    # --- kept states ------------------------------------------------------------------------------------------------
    def keep(self, slot: int) -> Places:
        """Hold *slot*'s state beside it, until it is released."""
        places = self._now[:, slot].copy()
        self._holders[np.arange(len(places)), places] += 1
        return places

    def adopt(self, slot: int, places: Places) -> None:
        """Make a kept state that of *slot*."""
        self._holders[np.arange(len(places)), places] += 1
        self.release(self._now[:, slot])
        self._now[:, slot] = places
        self._moved[:, slot] = False

    def release(self, places: Places) -> None:
        """Hold them once less."""
        for tensor, place in enumerate(places.tolist()):
            self._drop(tensor, place)

    def _drop(self, tensor: int, place: int) -> None:
        self._holders[tensor, place] -= 1
        if not self._holders[tensor, place]:
            self._free[tensor].append(place)

    def _replace(self, side: Places, tensor: int, slot: int) -> None:
        """Another place for *slot*'s shared one."""
        if not self._free[tensor]:
            raise IntegrityError("no place is left for a state although every holder is counted: the books are wrong")
        self._drop(tensor, int(side[tensor, slot]))
        side[tensor, slot] = place = self._free[tensor].pop()
        self._holders[tensor, place] = 1

    # --- books --------------------------------------------------------------------------------------------------------
    def check(self, kept: Sequence[Places]) -> None:
        """Raise :class:`IntegrityError` unless exactly the slots and the states in *kept* hold the places."""
        for tensor, free in enumerate(self._free):
            holders = np.zeros(self.size, np.int64)
            for places in (self._now[tensor], self._next[tensor], np.array([p[tensor] for p in kept], np.int64)):
                np.add.at(holders, places, 1)
            if not np.array_equal(holders, self._holders[tensor]):
                raise IntegrityError(f"holders of states' places do not add up: {holders} {self._holders[tensor]}")
            if sorted(free) != np.flatnonzero(holders == 0).tolist():
                raise IntegrityError("free places of states do not add up")

"""What a pool says when its memory budget cannot hold it."""

from __future__ import annotations

from collections.abc import Sequence

from mstar.spec.errors import SetupError

__all__ = ["DoesNotFit"]


class DoesNotFit(SetupError):
    """A pool needs more memory than its budget.

    :param needed: bytes that it needs at the least. :param budget: bytes that it may take.
    :param settings: settings of this resource, each of which would make it fit (``"resources.kv.max_tokens: 4096"``).
    :param slot_bytes: what each context fewer would save, 0 when their number does not matter.
    """

    def __init__(self, message: str, needed: int, budget: int, settings: Sequence[str] = (), slot_bytes: int = 0):
        super().__init__(message + (f". It would fit with {' or '.join(settings)}" if settings else ""))
        self.message, self.needed, self.budget = message, needed, budget
        self.settings, self.slot_bytes = tuple(settings), slot_bytes

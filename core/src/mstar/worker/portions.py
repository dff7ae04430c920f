"""Calls in pieces: which part of a call a step runs, where a resource has a say (:meth:`Resource.portion`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mstar.engine.step import Work
from mstar.graph.calls import CallRun
from mstar.graph.program import CallOp
from mstar.resources.base import Owner, Resource
from mstar.spec.errors import MstarError

__all__ = ["Portions", "share"]


class Portions:
    """Makes the shares of steps.

    :param owner_of: whose state a call uses in a resource.
    """

    def __init__(self, resources: Mapping[str, Resource], owner_of: Callable[[CallRun, str], Owner]):
        self._resources, self._owner_of = resources, owner_of
        self._asked: dict[CallOp, str | None] = {}

    def concern(self, op: CallOp) -> bool:
        """Whether a resource has a say in *op*'s calls."""
        return self._asks(op) is not None

    def skip(self, call: CallRun) -> bool:
        """Leave out what is known of *call*, which is one of :meth:`concern`'s, from here on. Whether nothing is left
        of it."""
        call.done += self._portion(call, call.done, 0)[0]
        return call.remaining <= 0

    def work(self, call: CallRun, tokens: int, first: bool) -> Work | None:
        """Such a *call*'s share of a step in which *tokens* are left for it; some of it is not known. ``None``: its
        next piece is larger, and the step is not its own: it is not the *first*."""
        items = min(tokens * call.op.entry.step_items, call.remaining)
        known, taken = self._portion(call, call.done, items)
        call.done += known
        if taken > items and not first:
            return None
        end = call.done + taken
        after = self._portion(call, end, 0)[0] if end < call.length else 0
        return Work(call, call.done, taken, end + after >= call.length)

    def _portion(self, call: CallRun, start: int, most: int) -> tuple[int, int]:
        name = self._asks(call.op)
        assert name is not None
        portion = self._resources[name].portion(self._owner_of(call, name), start, most)
        assert portion is not None
        return portion

    def _asks(self, op: CallOp) -> str | None:
        """The resource that *op*'s entry advances and that has a say."""
        if op not in self._asked:
            self._asked[op] = self._found(op)
        return self._asked[op]

    def _found(self, op: CallOp) -> str | None:
        entry = op.entry
        advanced = [name for name in entry.resources if name not in entry.frozen]
        found = [name for name in advanced if self._resources[name].cuts_calls]
        if found and (entry.chunk is None or entry.outputs or len(found) > 1):
            raise MstarError(
                f"entry {op.call.node}.{entry.name} advances {', '.join(map(repr, found))}, which keeps what it "
                "computes: it needs a chunk port, no outputs, and no second such resource"
            )
        return found[0] if found else None


def share(call: CallRun, tokens: int) -> Work:
    """A call's share of a step in which *tokens* are left for it."""
    items = min(tokens * call.op.entry.step_items, call.remaining) if call.op.primary is not None else 1
    return Work(call, call.done, items, call.done + items >= call.length)

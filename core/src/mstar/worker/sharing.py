"""Prompts whose head need not be computed: known to all resources already, or computed by a sibling."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mstar.graph.calls import CallRun
from mstar.graph.program import CallOp, Plan
from mstar.resources.base import Owner, Resource
from mstar.worker.live import Live
from mstar.worker.messages import Found
from mstar.worker.prompt_heads import Skipped, skip_known
from mstar.worker.ranks import Ranks

__all__ = ["PromptSharing"]


class PromptSharing:
    """A request that names a sibling starts when the sibling's prompt is computed, and takes it over.

    :ivar looked_up: tokens of prompts that might have been known. :ivar found: those that were.
    :param live: requests by id. :param owner_of: whose state a call uses in a resource. :param start: begins a
        request's routes. :param ranks: the other ranks: those that run a call with this one skip what it skips, and
        those that run one without it look for themselves.
    """

    def __init__(
        self,
        plan: Plan,
        resources: Mapping[str, Resource],
        live: Mapping[str, Live],
        owner_of: Callable[[Live, str, CallRun], Owner],
        start: Callable[[Live], None],
        ranks: Ranks | None = None,
    ):
        self._ranks = ranks
        self._resources, self._live, self._owner_of, self._start = resources, live, owner_of, start
        self.looked_up = self.found = 0
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[Live, CallRun]] = {}  # calls whose prompts other ranks look for
        self._possible = any(entry.prefix for node in plan.graph.nodes for entry in node.entries)
        self._prompt = _prompt_of(plan)

    def waits(self, live: Live) -> bool:
        """Whether *live* is to start later, when its sibling's prompt is computed."""
        parent = self._sibling(live)
        if not self._possible or parent is None or parent.started is None or not parent.fresh:
            return False
        parent.siblings.append(live)
        return True

    def reuse_ahead(self, live: Live, call: CallRun) -> None:
        """:meth:`reuse` for the prompt that comes after *call*, which computes what stands in it: what only its head
        needs is then not computed (pictures of earlier turns)."""
        op = self._prompt
        if op is None or op.primary is None or live.skipped is not None or not live.fresh:
            return
        ref = call.run.values.get(str(op.call.inputs[op.primary]))
        if ref is not None:
            prompt = CallRun(call.run, call.partition, op, {op.primary: ref}, ref.length)
            if self._ranks is None or self._ranks.here(prompt):
                self.reuse(live, prompt)
            live.skipped = prompt.done

    def reuse(self, live: Live, call: CallRun) -> bool:
        """Let the call skip the head of its tokens that all of its resources already hold. Returns whether it can be
        offered: not yet where another rank, whose pools nobody here can ask, looks for it."""
        if live.skipped is not None:
            call.done = live.skipped
            return True
        ids = self._ids(call)
        if self._ranks is not None and not self._ranks.here(call):
            number = next(self._numbers)
            self._asked[number] = (live, call)
            self._ranks.seek(number, call, ids)
            return False
        sibling = self._sibling(live)
        shares = []
        for name in call.op.entry.resources:
            parent = None if sibling is None else self._owner_of(sibling, name, call)
            shares.append((self._resources[name], self._owner_of(live, name, call), parent))
        self._settle(live, call, len(ids), skip_known(shares, ids, self._ranks))
        return True

    def found_elsewhere(self, message: Found) -> tuple[Live, CallRun] | None:
        """What another rank has found of a prompt: the call that can be offered now, unless its request has ended."""
        waiting = self._asked.pop(message.number, None)
        if waiting is not None:
            live, call = waiting
            if self._ranks is not None:
                self._ranks.skipped_elsewhere(call, message.tokens)
            live.cuts = message.cuts
            self._settle(live, call, call.length, Skipped(message.asked, message.tokens))
        return waiting

    def _settle(self, live: Live, call: CallRun, tokens: int, skipped: Skipped) -> None:
        if skipped.asked:
            self.looked_up += tokens
        if skipped.tokens:
            self.found += skipped.tokens
            call.done = live.cached = skipped.tokens

    @staticmethod
    def _ids(call: CallRun) -> Sequence[int]:
        ref = call.inputs[call.op.primary or ""]
        ids: Any = ref.to_host()
        return [ids] if ref.row else ids

    def cut(self, live: Live, call: CallRun) -> int:
        """How many of the tokens that are left of the call the next step may take at most."""
        tokens = call.remaining
        if self._ranks is not None and not self._ranks.here(call):
            return min((cut - call.done for cut in live.cuts if cut > call.done), default=tokens)
        for name in call.op.entry.resources:
            resource = self._resources[name]
            if type(resource).cut is not Resource.cut:
                tokens = min(tokens, resource.cut(self._owner_of(live, name, call), call.remaining))
        return tokens

    def computed(self, live: Live) -> None:
        """The prompt is computed (or never will be): siblings may go on."""
        live.fresh = False
        for number in [number for number, (asking, _) in self._asked.items() if asking is live]:
            del self._asked[number]  # it has ended
        siblings, live.siblings = live.siblings, []
        for sibling in siblings:
            if sibling.request.id in self._live:
                self._start(sibling)

    def _sibling(self, live: Live) -> Live | None:
        return self._live.get(live.request.sibling_of or "")


def _prompt_of(plan: Plan) -> CallOp | None:
    """The call that reads requests' prompts, if there is one and no other."""
    inputs = {port.name for port in plan.graph.inputs}
    found = [
        op
        for program in plan.programs.values()
        for op in program
        if isinstance(op, CallOp) and op.entry.prefix and op.primary and op.call.inputs.get(op.primary) in inputs
    ]
    return found[0] if len(found) == 1 else None

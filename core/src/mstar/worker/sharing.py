"""Prompts whose head need not be computed: known to all resources already, or computed by a sibling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mstar.graph.calls import CallRun
from mstar.graph.program import Plan
from mstar.resources.base import Owner, Resource
from mstar.worker.live import Live
from mstar.worker.ranks import Ranks

__all__ = ["PromptSharing"]


class PromptSharing:
    """A request that names a sibling starts when the sibling's prompt is computed, and takes it over.

    :ivar looked_up: tokens of prompts that might have been known. :ivar found: those that were.
    :param live: requests by id. :param owner_of: whose state a call uses in a resource. :param start: begins a
        request's routes. :param ranks: the other ranks: those that run a call with this one skip what it skips.
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
        self._possible = any(entry.prefix for node in plan.graph.nodes for entry in node.entries)

    def waits(self, live: Live) -> bool:
        """Whether *live* is to start later, when its sibling's prompt is computed."""
        parent = self._sibling(live)
        if not self._possible or parent is None or parent.started is None or not parent.fresh:
            return False
        parent.siblings.append(live)
        return True

    def reuse(self, live: Live, call: CallRun) -> None:
        """Let the call skip the head of its tokens that all of its resources already hold. Not on another rank, whose
        pools nobody here can ask."""
        if self._ranks is not None and not self._ranks.here(call):
            return
        ref = call.inputs[call.op.primary or ""]
        ids = ref.to_host() if not ref.row else [ref.to_host()]
        sibling = self._sibling(live)
        shares = []
        for name in call.op.entry.resources:
            parent = None if sibling is None else self._owner_of(sibling, name, call)
            shares.append((self._resources[name], self._owner_of(live, name, call), parent))
        hits = self._matches(shares, ids)
        deepest = skipped = min(hits, default=0)
        if hits:
            self.looked_up += len(ids)
            deepest = max(hits)
        while skipped > 0 and max(hits) > skipped:  # where all can begin: what one knows may end within another's
            hits = self._matches(shares, ids[: skipped + 1])
            skipped = min(hits)
        self.found += max(skipped, 0)
        if deepest > skipped:
            for resource, owner, _ in shares:
                resource.missed(owner, deepest)
                if self._ranks is not None:
                    self._ranks.missed(resource.name, owner, deepest)
        if skipped <= 0:
            return
        for resource, owner, parent in shares:
            resource.skip(owner, ids[:skipped], parent)
            if self._ranks is not None:
                self._ranks.skipped(resource.name, owner, ids[:skipped], parent)
        call.done = live.cached = skipped

    def cut(self, live: Live, call: CallRun) -> int:
        """How many of the tokens that are left of the call the next step may take at most."""
        tokens = call.remaining
        if self._ranks is not None and not self._ranks.here(call):
            return tokens
        for name in call.op.entry.resources:
            resource = self._resources[name]
            if type(resource).cut is not Resource.cut:
                tokens = min(tokens, resource.cut(self._owner_of(live, name, call), call.remaining))
        return tokens

    def computed(self, live: Live) -> None:
        """The prompt is computed (or never will be): siblings may go on."""
        live.fresh = False
        siblings, live.siblings = live.siblings, []
        for sibling in siblings:
            if sibling.request.id in self._live:
                self._start(sibling)

    def _sibling(self, live: Live) -> Live | None:
        return self._live.get(live.request.sibling_of or "")

    def _matches(self, shares: Sequence[tuple[Resource, Owner, Owner | None]], ids: Sequence[int]) -> list[int]:
        """What each resource that has an opinion holds of *ids* already."""
        hits = []
        for resource, owner, parent in shares:
            hit = resource.match(owner, ids, parent)
            if hit is not None:
                hits.append(hit)
            if self._ranks is not None:  # what was looked at last is dropped last, on all ranks of a mesh
                self._ranks.matched(resource.name, owner, ids, parent)
        return hits

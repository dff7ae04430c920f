"""What a request needs at most, and the all-or-nothing reservation of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mstar.graph.program import Plan
from mstar.nn.model import Demand, Model
from mstar.resources.base import Owner, Resource
from mstar.spec.errors import MstarError, RequestError
from mstar.spec.request import EngineRequest
from mstar.worker.ranks import Ranks
from mstar.worker.sessions import Session, Sessions

__all__ = ["Admission", "Holding"]


@dataclass(slots=True)
class Holding:
    """What one request holds: (resource, owner) pairs to close at its end; *session*'s are the session's to close.
    *told*: other ranks hold it, too."""

    needs: list[tuple[str, str, int]]  # resource, context, units
    session: Session | None = None
    owners: list[tuple[str, Owner]] = field(default_factory=list)
    told: bool = False


class Admission:
    """Reserves resources for requests. A started request holds its worst case: it never waits for another's memory.

    :param ranks: the other ranks, which hold what this one's books say.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        resources: Mapping[str, Resource],
        sessions: Sessions,
        ranks: Ranks | None = None,
    ):
        self.model, self.plan, self.resources, self.sessions, self.ranks = model, plan, resources, sessions, ranks
        self._kept = frozenset(plan.graph.sessions)

    def needs(self, request: EngineRequest) -> list[tuple[str, str, int]]:
        """(resource, context, units) of the request's worst case. Raises when no empty pool could ever hold it."""
        asked = {(d.resource, d.context): d.tokens for d in self._demands(request)}
        needs = []
        for name, contexts in self.plan.contexts.items():
            resource = self.resources[name]
            for context in contexts:
                limit = getattr(resource.spec, "max_tokens", None)
                tokens = asked.get((name, context), limit or 0)
                if limit is not None and tokens > limit:
                    raise RequestError(
                        f"the request needs {tokens} tokens of {name!r} in all, one request may hold {limit}; shorten "
                        "it or lower max_tokens",
                        code="context_length_exceeded",
                    )
                needs.append((name, context, resource.units(tokens)))
        for name in self.plan.contexts:
            total = sum(units for resource, _, units in needs if resource == name)
            capacity = self.resources[name].capacity()
            if total > capacity:
                raise RequestError(
                    f"the request needs {total} units of {name!r}, which has {capacity} in all; shorten it, lower "
                    f"max_tokens, or give the deployment a larger resources.{name}",
                    code="request_too_large",
                )
        return needs

    def _demands(self, request: EngineRequest) -> Iterable[Demand]:
        for demand in self.model.demand(request):
            if demand.context not in self.plan.contexts.get(demand.resource, ()):
                raise MstarError(
                    f"demand() names resource {demand.resource!r} in context {demand.context!r}, which no call uses"
                )
            yield demand

    def owner(self, resource: str, context: str, request: str, session: Session | None) -> Owner:
        key = session.key if session is not None and resource in self._kept else request
        return Owner(key, context)

    def reserve(self, request: EngineRequest, holding: Holding) -> bool:
        """Reserve and open everything, or nothing. Idle sessions give way to requests."""
        if self.ranks is not None:
            self.ranks.decide(request)
            self.ranks.seats.assign(request, None if holding.session is None else holding.session.key)
            owners = (
                (name, self.owner(name, context, request.id, holding.session)) for name, context, _ in holding.needs
            )
            if not all(self.ranks.lives_at(name, owner) for name, owner in owners):
                self.ranks.seats.forget(request.id)  # the books of a rank that has died say nothing of the next one
                return False
        while not self._try(request, holding):
            if not self.sessions.evict_one():
                if self.ranks is not None:
                    self.ranks.seats.forget(request.id)  # another seat may have room by then
                return False
        opened: list[tuple[str, Owner]] = []
        try:
            for name, owner in holding.owners:
                self.resources[name].open(owner, request)
                opened.append((name, owner))
        except Exception:
            self.release(holding)
            raise
        if holding.session is not None:
            holding.session.owners.update(pair for pair in opened if pair[0] in self._kept)
        if self.ranks is not None:
            units = (units for _, _, units in holding.needs)
            self.ranks.opened(request, ((*pair, count) for pair, count in zip(opened, units, strict=True)))
            holding.told = True
        return True

    def _try(self, request: EngineRequest, holding: Holding) -> bool:
        """Reserve everything, or give back what was reserved: whether a resource refuses or raises."""
        complete = False
        try:
            for name, context, units in holding.needs:
                owner = self.owner(name, context, request.id, holding.session)
                if not self.resources[name].reserve(owner, units):
                    return False
                holding.owners.append((name, owner))
            complete = True
        finally:
            if not complete:
                self.release(holding)
        return True

    def release(self, holding: Holding) -> None:
        """Close what the request holds for itself; its session keeps what is the session's."""
        kept = holding.session.owners if holding.session is not None else set()
        closed = [pair for pair in holding.owners if pair not in kept]
        if self.ranks is not None:
            if holding.told:
                self.ranks.closing(closed)
            self.ranks.settle((pair for pair in holding.owners if pair in kept), holding.told)
        for name, owner in closed:
            self.resources[name].close(owner)
        holding.owners, holding.told = [], False

"""Named state that outlives its request: bounded in number and age, never evicted while in use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from mstar.resources.base import Owner
from mstar.spec.errors import RequestError, TooBusy

__all__ = ["Session", "Sessions"]


@dataclass(slots=True)
class Session:
    """*tenant*: who alone can use it, whatever names others have chosen. *owners*: (resource, owner) pairs whose state
    it keeps. *user*: the request that holds it now."""

    name: str
    tenant: str
    last_used: float
    user: str | None = None
    owners: set[tuple[str, Owner]] = field(default_factory=set)

    @property
    def key(self) -> str:
        if not self.tenant:
            return f"session:{self.name}"
        return f"session@{len(self.tenant)}:{self.tenant}:{self.name}"  # no two pairs have one key


class Sessions:
    """:param release: closes one (resource, owner) of an evicted session. :param dropped: then told of its key."""

    def __init__(
        self,
        limit: int,
        ttl_s: float,
        release: Callable[[str, Owner], None],
        dropped: Callable[[str], None] = lambda key: None,
    ):
        self._dropped = dropped
        self.limit, self.ttl_s, self._release = limit, ttl_s, release
        self._sessions: dict[str, Session] = {}  # by key
        self._idle: OrderedDict[str, Session] = OrderedDict()  # those that nobody holds, used longest ago first

    def __len__(self) -> int:
        return len(self._sessions)

    def acquire(self, name: str, request: str, now: float, tenant: str = "") -> Session:
        """Take *tenant*'s session *name* for *request*, making it if need be. Raises when it is in use or no more
        fit."""
        new = Session(name, tenant, now)
        session = self._sessions.get(new.key)
        if session is None:
            if len(self._sessions) >= self.limit and not self.evict_one():
                raise TooBusy(f"all {self.limit} sessions are in use; try again later or raise max_sessions")
            session = self._sessions[new.key] = new
        elif session.user is not None:
            raise RequestError(
                f"session {name!r} is in use by another request", param="session", code="session_busy", status=409
            )
        self._idle.pop(session.key, None)
        session.user, session.last_used = request, now
        return session

    def give_back(self, session: Session, now: float, *, keep: bool) -> None:
        """The request has ended. ``keep=False`` drops the state: after an error nobody knows what it holds."""
        session.user, session.last_used = None, now
        if keep and session.owners:
            self._idle[session.key] = session
        else:
            self._drop(session)

    def evict_one(self) -> bool:
        """Drop the idle session that was used longest ago; ``False`` if none is idle."""
        oldest = next(iter(self._idle.values()), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def expire(self, now: float) -> None:
        """Drop those that nobody has used for longer than *ttl_s*. Costs nothing when there are none."""
        while (expiry := self.next_expiry()) is not None and expiry < now:
            self.evict_one()

    def open_owners(self, resource: str) -> list[Owner]:
        return [owner for s in self._sessions.values() for name, owner in s.owners if name == resource]

    def next_expiry(self) -> float | None:
        """When the next idle session becomes too old, in monotonic seconds."""
        oldest = next(iter(self._idle.values()), None)
        return None if oldest is None else oldest.last_used + self.ttl_s

    def drop_where(self, lost: Callable[[str, Owner], bool]) -> None:
        """Drop the idle sessions that keep state of a resource and owner for which *lost* holds."""
        for session in list(self._idle.values()):
            if any(lost(resource, owner) for resource, owner in session.owners):
                self._drop(session)

    def close(self) -> None:
        for session in list(self._sessions.values()):
            self._drop(session)

    def _drop(self, session: Session) -> None:
        del self._sessions[session.key]
        self._idle.pop(session.key, None)
        for resource, owner in session.owners:
            self._release(resource, owner)
        self._dropped(session.key)

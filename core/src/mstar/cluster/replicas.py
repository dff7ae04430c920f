"""Copies of a whole layout: each request goes to the copy that has the fewest.

A copy has processes of its own and knows nothing of the others: when one dies, its requests fail and the others serve
on. What continues a session, or takes over a sibling's prompt, goes where that is.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from mstar.cluster.base import Executor, Phase, WorkerConfig
from mstar.spec.request import Cancel, Done, EngineRequest, Event, Failed, Push

__all__ = ["ReplicasExecutor", "joined_status"]

_ENDS = (Done, Failed)


class _Copy:
    """One copy. *running*: requests that it has."""

    def __init__(self) -> None:
        self.executor: Executor
        self.running: set[str] = set()


class ReplicasExecutor(Executor):
    """Runs ``deployment.replicas`` copies side by side.

    :param make: makes the executor of one copy, from its configuration, sink and phase callback.
    """

    def __init__(
        self,
        config: WorkerConfig,
        sink: Callable[[Sequence[Event]], None],
        on_phase: Callable[[Phase], None] = lambda phase: None,
        registry: Any = None,
        *,
        make: Callable[[WorkerConfig, Callable[[Sequence[Event]], None], Callable[[Phase], None]], Executor],
    ):
        super().__init__(config, sink, on_phase, registry)
        self._started = False
        self._at: dict[str, _Copy] = {}
        self._sessions: OrderedDict[tuple[str, str], _Copy] = OrderedDict()
        self._copies: list[_Copy] = []
        for number in range(config.deployment.replicas):
            copy = _Copy()
            own = msgspec.structs.replace(config, replica=number)
            copy.executor = make(own, partial(self._take, copy), partial(self._phase_of, copy))
            self._copies.append(copy)

    async def start(self) -> None:
        """Start all copies at once; return when all are ready. If one cannot be, none stays."""
        starts = [asyncio.ensure_future(copy.executor.start()) for copy in self._copies]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self._stop_copies()
            raise
        self._started = True
        self._phase_changed()

    async def stop(self) -> None:
        self._started = False
        await self._stop_copies()
        self._set_phase(Phase(name="stopped"))

    async def _stop_copies(self) -> None:
        await asyncio.gather(*(copy.executor.stop() for copy in self._copies))

    # --- requests -----------------------------------------------------------------------------------------------------
    def submit(self, request: EngineRequest) -> None:
        copy = self._choose(request)
        self._at[request.id] = copy
        copy.running.add(request.id)
        copy.executor.submit(request)

    def _choose(self, request: EngineRequest) -> _Copy:
        name = None if request.session is None else (request.tenant, request.session)
        copy = self._at.get(request.sibling_of or "")
        if name is not None:
            copy = self._sessions.get(name, copy)
        if copy is None or (copy.executor.phase.name != "ready" and name is None):
            ready = [one for one in self._copies if one.executor.phase.name == "ready"]
            copy = min(ready or self._copies, key=lambda one: len(one.running))
        if name is not None:
            self._remember(name, copy)
        return copy

    def _remember(self, name: tuple[str, str], copy: _Copy) -> None:
        """Where a session is; as many as all copies can keep."""
        self._sessions[name] = copy
        self._sessions.move_to_end(name)
        if len(self._sessions) > max(1, self.config.deployment.max_sessions) * len(self._copies):
            self._sessions.popitem(last=False)

    def push(self, push: Push) -> None:
        if (copy := self._at.get(push.id)) is not None:
            copy.executor.push(push)

    def cancel(self, cancel: Cancel) -> None:
        if (copy := self._at.get(cancel.id)) is not None:
            copy.executor.cancel(cancel)

    def ack(self, request: str, stream: str, items: int) -> None:
        if (copy := self._at.get(request)) is not None:
            copy.executor.ack(request, stream, items)

    def _take(self, copy: _Copy, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, _ENDS):
                copy.running.discard(event.id)
                self._at.pop(event.id, None)
        self.sink(events)

    # --- phases -------------------------------------------------------------------------------------------------------
    def _phase_of(self, copy: _Copy, phase: Phase) -> None:
        """*copy* has come to *phase*. One that starts again has lost its sessions: they begin anew wherever there is
        room, and do not wait for it."""
        if phase.name == "starting" and self._started:
            for name in [name for name, at in self._sessions.items() if at is copy]:
                del self._sessions[name]
        self._phase_changed()

    def _phase_changed(self) -> None:
        """All copies must be ready for the start; after it, one is enough."""
        phases = [copy.executor.phase for copy in self._copies]
        ready = sum(phase.name == "ready" for phase in phases)
        if ready and self._started:
            missing = next((phase.detail or phase.name for phase in phases if phase.name != "ready"), "")
            detail = f"{ready} of {len(phases)} copies serve; {missing}" if ready < len(phases) else ""
            self._set_phase(Phase(name="ready", detail=detail))
        elif self.phase.name != "stopped" and ready < len(phases):
            self._set_phase(next(phase for phase in phases if phase.name != "ready"))

    def _set_phase(self, phase: Phase) -> None:
        if phase != self.phase:
            self.phase = phase
            self.on_phase(phase)

    async def status(self) -> Mapping[str, Any]:
        """The copies' status joined into one, and each by itself under ``copies``."""
        return joined_status(await asyncio.gather(*(copy.executor.status() for copy in self._copies)))


def joined_status(copies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One status of several workers: numbers that count are added up, the rest is the first's."""
    told = [dict(copy) for copy in copies if copy]
    if not told:
        return {}
    joined = dict(told[0])
    for copy in told[1:]:
        for key in ("running", "waiting", "sessions", "steps"):
            joined[key] += copy[key]
        for key in ("resources", "checkpoints", "prefix", "media", "memory", "moves", "observer_failures"):
            joined[key] = _sum(joined[key], copy[key])
        joined["entries"] = _sum_entries(joined["entries"], copy["entries"])
        joined["began"] = min(joined["began"], copy["began"])
    joined["copies"] = told
    return joined


def _sum(one: Any, other: Any) -> Any:
    """Numbers added, mappings key by key."""
    if isinstance(one, Mapping):
        both = {key: _sum(one[key], other[key]) for key in one if key in other}
        return {**one, **other, **both}
    return one + other if isinstance(one, int | float) else one


def _sum_entries(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = {(entry["node"], entry["entry"]): dict(entry) for entry in one}
    for entry in other:
        before = found.get((entry["node"], entry["entry"]))
        if before is None:
            found[entry["node"], entry["entry"]] = dict(entry)
            continue
        for key in ("steps", "rows", "tokens", "seconds"):
            before[key] += entry[key]
        pairs = zip(before["sizes"], entry["sizes"], strict=True)
        before["sizes"] = [(end, count + more) for (end, count), (_, more) in pairs]
    return list(found.values())

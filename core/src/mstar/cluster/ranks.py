"""A layout of several ranks: a worker process for each, watched and restarted.

::

    executor (event loop) ──▶ rank 0 (worker)  ◀── link: steps, values ──▶  rank 1 (follower)
            │                                  ◀── link ──────────────────▶  rank 2 (follower)
            └── starts, watches and ends each of them; tells rank 0 who is there

Rank 0 has all requests' walks: when it dies, all ranks start again. When another rank dies, only the requests that it
had a part in fail, and it is started again with the ranks of its mesh; until then no new request is taken.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mstar.cluster.base import Phase, WorkerConfig
from mstar.cluster.connection import Attached
from mstar.cluster.processes import LONGEST_DELAY_S, STABLE_S, ProcessesExecutor, down
from mstar.cluster.shm import Arena
from mstar.cluster.transport import (
    AskStatus,
    LinkBroken,
    LinkRank,
    PhaseReport,
    RankFacts,
    Report,
    UnlinkRank,
    WorkerFailed,
)
from mstar.spec.errors import FaultFound, SetupError
from mstar.spec.placement import layout_of, ranks_of
from mstar.spec.request import Event

__all__ = ["RanksExecutor"]

ASK_S = 1.0
_OTHERS_S = 2.0
"""How long the end of a rank that blames another waits for the other's to be noticed."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


class _Rank:
    """One rank's process. *link*: the folder of its link to rank 0, which has none."""

    def __init__(self, number: int, link: Arena | None):
        self.number, self.link = number, link
        self.child: Attached | None = None
        self.facts: RankFacts | None = None
        self.ready = asyncio.Event()
        self.last_words: WorkerFailed | None = None
        self.began = time.monotonic()

    @property
    def blames(self) -> bool:
        """Whether it has ended because another has, by its own words."""
        return self.last_words is not None and self.last_words.peer


class RanksExecutor(ProcessesExecutor):
    """Runs rank 0 as :class:`~mstar.cluster.processes.ProcessesExecutor` runs its worker, and the other ranks beside.

    :param follower_factory: ``"module:Class"`` of the other ranks (:class:`mstar.worker.follower.Follower`).
    """

    def __init__(
        self,
        config: WorkerConfig,
        sink: Callable[[Sequence[Event]], None],
        on_phase: Callable[[Phase], None] = lambda phase: None,
        registry: Any = None,
        *,
        follower_factory: str = "mstar.worker.follower:Follower",
        **limits: Any,
    ):
        super().__init__(config, sink, on_phase, registry, **limits)
        self.follower_factory = follower_factory
        placement = config.deployment.placement
        self._layout = layout_of(placement, placement)
        self._size = ranks_of(placement)
        self._ranks: dict[int, _Rank] = {}
        self._meetings: Arena | None = None
        self._met = 0  # meetings so far: each start of a mesh has a folder of its own
        self._places: dict[tuple[int, ...], Path] = {}  # ranks that meet → where they do, for as long as they live
        self._mending: dict[tuple[int, ...], asyncio.Task[None]] = {}
        self._mended = asyncio.Event()
        self._gang_failures = 0  # in a row

    @property
    def _restarted(self) -> str:
        return self.config.name.replace("rank 0", "all ranks", 1)

    @property
    def pids(self) -> dict[int, int]:
        """Rank → process id, of those that live."""
        return {n: pid for n, rank in self._ranks.items() if rank.child and (pid := rank.child.pid) is not None}

    async def status(self) -> Mapping[str, Any]:
        """Rank 0's status, with that of the others under ``ranks``."""
        own = await super().status()
        if not own:
            return own
        others = await asyncio.gather(*(self._ask(rank) for n, rank in sorted(self._ranks.items()) if n))
        told = {rank["rank"]: rank for rank in own["ranks"]}
        return {**own, "ranks": [{**told.get(other["rank"], {}), **other} for other in others if other]}

    async def _ask(self, rank: _Rank) -> Mapping[str, Any]:
        """The status of *rank*; empty if it dies meanwhile, or hangs."""
        if rank.child is None:
            return {}
        number = next(self._numbers)
        answer = self._questions[number] = self._event_loop.create_future()
        rank.child.send([AskStatus(number=number)])
        exited = self._event_loop.create_task(rank.child.exited.wait())
        try:
            await asyncio.wait([answer, exited], timeout=ASK_S, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else {}
        finally:
            exited.cancel()
            self._questions.pop(number, None)

    # --- start and stop -----------------------------------------------------------------------------------------------
    async def _launch(self) -> None:
        self._last_words = ""
        self._set_phase(Phase(name="starting"))
        try:
            await self._start(tuple(range(self._size)))
        except BaseException:
            await self._stop_ranks(0.0)
            raise
        self._child = self._ranks[0].child
        self._settle()

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
            self._supervisor = None
        self._child = None
        await self._stop_ranks(self.stop_grace_s)
        await super().stop()

    async def _start(self, numbers: tuple[int, ...]) -> None:
        """Start the ranks *numbers* and wait until they are ready. Raises SetupError; who lives then is the caller's to
        stop."""
        try:
            places = {gang: self._meeting_place(gang) for gang in dict.fromkeys(map(self._layout.gang, numbers))}
            started = [self._start_rank(number, places[self._layout.gang(number)]) for number in numbers]
        except OSError as error:  # no memory, no descriptors, no space: may pass, so a restart tries again
            raise SetupError(f"the ranks of {self.config.key!r} cannot be started: {error}") from error
        ready = [asyncio.ensure_future(rank.ready.wait()) for rank in started]
        exits = [asyncio.ensure_future(self._exit_of(rank)) for rank in started]
        try:
            everyone = asyncio.gather(*ready)
            first: list[asyncio.Future[Any]] = [everyone, *exits]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if (died := await _origin(dict(zip(exits, started, strict=True)))) is not None:
                died.result()
            for rank in started:
                self._link(rank)
        finally:
            everyone.cancel()
            for task in (*ready, *exits):
                task.cancel()
            await asyncio.gather(everyone, *exits, return_exceptions=True)

    def _meeting_place(self, gang: tuple[int, ...]) -> str | None:
        """A new folder for *gang* to meet in, instead of the one that it had before it died; ``None`` for one alone."""
        if len(gang) == 1:
            return None
        if self._meetings is None:
            self._meetings = Arena.create()
        before = self._places.pop(gang, None)
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        self._met += 1
        place = self._places[gang] = self._meetings.path / str(self._met)
        place.mkdir()
        return str(place)

    def _start_rank(self, number: int, meeting: str | None) -> _Rank:
        link = self._make_link(number)
        rank = self._ranks[number] = _Rank(number, link)
        config = msgspec.structs.replace(self.config, rank=number, meeting=meeting)
        factory = self.follower_factory if number else self.worker_factory
        deliver = partial(self._receive_of, rank)
        path = None if link is None else str(link.path)
        rank.child = self._attach(config, factory, deliver, path)
        return rank

    def _make_link(self, number: int) -> Arena | None:
        """A folder for the link of rank *number*; ``None`` for rank 0."""
        return Arena.create() if number else None

    async def _exit_of(self, rank: _Rank) -> None:
        """Raises the reason, once *rank*'s process has ended."""
        assert rank.child is not None
        await rank.child.exited.wait()
        cause, words = await rank.child.reap(self.stop_grace_s), rank.last_words
        if words is None:
            raise FaultFound(f"{self._name(rank)} ended while starting: {cause}")
        raise (SetupError if words.setup else FaultFound)(self._by_rank(rank, words.message))

    def _name(self, rank: _Rank) -> str:
        return msgspec.structs.replace(self.config, rank=rank.number).name

    def _by_rank(self, rank: _Rank, message: str) -> str:
        return message if message.startswith("rank ") else f"rank {rank.number}: {message}"

    async def _stop_ranks(self, grace: float) -> None:
        for task in self._mending.values():
            task.cancel()
        if self._mending:
            await asyncio.wait(self._mending.values())
        self._mending.clear()
        await asyncio.gather(*(self._stop_rank(number, grace) for number in list(self._ranks)))
        if self._meetings is not None:
            self._meetings.remove()
            self._meetings = None
        self._places.clear()

    async def _stop_rank(self, number: int, grace: float) -> None:
        rank = self._ranks.pop(number, None)
        if rank is None:
            return
        if rank.child is not None:
            await rank.child.stop(grace)
        if rank.link is not None:
            rank.link.remove()

    # --- reports ------------------------------------------------------------------------------------------------------
    def _receive_of(self, rank: _Rank, reports: Sequence[Report]) -> None:
        """Take what *rank* sent."""
        rest: list[Report] = []
        for report in reports:
            match report:
                case PhaseReport():
                    self._take_phase(rank, report.phase)
                case RankFacts():
                    rank.facts = report
                case LinkBroken():
                    self._end_rank(report)
                case WorkerFailed():
                    rank.last_words = report
                    if rank.child is not None:
                        rank.child.dismiss()
                case _:
                    rest.append(report)
        if rest:
            self._receive(rest)

    def _take_phase(self, rank: _Rank, phase: Phase) -> None:
        if phase.name == "ready":
            rank.ready.set()
            return
        waiting = min((n for n, other in self._ranks.items() if not other.ready.is_set()), default=rank.number)
        if rank.number == waiting and self.phase.name not in ("ready", "failed"):
            detail = f"rank {rank.number}: {phase.detail}" if phase.detail else f"rank {rank.number}"
            self._set_phase(Phase(name=phase.name, progress=phase.progress, detail=detail))

    def _end_rank(self, report: LinkBroken) -> None:
        rank = self._ranks.get(report.rank)
        if rank is not None and rank.child is not None and rank.child.alive():
            _log.error("what rank %d sent cannot be read (%s): it is ended", report.rank, report.message)
            rank.child.kill()

    def _link(self, rank: _Rank) -> None:
        """Tell rank 0 that *rank* is ready."""
        if rank.facts is not None:
            leader = self._ranks[0].child
            assert leader is not None
            leader.send([LinkRank(rank=rank.number, at=rank.facts.at, facts=rank.facts.facts)])

    def _settle(self) -> None:
        """All ranks are there again, if they are."""
        if len(self._ranks) == self._size and all(rank.ready.is_set() for rank in self._ranks.values()):
            self._set_phase(Phase(name="ready"))

    # --- watching -----------------------------------------------------------------------------------------------------
    async def _supervise(self) -> None:
        """Wait for a rank's death, tell everyone, start what has to be started again; for ever."""
        while True:
            dead, cause = await self._next_death()
            if dead is None:
                continue
            gang = self._layout.gang(dead.number)
            words = dead.last_words
            cause = f"{self._name(dead)} died: {cause}" if words is None else self._by_rank(dead, words.message)
            if 0 in gang:
                _log.error("%s; all requests there end, and all ranks start again", cause)
                await self._lose_all(dead, cause)
                await self._restart()
            else:
                again = f"ranks {', '.join(map(str, gang))}, a mesh, start" if len(gang) > 1 else "it starts"
                _log.error("%s; the requests that it had a part in end, and %s again", cause, again)
                await self._lose_gang(gang, cause)
                self._mending[gang] = self._event_loop.create_task(self._mend(gang))

    async def _next_death(self) -> tuple[_Rank | None, str]:
        """The rank that dies next and how; ``None`` when there are others to watch now. Of several, the one that took
        the others with it."""
        living = [
            rank
            for number, rank in self._ranks.items()
            if rank.ready.is_set() and self._layout.gang(number) not in self._mending  # who mends watches these
        ]
        watches: dict[asyncio.Future[str], _Rank] = {
            self._event_loop.create_task(self._wait_dead(rank.child)): rank for rank in living if rank.child
        }
        mended = self._event_loop.create_task(self._mended.wait())
        tasks: list[asyncio.Future[Any]] = [*watches, mended]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._mended.clear()
            died = await _origin(watches)
            return (None, "") if died is None else (watches[died], died.result())
        finally:
            for task in tasks:
                task.cancel()

    async def _lose_all(self, dead: _Rank, cause: str) -> None:
        self._child = None
        self._lose_worker(down(cause), cause, "worker_died")
        await self._stop_ranks(0.0)
        self._failures = 1 if time.monotonic() - dead.began > STABLE_S else self._failures + 1

    async def _lose_gang(self, gang: tuple[int, ...], cause: str) -> None:
        self._set_phase(self._without(gang, cause))
        leader = self._ranks[0].child
        assert leader is not None
        leader.send([UnlinkRank(rank=number, reason=cause) for number in gang])
        began = min(self._ranks[number].began for number in gang if number in self._ranks)
        self._gang_failures = 1 if time.monotonic() - began > STABLE_S else self._gang_failures + 1
        await asyncio.gather(*(self._stop_rank(number, 0.0) for number in gang))

    def _without(self, gang: tuple[int, ...], cause: str) -> Phase:
        """The phase while *gang* is not there."""
        if self._spared(gang):
            return Phase(name="ready", detail=f"{cause}; other ranks serve in its place")
        return down(cause)

    def _spared(self, gang: tuple[int, ...]) -> bool:
        """Whether every node that *gang* runs is on other ranks, too, so that requests can still be taken."""
        living = {n for n, rank in self._ranks.items() if rank.ready.is_set()} - {*gang}
        return all(
            node not in self._layout.by_context and any(living.issuperset(seat.ranks) for seat in seats)
            for node in self._layout.seats
            for seats in self._layout.stages(node)
            if any({*gang} & {*seat.ranks} for seat in seats)
        )

    async def _mend(self, gang: tuple[int, ...]) -> None:
        """Start *gang* again, as often as it takes."""
        while True:
            await asyncio.sleep(min(self.restart_delay_s * 2 ** min(self._gang_failures - 1, 16), LONGEST_DELAY_S))
            try:
                await self._start(gang)
            except SetupError as error:
                self._gang_failures += 1
                _log.error("ranks %s of %r could not be restarted: %s", list(gang), self.config.key, error)
                self._set_phase(self._without(gang, str(error)))
                await asyncio.gather(*(self._stop_rank(number, 0.0) for number in gang))
                continue
            del self._mending[gang]
            self._settle()
            self._mended.set()
            return


async def _origin(deaths: Mapping[asyncio.Future[T], _Rank]) -> asyncio.Future[T] | None:
    """Of *deaths*, done when a rank has died, the one that the others come from; ``None`` if there is none yet."""
    until = time.monotonic() + _OTHERS_S
    while True:
        died = [death for death in deaths if death.done()]
        if first := next((death for death in died if not deaths[death].blames), None):
            return first
        living, left = [death for death in deaths if not death.done()], until - time.monotonic()
        if not died or not living or left <= 0:
            return next(iter(died), None)
        await asyncio.wait(living, timeout=left, return_when=asyncio.FIRST_COMPLETED)

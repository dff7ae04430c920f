"""The executors of Ray: those of processes, with an actor wherever they have a process.

All that they know of deaths, restarts and requests is :mod:`mstar.cluster.processes` and :mod:`mstar.cluster.ranks`.
Ray places the actors and starts their processes again; this side notices, fails what ran there, and tells each new
process its job.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from ray.exceptions import RayError

from mstar.cluster.base import Phase, WorkerConfig
from mstar.cluster.processes import ProcessesExecutor
from mstar.cluster.ranks import RanksExecutor
from mstar.cluster.ray.actor import APART, TOGETHER
from mstar.cluster.ray.group import Group
from mstar.cluster.ray.remote import RemoteWorker
from mstar.cluster.shm import Arena
from mstar.cluster.transport import Report
from mstar.spec.errors import SetupError

__all__ = ["RayExecutor", "RayRanksExecutor"]


class RayExecutor(ProcessesExecutor):
    """Runs the worker in an actor. Parameters as for :class:`~mstar.cluster.processes.ProcessesExecutor`."""

    def __init__(self, *arguments: Any, **limits: Any):
        super().__init__(*arguments, **limits)
        self._group = Group(self.config)

    @property
    def node(self) -> str | None:
        """Ray's id of the node that the worker is on; ``None`` while there is none."""
        return self._child.node if isinstance(self._child, RemoteWorker) else None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._group.open(lambda detail: self._set_phase(Phase(name="starting", detail=detail)))
        except SetupError as error:
            self._lose_worker(Phase(name="failed", detail=str(error)), str(error), "worker_died")
            raise
        try:
            await super().start()
        except BaseException:
            await self._group.close()
            raise

    async def stop(self) -> None:
        self._group.ending = True
        await super().stop()
        await self._group.close()

    def _attach(
        self,
        config: WorkerConfig,
        factory: str,
        deliver: Callable[[Sequence[Report]], None],
        link: str | None = None,
    ) -> RemoteWorker:
        told = self._group.config
        told = msgspec.structs.replace(
            told, rank=config.rank, meeting=config.meeting, sharing=self._sharing(config.rank)
        )
        factories = (factory, self.registry_factory)
        return RemoteWorker(self._group, told, factories, self._tick_s, deliver, self._link_place(config.rank))

    def _sharing(self, rank: int) -> int | None:
        """How many processes of the deployment may be on the machine of *rank*; ``None``: all."""
        del rank
        return None

    def _link_place(self, rank: int) -> str | None:
        """Where *rank* waits for rank 0, see :mod:`mstar.cluster.ray.actor`; ``None`` for rank 0."""
        del rank
        return None


class RayRanksExecutor(RayExecutor, RanksExecutor):
    """Runs the ranks of a layout in actors. Parameters as for :class:`~mstar.cluster.ranks.RanksExecutor`."""

    def __init__(self, *arguments: Any, **limits: Any):
        super().__init__(*arguments, **limits)
        self._nodes: dict[int, str] = {}
        self._stores: dict[tuple[int, ...], str] = {}

    async def _start(self, numbers: tuple[int, ...]) -> None:
        gangs = {gang for gang in map(self._layout.gang, numbers) if len(gang) > 1}
        try:
            found = await asyncio.gather(*(self._group.where(number, "") for number in numbers))
            self._nodes |= {number: where.node for number, where in zip(numbers, found, strict=True)}
            self._stores |= {gang: await self._group.meet(gang[0]) for gang in gangs}
        except RayError as error:
            raise SetupError(f"Ray does not start the ranks of {self.config.key!r}: {error}") from error
        await super()._start(numbers)

    def _meeting_place(self, gang: tuple[int, ...]) -> str | None:
        return self._stores.get(gang)

    def _make_link(self, number: int) -> Arena | None:
        del number  # the actor makes it, on its node
        return None

    def _link_place(self, rank: int) -> str | None:
        if rank == 0:
            return None
        return TOGETHER if self._nodes[rank] == self._nodes[0] else APART

    def _sharing(self, rank: int) -> int | None:
        return Counter(self._nodes.values())[self._nodes[rank]] * self.config.deployment.replicas

"""A copy's actors: the connection to the cluster, the placement group that they stand in, and the actors themselves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mstar.cluster.base import WorkerConfig
from mstar.cluster.launch import worker_environment
from mstar.cluster.ray.actor import RayWorker, Where
from mstar.spec.deployment import RayOptions
from mstar.spec.errors import SetupError, counted
from mstar.spec.placement import ranks_of

__all__ = ["Group"]

_ASK_AGAIN_S = 0.2
_ANSWER_S = 10.0
_log = logging.getLogger(__name__)


class _Cluster:
    """This process's connection to Ray, shared by all that need it. One that was there before is left alone."""

    def __init__(self) -> None:
        self._lock, self._users, self._own = threading.Lock(), 0, False

    def join(self, options: RayOptions) -> None:
        """Blocks. Not in the main thread, where Ray would take over SIGTERM.

        :raises SetupError: there is no cluster at the address, or its Ray or Python is another.
        """
        with self._lock:
            if not self._users and not ray.is_initialized():
                try:
                    if options.address != "auto":
                        _answers(options.address)
                    ray.init(options.address, namespace=options.namespace, logging_level=logging.ERROR)
                except Exception as error:  # of several kinds, by what is wrong
                    raise SetupError(
                        f"no Ray cluster can be joined at {options.address!r} ({_first_line(error)}); `ray start "
                        "--head` begins one, and ray.address says where it is"
                    ) from error
                self._own = True
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._own:
                self._own = False
                ray.shutdown()


_cluster = _Cluster()


def _leave_after(joined: asyncio.Future[None]) -> None:
    if joined.exception() is None:
        _cluster.leave()


class Group:
    """One actor for each rank of *config*'s layout, each in a bundle of one placement group. Ray starts actors again
    that have died, on another node when theirs is lost.

    :ivar options: as the deployment has them. :ivar config: *config*, as its workers are to have it.
    :ivar host: address of this node, as the others know it. :ivar ending: what is killed now stays dead.
    """

    def __init__(self, config: WorkerConfig):
        self.config, self.options = config, config.deployment.ray
        self.host, self.ending = "", False
        self._ranks = ranks_of(config.deployment.placement)
        self._joined = False
        self._placed: PlacementGroup | None = None
        self._actors: list[Any] = []

    async def open(self, waits: Callable[[str], None]) -> None:
        """Join the cluster and place the actors. Raises SetupError, and then leaves nothing behind.

        :param waits: takes what is waited for.
        """
        try:
            await self._join()
            _keep_sigterm()
            self.host = ray.util.get_node_ip_address()
            gpus = self._gpus()
            bundle = self._bundle(gpus)
            self._placed = placement_group([bundle] * self._ranks, strategy=self.options.strategy)
            wanted = f"{counted(self._ranks, 'rank')} with {_said(bundle)} each ({self.options.strategy})"
            waits(f"waiting for Ray to place {wanted}")
            await self._placement(wanted)
            self.config = self._settled(gpus > 0)
            token = secrets.token_hex(4)
            self._actors = [self._actor(rank, bundle, token) for rank in range(self._ranks)]
        except BaseException:
            await self.close()
            raise

    async def _join(self) -> None:
        joining = asyncio.ensure_future(asyncio.to_thread(_cluster.join, self.options))
        try:
            await asyncio.shield(joining)
        except asyncio.CancelledError:  # the thread goes on
            joining.add_done_callback(_leave_after)
            raise
        self._joined = True

    async def close(self) -> None:
        """End the actors, give their places back, leave the cluster."""
        self.ending = True
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        if self._placed is not None:
            remove_placement_group(self._placed)
            self._placed = None
        if self._joined:
            self._joined = False
            await asyncio.to_thread(_cluster.leave)

    # --- what is asked for --------------------------------------------------------------------------------------------
    def _gpus(self) -> float:
        device = self.config.deployment.device
        if self.options.gpus is not None:
            return self.options.gpus
        if device == "cpu":
            return 0.0
        return 1.0 if device is not None or ray.cluster_resources().get("GPU", 0) else 0.0

    def _cpus(self) -> float:
        return self.options.cpus or float(self.config.deployment.engine.threads or 1)

    def _bundle(self, gpus: float) -> dict[str, float]:
        bundle = {"CPU": self._cpus(), **self.options.resources}
        if gpus:
            bundle["GPU"] = gpus
        if self.options.memory is not None:
            bundle["memory"] = float(self.options.memory)
        return bundle

    def _settled(self, on_gpus: bool) -> WorkerConfig:
        """The workers' configuration: the device that Ray gives them, and as many threads as they have CPUs."""
        deployment = self.config.deployment
        engine = deployment.engine.model_copy(
            update={"threads": deployment.engine.threads or max(1, int(self._cpus()))}
        )
        device = deployment.device or ("cuda" if on_gpus else "cpu")
        told = deployment.model_copy(update={"engine": engine, "device": device})
        return msgspec.structs.replace(self.config, deployment=told, own_device=True)

    async def _placement(self, wanted: str) -> None:
        assert self._placed is not None
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._placed.ready().future()), self.options.placement_timeout_s)
        except TimeoutError:
            raise SetupError(
                f"Ray could not place {wanted} within {self.options.placement_timeout_s:g} s (ray.placement_timeout_s);"
                f" free in the whole cluster: {_said(ray.available_resources()) or 'nothing'}"
            ) from None
        except RayError as error:
            raise SetupError(f"Ray could not place {wanted}: {_first_line(error)}") from error

    def _actor(self, rank: int, bundle: dict[str, float], token: str) -> Any:
        config, threads = self.config, self.config.deployment.engine.threads
        name = f"mstar:{config.key}:{config.replica}:{rank}"
        env = {**worker_environment(threads, {}), **self.options.env}
        kind = ray.remote(concurrency_groups={"watch": 1}, max_restarts=self.options.max_restarts, max_task_retries=0)(
            RayWorker
        )
        return kind.options(
            name=f"{name}:{token}",
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            memory=self.options.memory,
            resources=self.options.resources or None,
            runtime_env={"env_vars": env},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._placed, placement_group_bundle_index=rank),
        ).remote(name)

    # --- one actor ----------------------------------------------------------------------------------------------------
    async def where(self, rank: int, folder: str) -> Where:
        """Where the actor of *rank* is, once Ray has started it (again). Raises RayError: it will not."""
        while True:
            try:
                told: bytes = await self._watch(rank, "where", folder)
                return msgspec.json.decode(told, type=Where)
            except ActorDiedError:
                raise
            except ActorUnavailableError:  # it is on its way
                await asyncio.sleep(_ASK_AGAIN_S)

    async def age(self, rank: int) -> float:
        """Seconds that the step of *rank* has run. Raises RayError: it does not answer."""
        age: float = await self._watch(rank, "age")
        return age

    async def meet(self, rank: int) -> str:
        """Have *rank* keep a store for a mesh; its address. Raises RayError."""
        address: str = await self._watch(rank, "meet")
        return address

    async def run(self, rank: int, line: bytes) -> None:
        """Run a job on *rank* until its end. Raises RayError: it died."""
        await asyncio.wrap_future(self._actors[rank].run.remote(line).future())

    def _watch(self, rank: int, method: str, *arguments: Any) -> asyncio.Future[Any]:
        asked = getattr(self._actors[rank], method).options(concurrency_group="watch").remote(*arguments)
        return asyncio.wrap_future(asked.future())

    def kill(self, rank: int) -> None:
        """End the process of *rank*; Ray starts another unless all is ending."""
        with contextlib.suppress(RayError):  # it is dead already
            ray.kill(self._actors[rank], no_restart=self.ending)


def _keep_sigterm() -> None:
    """Ray's core has put a handler of its own before this process's: it calls that, and aborts the process three
    seconds later, in the middle of a drain. Take it away again, where that can be done."""
    if threading.current_thread() is threading.main_thread() and (ours := signal.getsignal(signal.SIGTERM)) is not None:
        signal.signal(signal.SIGTERM, ours)


def _said(resources: Mapping[str, float]) -> str:
    """*resources* in words, without those that Ray makes for its own use."""
    own = ("node:", "bundle_group_", "object_store_memory")
    told = [(name, n) for name, n in sorted(resources.items()) if not name.startswith(own) and "_group_" not in name]
    return ", ".join(f"{name} {n / 1e9:.1f} GB" if name == "memory" else f"{name} {n:g}" for name, n in told)


def _answers(address: str) -> None:
    """Ray waits for minutes for a head that does not answer, and then ends the process. Raises OSError."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

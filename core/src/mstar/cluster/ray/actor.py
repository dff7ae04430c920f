"""What runs in an actor: the loop of a worker process, with a socket to its executor, perhaps on another machine."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import ray
import zmq

import mstar
from mstar.cluster.base import WorkerConfig
from mstar.cluster.child import SocketChannel, work
from mstar.cluster.launch import Job, decode_job
from mstar.cluster.shm import Arena
from mstar.cluster.worker_loop import Pulse
from mstar.log_format import begin_logging
from mstar.settings import Settings
from mstar.weights.sources import SourceContext, resolve_weights

__all__ = ["APART", "TOGETHER", "RayWorker", "Where"]

TOGETHER, APART = "together", "apart"
"""Where a rank waits for rank 0: in a folder that both see; at a port of its node."""


_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Where an actor runs. *host*: address of its node. *sees*: the folder that was asked about is there. *version*: of
    its M*."""

    pid: int
    version: str
    node: str
    host: str
    sees: bool


class RayWorker:
    """One rank. Ray starts its process again when that has died; each start is then told what to run.

    Two threads call it: one :meth:`run`, one the rest, so that it answers while a step runs.
    """

    def __init__(self, name: str) -> None:
        _die_with_parent()
        self._name, self._pulse = name, Pulse()
        self._store: Any = None  # while its ranks live, they may look there

    def __repr__(self) -> str:  # what Ray puts before its lines of log
        return self._name

    def where(self, folder: str) -> bytes:
        """A :class:`Where` in JSON. *folder*: of shared memory on the executor's node."""
        found = Where(
            pid=os.getpid(),
            version=mstar.__version__,
            node=ray.get_runtime_context().get_node_id(),
            host=ray.util.get_node_ip_address(),
            sees=os.access(folder, os.R_OK | os.W_OK | os.X_OK),
        )
        return msgspec.json.encode(found)

    def age(self) -> float:
        """Seconds that the current step has run."""
        return self._pulse.age()

    def meet(self) -> str:
        """Keep a store for the ranks of a mesh to meet at. Returns its ``tcp://HOST:PORT``."""
        import torch.distributed as dist

        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return f"tcp://{_in_url(host)}:{self._store.port}"

    def run(self, line: bytes) -> None:
        """Run the worker of *line* (a :class:`~mstar.cluster.launch.Job` in JSON) until its executor ends it. A worker
        that fails ends its process: what it left on the device cannot be trusted."""
        job = decode_job(line, Job)
        begin_logging(job.log_level, job.log_form, job.config.key, job.config.place)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface(ray.util.get_node_ip_address()))
        arena: Arena | None = None
        if job.link == TOGETHER:
            arena = Arena.create()
            job = msgspec.structs.replace(job, link=str(arena.path))
        elif job.link == APART:
            job = msgspec.structs.replace(job, link=f"tcp://{_in_url(ray.util.get_node_ip_address())}")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            status = work(job, SocketChannel(context, job), self._pulse, _at_home)
        finally:
            context.destroy(linger=1000)
            if arena is not None:
                arena.remove()
        if status:
            os._exit(status)


def _die_with_parent() -> None:
    """Have the kernel end this process when Ray's on this node has ended. Ray's processes notice that by themselves,
    unless they are stopped, or stuck in a call of the device's driver: then they would stay, with their memory."""
    if sys.platform == "linux":
        parent = os.getppid()
        if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0 and os.getppid() != parent:
            os._exit(1)  # it has ended in between


def _at_home(config: WorkerConfig, registry: Any) -> WorkerConfig:
    """*config* with folders of this machine: the executor's where they are shared, else its own. Weights are fetched
    then."""
    settings = Settings.from_env(os.environ)
    if config.cache is not None and not Path(config.cache).is_dir():
        config = msgspec.structs.replace(config, cache=str(settings.cache))
    if config.weights is None or Path(config.weights).is_dir():
        return config
    spec = registry.model(config.key)
    found = resolve_weights(spec, config.deployment.weights, registry.weight_source, SourceContext.of(settings))
    return msgspec.structs.replace(config, weights=None if found is None else str(found))


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _interface(host: str) -> str:
    """The network interface that has the address *host*: gloo would look up the machine's name, which may lead
    elsewhere."""
    interfaces: dict[str, Any] = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(a.address == host for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)):
            return name
    return "lo"

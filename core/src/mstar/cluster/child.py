"""What runs in a worker process. Started by :func:`mstar.cluster.launch.launch`, never by hand."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import zmq

from mstar.cluster.base import Phase, WorkerConfig
from mstar.cluster.connection import encrypt_for, open_socket
from mstar.cluster.launch import BEAT, Job, Start, decode_job
from mstar.cluster.links import RankLink
from mstar.cluster.shm import Arena
from mstar.cluster.transport import (
    Codec,
    Command,
    LinkBroken,
    LinkEnd,
    LinkRank,
    PhaseReport,
    RankFacts,
    Report,
    UnlinkRank,
    WorkerFailed,
)
from mstar.cluster.worker_loop import Linked, Pulse, Steppable, run_worker
from mstar.collector import settle as settle_collector
from mstar.log_format import begin_logging
from mstar.registry import load_object
from mstar.spec.errors import FaultFound, PeerLost, SetupError
from mstar.spec.request import Cancel, Emit, Failed

if TYPE_CHECKING:
    from mstar.registry import Registry

__all__ = ["SocketChannel", "build_registry", "main", "work"]

_GOODBYE_S = 5.0
_log = logging.getLogger(__name__)


def build_registry(config: WorkerConfig) -> Registry:
    """The registry of a worker process: the same plugins as its parent's, the other settings from the environment (read
    here, at the process's edge)."""
    from dataclasses import replace

    from mstar.plugins import load_plugins
    from mstar.registry import Registry
    from mstar.settings import Settings

    settings = replace(
        Settings.from_env(os.environ),
        plugins=config.plugins,
        block_plugins=config.block_plugins,
        extra_plugins=config.extra_plugins,
        trace_plugins=config.trace_plugins,
    )
    return Registry(load_plugins(settings))


def main(line: bytes) -> NoReturn:
    """Run a worker as *line* (a :class:`~mstar.cluster.launch.Start` in JSON) says, then end the process."""
    start = decode_job(line, Start)
    os.set_inheritable(start.beats, False)
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group: the executor decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    begin_logging(start.log_level, start.log_form, start.config.key, start.config.place)
    pulse = Pulse()
    threading.Thread(target=_watch_parent, args=(start.folder,), name="parent-watch", daemon=True).start()
    threading.Thread(target=_beat, args=(start.beats, start.beat_s, pulse), name="heartbeat", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = SocketChannel(context, start)
    status = work(start, channel, pulse)
    context.destroy(linger=1000)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no interpreter shutdown: libraries' exit handlers may take seconds, and nothing needs them


def _as_it_is(config: WorkerConfig, registry: Any) -> WorkerConfig:
    del registry
    return config


def work(
    job: Job,
    channel: SocketChannel,
    pulse: Pulse,
    settle: Callable[[WorkerConfig, Any], WorkerConfig] = _as_it_is,
) -> int:
    """Build the worker and drive it until the end; returns the exit status.

    :param settle: makes the worker's configuration fit the machine that it runs on, given the registry.
    """
    name = job.config.name
    worker: Steppable | None = None
    try:
        registry: Any = load_object(job.registry_factory)(job.config)
        config = settle(job.config, registry)
        made: Any = load_object(job.worker_factory)(config, registry, channel.report_phase)
        worker = channel.worker = made
        if job.link is not None:
            made.answer, end = channel.await_rank_0(job.link)
            channel.send([RankFacts(at=end, facts=made.facts(job.link))])
        settle_collector()
        channel.report_phase(Phase(name="ready"))
        run_worker(worker, channel, pulse)
        worker.close()
        return 0
    except SetupError as error:
        channel.say_goodbye(WorkerFailed(message=str(error), setup=not isinstance(error, FaultFound)))
    except PeerLost as error:
        shown = error if _log.isEnabledFor(logging.DEBUG) else None  # it happened there and not here
        _log.warning("%s ends, to be started again: %s", name, error, exc_info=shown)
        channel.say_goodbye(WorkerFailed(message=f"{name} ended: {error}", peer=True))
    except Exception as error:
        did = "died" if worker is not None else "could not be built"
        _log.exception("%s %s", name, did)
        channel.say_goodbye(WorkerFailed(message=f"{name} {did}: {type(error).__name__}: {error}"))
    return 1


def _watch_parent(folder: str) -> None:
    """Standard input ends when the executor's process does, or when the executor has taken our goodbye: end too, and
    leave nothing in shared memory."""
    poller = select.poll()
    poller.register(0, 0)  # hang-up is always reported
    poller.poll()
    Arena(Path(folder)).remove()
    os._exit(1)


def _beat(fd: int, every_s: float, pulse: Pulse) -> None:
    pause = threading.Event()
    while True:
        try:
            os.write(fd, BEAT.pack(pulse.age()))
        except BrokenPipeError:
            return  # the executor has died: the other thread sees to it
        pause.wait(every_s)


class SocketChannel:
    """The worker's end of the socket that *job* tells of."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], job: Job):
        self.worker: Steppable | None = None
        self._codec: Codec[Command] = Codec(Command, None if job.folder is None else Arena(Path(job.folder)))
        self._socket = open_socket(context)
        if job.server_key:
            encrypt_for(self._socket, job.server_key)
        self._socket.connect(job.address)
        self._context = context
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._links: dict[int, RankLink] = {}

    def receive(self, timeout: float | None) -> Sequence[Any]:
        waits = timeout != 0 and all(link.fault is None for link in self._links.values())
        if waits and not self._poller.poll(None if timeout is None else int(timeout * 1000) + 1):
            return ()
        commands: list[Any] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            commands.extend(map(self._opened, self._codec.decode(frame)))
        for rank, link in self._links.items():
            commands.extend(link.take())
            if link.fault is not None:
                self._poller.unregister(link.socket)
                self.send([LinkBroken(rank=rank, message=link.fault)])
                link.fault = None
        return commands

    def _opened(self, command: Command) -> Any:
        """*command*, or what the worker is told instead once a link was opened or closed for it."""
        if not isinstance(command, LinkRank | UnlinkRank):
            return command
        before = self._links.pop(command.rank, None)
        if before is not None:
            if before.socket in self._poller:
                self._poller.unregister(before.socket)
            before.close()
        if isinstance(command, UnlinkRank):
            return command
        link = RankLink.to(self._context, command.at)
        self._add_link(command.rank, link)
        return Linked(command.rank, link, command.facts)

    def await_rank_0(self, place: str) -> tuple[Any, LinkEnd]:
        """Open this rank's end of its link at *place*. Returns what sends to rank 0, and where that finds it."""
        link, end = RankLink.at(self._context, place)
        self._add_link(0, link)
        return link.send, end

    def _add_link(self, rank: int, link: RankLink) -> None:
        self._links[rank] = link
        self._poller.register(link.socket, zmq.POLLIN)

    def send(self, reports: list[Report]) -> None:
        try:
            self._socket.send(self._codec.encode(reports))
        except TypeError:
            for report in reports:
                self._socket.send(self._encode_or_fail(report))

    def _encode_or_fail(self, report: Report) -> bytes:
        """One report as a frame of its own; an emission that cannot travel fails its request, and no other."""
        try:
            return self._codec.encode([report])
        except TypeError as error:
            if self.worker is None or not isinstance(report, Emit):
                raise
            _log.error("request %s: stream %r: %s", report.id, report.stream, error)
            self.worker.cancel(Cancel(id=report.id))
            return self._codec.encode([Failed(id=report.id, message=f"stream {report.stream!r}: {error}")])

    def report_phase(self, phase: Phase) -> None:
        self.send([PhaseReport(phase=phase)])

    def say_goodbye(self, report: WorkerFailed) -> None:
        """Send *report*, then wait to be dismissed: a process that ends at once may take its last message with it."""
        self.send([report])
        threading.Event().wait(_GOODBYE_S)  # the dismissal ends the process, in the other thread

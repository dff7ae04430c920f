"""Drives all ranks of a layout by hand, in one process: for tests of models and of the core, without sockets or clocks.

Messages between ranks pass through the codec, as between processes. Who does something next is drawn at random, by a
seed: so that an order that happens once a week happens in a test.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mstar.cluster.base import WorkerConfig
from mstar.cluster.transport import Codec
from mstar.registry import Registry
from mstar.runtime.deployment_files import packaged_deployment, packaged_layout
from mstar.spec.deployment import merge_deployment
from mstar.spec.errors import SetupError
from mstar.testing.drive import Driver, RestlessError
from mstar.worker.follower import Follower
from mstar.worker.messages import FromRank, ToRank

__all__ = ["RankDriver"]

_PATIENCE_S = 60.0


class _Wire:
    """Both ends of the way between rank 0 and a follower, in this process."""

    def __init__(self, follower: Follower):
        self.follower = follower
        self.fault: str | None = None
        self._to: Codec[ToRank] = Codec(ToRank)
        self._back: Codec[FromRank] = Codec(FromRank)
        self.answers: deque[bytes] = deque()
        self.sent = 0
        follower.answer = self._answer

    def send(self, messages: list[ToRank]) -> None:
        self.sent += 1
        for message in self._to.decode(self._to.encode(messages)):
            self.follower.take(message)

    def _answer(self, answers: list[FromRank]) -> None:
        self.answers.append(self._back.encode(answers))

    def take(self) -> list[FromRank]:
        return self._back.decode(self.answers.popleft())

    def receive(self, timeout: float) -> Sequence[FromRank]:
        while not self.answers and self.follower.step():
            pass
        return self.take() if self.answers else ()


class RankDriver(Driver):
    """A :class:`~mstar.testing.drive.Driver` over several ranks of one process. Meshes of several ranks need processes
    of their own, so each node has one rank here.

    :param seed: of the order in which ranks get to run.
    """

    def __init__(
        self, model: Any, registry: Registry | None = None, weights: Path | None = None, seed: int = 0, **overrides: Any
    ):
        super().__init__(model, registry, weights, **overrides)
        self._random, self._pause = random.Random(seed), threading.Event()
        deployment = merge_deployment(
            self.spec.key,
            packaged_deployment(self.spec),
            packaged_layout(self.spec, overrides.get("layout")),
            overrides,
        )
        folder = None if weights is None else str(weights)
        self._config = WorkerConfig(key=self.spec.key, weights=folder, deployment=deployment)
        if self.worker.ranks is None:
            raise SetupError(f"the layout of {self.spec.key!r} has one rank: use Driver")
        self.wires: dict[int, _Wire] = {}
        for rank in range(1, self.worker.ranks.layout.ranks):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start *rank*, for the first time or again."""
        wire = self.wires[rank] = _Wire(Follower(_for_rank(self._config, rank), self.registry))
        with tempfile.TemporaryDirectory(prefix="mstar-meeting-") as place:
            self.worker.link(rank, wire, wire.follower.facts(place))
            self._open_channel(rank)

    def _open_channel(self, rank: int) -> None:
        """Let the two ends of the way for tensors find each other, which they do in threads."""
        assert self.worker.ranks is not None
        channel, wire = self.worker.ranks.channel(rank), self.wires[rank]
        assert channel is not None
        until = time.monotonic() + _PATIENCE_S
        while channel.backend is not None and channel.way == "shm" and not channel.closed:
            self.worker.ranks.look()
            self.worker.ranks.flush()
            wire.follower.step()
            for message in wire.receive(0.0):
                self.worker.take(message)
            if time.monotonic() > until:
                raise RestlessError(f"rank 0 and rank {rank} did not meet within {_PATIENCE_S:.0f} s")
        self.worker.ranks.flush()

    def kill(self, rank: int, reason: str = "killed") -> None:
        """*rank* dies, with all that is on its way."""
        self.wires.pop(rank).follower.close()
        self.worker.unlink(rank, reason)

    def run(self, until: Callable[[], bool] = lambda: False, most: int = 100_000) -> None:
        """Let ranks step in random order until none has anything to do, or *until* holds."""
        idle: set[int] = set()
        for _ in range(most):
            rank, sent = self._random.choice([0, *self.wires]), self._sent()
            if self._turn(rank) or self._sent() > sent:
                idle.clear()
            else:
                idle.add(rank)
            self.take()
            if until():
                return
            if len(idle) == 1 + len(self.wires) and not self.worker.scheduler.waiting:
                if self._busy():
                    idle.clear()
                    self._pause.wait(0.0002)  # a thread carries it
                    continue
                return
        raise RestlessError(f"the ranks did not come to rest in {most} turns")

    def _busy(self) -> bool:
        """Whether a tensor is on its way."""
        assert self.worker.ranks is not None
        return self.worker.ranks.busy or any(wire.follower.channel.busy for wire in self.wires.values())

    def _sent(self) -> int:
        """Messages that rank 0 has sent so far."""
        return sum(wire.sent for wire in self.wires.values())

    def _turn(self, rank: int) -> bool:
        if rank == 0:
            return self.worker.step()
        wire = self.wires[rank]
        if wire.answers and self._random.random() < 0.5:
            for message in wire.take():
                self.worker.take(message)
            return True
        return wire.follower.step() or bool(wire.answers)

    def assert_empty(self) -> None:
        """Every pool of every rank is empty, its books balance, and no value is kept."""
        super().assert_empty()
        self.worker.events()
        for wire in self.wires.values():
            while wire.follower.step() or wire.follower.channel.busy:
                pass
            status = wire.follower.status()
            assert not any(pool["used"] for pool in status["resources"].values()), status
            assert (status["requests"], status["values"], status["on_the_way"]) == (0, 0, 0), status
            for resource in wire.follower.resources.values():
                resource.check([])


def _for_rank(config: WorkerConfig, rank: int) -> WorkerConfig:
    """*config* for another rank."""
    return msgspec.structs.replace(config, rank=rank)

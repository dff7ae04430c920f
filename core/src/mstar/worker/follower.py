"""A rank other than 0: it runs the steps that rank 0 decides, on nodes and pools of its own.

It knows no walks, queues or clients. Its messages come in one order, and it does everything in that order: so pools of
several ranks that get the same messages hold the same books.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mstar.cluster.base import Phase, WorkerConfig
from mstar.engine.device import raise_if_lost
from mstar.engine.step import Work
from mstar.registry import Registry
from mstar.resources.base import IntegrityError, Owner, Resource
from mstar.resources.base import Row as ResourceRow
from mstar.spec.errors import PeerLost
from mstar.spec.request import EngineRequest, Event
from mstar.worker.aside import Aside
from mstar.worker.build import build
from mstar.worker.equip import equip, warm_up
from mstar.worker.follower_steps import AHEAD, FollowerSteps, RankRequest
from mstar.worker.handles import pack
from mstar.worker.lanes import lane_store
from mstar.worker.live import failure
from mstar.worker.messages import (
    Agreed,
    Close,
    Drop,
    Export,
    Exported,
    Fetch,
    Fetched,
    Found,
    FromRank,
    Import,
    Learn,
    Match,
    Meet,
    Met,
    Missed,
    Open,
    Refused,
    Rewind,
    Run,
    Seek,
    Skip,
    ToRank,
    UseLanes,
)
from mstar.worker.moves import Leaving, adopt
from mstar.worker.portions import Portions
from mstar.worker.profile import device_memory
from mstar.worker.prompt_heads import skip_known
from mstar.worker.routing import Routing
from mstar.worker.tensor_channel import TensorChannel, arrived, way_between

__all__ = ["Follower"]

log = logging.getLogger(__name__)


class Follower:
    """One rank's share of a model. Driven as a worker is (:class:`mstar.cluster.worker_loop.Steppable`).

    :ivar answer: takes what goes to rank 0; set by whoever carries the messages.
    """

    def __init__(self, config: WorkerConfig, registry: Registry, on_phase: Callable[[Phase], None] = lambda _: None):
        built = build(config, registry, on_phase)
        self.config, self.rank = config, config.rank
        self.plan, self.resources, self._device = built.plan, built.resources, built.device
        self.routing = Routing(built.plan, built.layout)
        self._kept = frozenset(built.plan.graph.sessions)
        self.engine = equip(built, config, registry, self._owner)
        warm_up(self.engine, built, config, on_phase)
        self.channel = TensorChannel(1, built.device)
        self._store: Any = None  # where rank 0 is met for it
        self._local = True
        self.answer: Callable[[list[FromRank]], None] = lambda answers: None
        self._inbox: deque[ToRank] = deque()
        self._requests: dict[str, RankRequest] = {}
        self._leaving: deque[tuple[int, Leaving]] = deque()  # state that goes to other ranks, by the numbers of moves
        self._aside = Aside(built.device)
        self._steps = FollowerSteps(
            self.rank,
            self.routing,
            self.engine,
            self._requests,
            Portions(self.resources, self._owner_of),
            self.channel,
            built.device,
            config.deployment.scheduler.step_tokens(built.device.type),
            self._send,
            self._aside.mark,
        )

    def facts(self, place: str | None = None) -> dict[str, Any]:
        """What rank 0 must know of this one. *place*: a folder that both see, or ``tcp://HOST`` of this one, where they
        may meet to exchange tensors."""
        kind, deployment = self._device.type, self.config.deployment
        beside = deployment.gpu_of(self.rank, self.config.replica) == deployment.gpu_of(0, self.config.replica)
        if place is not None and way_between(deployment.engine.values, kind, kind, beside)[0] != "shm":
            self._store, place = lane_store(place, first=True)
            self._local = not place.startswith("tcp://")
        return {
            "capacities": {name: resource.capacity() for name, resource in self.resources.items()},
            "device": kind,
            "beside_rank_0": beside,
            "place": place,
        }

    # --- driven -------------------------------------------------------------------------------------------------------
    def take(self, message: ToRank) -> None:
        self._inbox.append(self.channel.resolve(message))

    def step(self) -> bool:
        """Do what the first message says, or answer the earliest step. ``False`` when there is nothing to do yet."""
        if self._steps.doubts and not self._inbox and time.monotonic() > min(self._steps.doubts.values()):
            raise IntegrityError(f"a step failed on rank {self.rank}, and not on the others of its mesh")
        self._look()
        steps, room = self._steps, self.channel.has_room
        if self._leaving and room and self._leaving[0][1].there():
            move, leaving = self._leaving.popleft()
            with self._aside.behind():
                self._send([Exported(rank=self.rank, move=move, held=leaving.held())])
            return True
        ready = bool(self._inbox) and arrived(self._inbox[0], on_host=False)
        if ready and (len(steps.flights) < AHEAD or not isinstance(self._inbox[0], Run)):
            self._do(self._inbox.popleft())
            return True
        if not room:
            return False
        if steps.flights and steps.arrived():
            steps.land()
            return True
        # the device is about to be done, and what is asked meanwhile does not wait for it
        return bool(self._leaving) or (bool(steps.flights) and (ready or steps.awaited()))

    def _look(self) -> None:
        """See what has passed by the channel."""
        if self.channel.opening and (fault := self.channel.opened()) is not None:
            self._send([Met(rank=self.rank, fault=fault)])
        self.channel.step()
        if self.channel.fault is not None:
            raise PeerLost(f"it cannot exchange tensors with rank 0 ({self.channel.fault})")

    def _send(self, answers: list[FromRank]) -> None:
        self.answer(self.channel.launch(answers))

    def _do(self, message: ToRank) -> None:
        match message:
            case Run():
                self._steps.run(message)
            case Open():
                self._open(message)
            case Meet():
                self.channel.begin(message.backend, lambda: self._store, self._local)
            case UseLanes():
                self.channel.use() if message.open else self.channel.close()
            case Agreed():
                self._steps.doubts.pop(message.step, None)
            case Close():
                self._close(message)
            case Export():
                self._export(message)
            case Seek():
                self._seek(message)
            case Import():
                self._import(message)
            case Drop():
                for key in message.keys:
                    self._steps.values.pop(key, None)  # a step that failed has made nothing
            case Fetch():
                while self._steps.flights:
                    self._steps.land()
                self._send(
                    [Fetched(rank=self.rank, contents=pack(message.key, self._steps.values[message.key].tensor))]
                )
            case Rewind() | Learn() | Match() | Missed() | Skip():
                self._mirror(message, self.resources[message.resource], Owner(*message.owner))
                self._changed(message.owner[0])

    def _mirror(self, message: Rewind | Learn | Match | Missed | Skip, pool: Resource, owner: Owner) -> None:
        """Do to *pool* what rank 0, which computes with this one, has done to its own."""
        match message:
            case Rewind():
                pool.retract(ResourceRow(owner, message.tokens, message.complete))
            case Learn():
                pool.learn(owner, message.ids)
            case Match():
                pool.match(owner, message.ids, None if message.sibling is None else Owner(*message.sibling))
            case Missed():
                pool.missed(owner, message.tokens)
            case Skip():
                pool.skip(owner, message.ids, None if message.sibling is None else Owner(*message.sibling))

    def _changed(self, request: str) -> None:
        """Beside a step something was done to *request*'s state, on the device perhaps: it leaves after that."""
        if self.routing.layout.by_walk and (known := self._requests.get(request)) is not None:
            known.mark = self._aside.mark()

    # --- requests -----------------------------------------------------------------------------------------------------
    def _open(self, message: Open) -> None:
        request = message.request
        self._requests.setdefault(request.id, RankRequest(request))
        try:
            for name, key, context, units in message.needs:
                owner = Owner(key, context)
                self._reserve(name, owner, units)
                self.resources[name].open(owner, request)
            for name, key, context, units in message.later:
                self._reserve(name, Owner(key, context), units)
        except IntegrityError:
            raise  # the books of two ranks differ: nothing here can be trusted
        except Exception as error:
            self._refuse(request.id, error, "begun")

    def _reserve(self, name: str, owner: Owner, units: int) -> None:
        if not self.resources[name].reserve(owner, units):
            raise IntegrityError(f"rank {self.rank} has no {units} units of {name!r} left, which rank 0 promised")

    def _export(self, message: Export) -> None:
        try:
            owners = [(name, Owner(key, context)) for name, key, context in message.owners]
            known, own = self._requests.get(message.request), all(owner.key == message.request for _, owner in owners)
            mark = known.mark if known is not None and own else None  # a session's state has marks of several
            with self._aside.behind(mark or self._aside.mark()):
                self._leaving.append((message.move, Leaving(self.resources, owners, self.channel)))
        except Exception as error:
            self._refuse(message.request, error, "handed over")

    def _import(self, message: Import) -> None:
        try:
            adopt(self.resources, self._requests[message.request].request, message.held, self._device)
            self._changed(message.request)
        except Exception as error:
            self._refuse(message.request, error, "taken over")

    def _seek(self, message: Seek) -> None:
        op = self.routing.ops[message.op]
        context, shares = op.call.context, []
        for name in op.entry.resources:
            key = message.session if message.session is not None and name in self._kept else message.request
            sibling = None if message.sibling is None else Owner(message.sibling, context)
            shares.append((self.resources[name], Owner(key, context), sibling))
        found = skip_known(shares, message.ids)
        self._changed(message.request)
        seat = self.routing.layout.seat_of(op.call.node, self.rank)
        if seat is not None and seat.ranks[0] == self.rank:
            left = len(message.ids) - found.tokens
            cuts = sorted({found.tokens + cut for pool, owner, _ in shares for cut in pool.cuts(owner, left)})
            self._send([Found(number=message.number, asked=found.asked, tokens=found.tokens, cuts=cuts)])

    def _refuse(self, request: str, error: Exception, done: str) -> None:
        raise_if_lost(error)
        log.exception("the state of request %r could not be %s", request, done)
        self._send([Refused(rank=self.rank, failed=failure(request, error))])

    def _close(self, message: Close) -> None:
        self._requests.pop(message.request, None)
        for name, key, context in message.owners:
            self.resources[name].close(Owner(key, context))

    def _owner(self, work: Work, resource: str) -> Owner:
        return self._owner_of(work.call, resource)

    def _owner_of(self, call: Any, resource: str) -> Owner:
        key = call.session if call.session is not None and resource in self._kept else call.run.request.id
        return Owner(key, call.op.call.context)

    # --- what a worker has besides ------------------------------------------------------------------------------------
    def submit(self, request: EngineRequest) -> None:
        raise IntegrityError(f"request {request.id!r} came to rank {self.rank}; rank 0 takes requests")

    push = cancel = submit

    def ack(self, request: str, stream: str, items: int) -> None:
        raise IntegrityError("rank 0 takes acknowledgements")

    def next_deadline(self) -> float | None:
        if self._steps.flights or self._leaving or self.channel.busy:
            return time.monotonic()  # it is looked at again soon, or at once when the next step comes
        return min(self._steps.doubts.values(), default=None)

    def events(self) -> list[Event]:
        return []

    def status(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "steps": self.engine.steps,
            "engine": self.engine.runner.status(),
            "resources": {name: resource.usage()._asdict() for name, resource in self.resources.items()},
            "requests": len(self._requests),
            "values": len(self._steps.values),
            "on_the_way": self.channel.on_the_way,
            "memory": dict(device_memory(self._device)),
        }

    def close(self) -> None:
        self.channel.close()
        self._store = None
        self._inbox.clear()
        self._steps.clear()
        self._leaving.clear()
        self._requests.clear()

"""One served model: tasks in, answers out."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mstar.cluster.base import Executor, Phase, WorkerConfig
from mstar.runtime.answer import Acks, Answer, request_error
from mstar.runtime.family import family_code
from mstar.runtime.hold import Hold
from mstar.runtime.opening import Say, find_model, prepare_config
from mstar.runtime.processors import load_processor
from mstar.runtime.watch import Watched, Watcher
from mstar.spec.canvas import Canvas
from mstar.spec.errors import NotReady, RequestError, SetupError, TooBusy
from mstar.spec.model import ModelSpec, check_wanted
from mstar.spec.placement import ranks_of
from mstar.spec.processor import Prepared, Processor, Renderer
from mstar.spec.request import Cancel, Done, Emit, Event, Failed, Push
from mstar.spec.tasks import Task

if TYPE_CHECKING:
    from mstar.registry import Registry
    from mstar.settings import Settings

__all__ = ["Service", "open_service"]

T = TypeVar("T")

_log = logging.getLogger(__name__)
_Take = Callable[[str, Any, str, bool], Push]
_ENDS = (Done, Failed)
_LATE_S = 1.0
"""How long the worker, which ends a request at its deadline, may be late before the request is ended without it."""


class Service:
    """One model, its processor and its worker. All methods are called on one event loop.

    :param config: for the worker. :param executor_name: an executor registered through ``mstar_executors``; default:
        the deployment's.
    :ivar limits: what the operator set, for listings.
    :ivar watcher: told of every request from now on; ``None``: nobody is.
    """

    def __init__(self, spec: ModelSpec, config: WorkerConfig, registry: Registry, executor_name: str | None = None):
        deployment = config.deployment
        self.spec, self.config = spec, config
        self.watcher: Watcher | None = None
        self.limits: Mapping[str, Any] = {
            "max_concurrent_requests": deployment.max_concurrent_requests,
            "max_queue": deployment.scheduler.max_queue,
            "max_sessions": deployment.max_sessions,
            "request_timeout_s": deployment.request_timeout_s,
        }
        self._capacity = deployment.max_concurrent_requests + deployment.scheduler.max_queue
        make_executor: Callable[..., Executor] = registry.executor(executor_name or deployment.executor)
        self._executor = make_executor(config, self._sink, self._on_phase, registry)
        self._phase = self._executor.phase
        self._draining = self._stopped = self._broken = False
        self._processor: Processor | None = None
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix=f"mstar-{spec.key}")
        self._answers: weakref.WeakValueDictionary[str, Answer] = weakref.WeakValueDictionary()
        self._open: set[str] = set()  # ids of requests that are being prepared or running
        self._holds: dict[Hold, None] = {}
        self._limits: dict[str, tuple[float, asyncio.TimerHandle]] = {}  # of requests that have a time limit
        self._watched: dict[str, Watched] = {}  # until the worker is done with them
        self._idle = asyncio.Event()
        self._idle.set()

    # --- life --------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where the model stands; ``ready`` only when worker and processor both are."""
        if self._phase.name != "ready":
            return self._phase
        if self._draining:
            return Phase(name="draining", detail=f"{self.open_requests} request(s) still running")
        if self._processor is None:
            return Phase(name="starting", detail="loading the processor")
        return self._phase

    @property
    def processor(self) -> Processor:
        """The model's processor; raises :class:`NotReady` before it is loaded."""
        if self._processor is None:
            raise NotReady(f"the model {self.spec.key!r} is not ready: {self.phase.name}")
        return self._processor

    @property
    def canvas(self) -> Canvas | None:
        """Which pictures and videos are made: what the processor says, before it is loaded what the spec says."""
        return self.spec.canvas if self._processor is None else self._processor.canvas

    @property
    def open_requests(self) -> int:
        """Requests that are being prepared, waiting or running, and holds between two of theirs."""
        return len(self._open) + sum(hold.ids.isdisjoint(self._open) for hold in self._holds)

    async def start(self) -> None:
        """Load processor and worker, side by side if the worker is another process; returns when both are ready.

        :raises SetupError: one of them cannot be loaded.
        """
        loop = asyncio.get_running_loop()
        self._acks = Acks(self._executor, loop)
        steps = [self._in_thread(self._load_processor), self._executor.start()]
        tasks = [loop.create_task(step) for step in ([_in_turn(steps)] if self._executor.in_process else steps)]
        try:
            await asyncio.gather(*tasks)
        except BaseException as error:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self.stop()
            if isinstance(error, SetupError):
                self._phase = Phase(name="failed", detail=str(error))
            raise

    async def stop(self) -> None:
        """End at once. Answers that still run raise :class:`NotReady` with code ``shutting_down``."""
        self._stopped = True
        await self._executor.stop()
        self._threads.shutdown(wait=False)

    def join(self) -> None:
        """After :meth:`stop`: wait until the threads have ended too, with what a processor is doing in them."""
        self._threads.shutdown()

    async def drain(self, seconds: float) -> bool:
        """Take no new requests and wait for the running ones, at most *seconds*. Returns whether all have ended."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def status(self) -> Mapping[str, Any]:
        """The worker's pools, queue and steps, as plain data; empty while it does not run."""
        return await self._executor.status()

    def _load_processor(self) -> None:
        config = self.config
        weights = Path(config.weights) if config.weights is not None else None
        self._processor = load_processor(self.spec, config.deployment, weights, warm=not self._executor.in_process)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, task: Task, request_id: str | None = None, sibling_of: str | None = None) -> Answer:
        """Prepare *task* and hand it to the worker.

        :param request_id: must not be in use. Default: a random one.
        :param sibling_of: id of a running request with the very same prompt, whose prompt state is shared.
        :raises RequestError: the task is not valid (from the processor), it wants what the model does not make, or the
            id is in use.
        :raises NotReady: the model is loading, draining, or has failed. :raises TooBusy: the queue is full.

        A request that has taken longer than *task* or the deployment allows ends with status 504 and code ``timeout``,
        also when the worker hangs.
        """
        return await self._begin(task, request_id or uuid.uuid4().hex, sibling_of, None)

    def hold(self) -> Hold:
        """A place for requests that follow one another. Close it when the last one has ended.

        :raises NotReady: as :meth:`generate`.
        """
        self._check_ready(None)
        hold = Hold(self.spec, self.limits, self._begin, self._let_go)
        self._holds[hold] = None
        self._idle.clear()
        return hold

    def _let_go(self, hold: Hold) -> None:
        self._holds.pop(hold, None)
        self._note_idle()

    async def _begin(self, task: Task, request_id: str, sibling_of: str | None, hold: Hold | None) -> Answer:
        check_wanted(self.spec, task.want)
        if self.watcher is None:
            return await self._generate(task, request_id, sibling_of, hold, None)
        watched = Watched(self.watcher.begin(self.spec, task, request_id))
        try:
            return await self._generate(task, request_id, sibling_of, hold, watched)
        except BaseException as error:
            watched.refused(error)
            raise

    async def _generate(
        self, task: Task, request_id: str, sibling_of: str | None, hold: Hold | None, watched: Watched | None
    ) -> Answer:
        self._check_open(request_id, hold)
        self._open.add(request_id)
        self._idle.clear()
        if hold is not None:
            hold.ids &= self._open
            hold.ids.add(request_id)
        try:
            deadline = self._limit(task, request_id)
            prepared, renderer = await self._in_thread(self._prepare, task, request_id, sibling_of)
            self._check_ready(hold)
            if deadline is not None:
                prepared.request.timeout = deadline - time.monotonic()
                if prepared.request.timeout <= 0:
                    raise request_error(self._timed_out(request_id))
            if watched is not None:
                watched.watch.prepared(prepared.request)
                self._watched[request_id] = watched
            answer = Answer(
                self.spec,
                task,
                prepared,
                renderer,
                self._executor,
                self._acks,
                functools.partial(self._prepare_push, (prepared.intake or self.processor).push),
                watched,
            )
            self._answers[request_id] = answer
            self._executor.submit(prepared.request)
        except BaseException:
            self._forget(request_id)
            raise
        return answer

    def _check_open(self, request_id: str, hold: Hold | None) -> None:
        self._check_ready(hold)
        if request_id in self._open:
            message = f"request id {request_id!r} is in use"
            raise RequestError(message, param="id", code="duplicate_id", status=409)
        if len(self._open) >= self._capacity:
            raise TooBusy(f"{len(self._open)} requests are running or waiting, which is the limit; try again later")

    def _check_ready(self, hold: Hold | None) -> None:
        phase = self.phase
        if phase.name != "ready" and not (phase.name == "draining" and hold in self._holds):
            detail = f" ({phase.detail})" if phase.detail else ""
            raise NotReady(f"the model {self.spec.key!r} is not ready: {phase.name}{detail}")

    def _prepare(self, task: Task, request_id: str, sibling_of: str | None) -> tuple[Prepared, Renderer]:
        """In a thread."""
        with family_code(f"{self.spec.key!r} could not prepare a request", self.spec.processor):
            if (canvas := self.processor.canvas) is not None:
                canvas.check(task)
            prepared = self.processor.prepare(task, request_id)
            request = prepared.request
            request.id, request.sibling_of = request_id, sibling_of
            # not left to families: tenants must not see each other's state
            request.tenant, request.cache_salt = task.tenant, request.cache_salt or task.tenant
            return prepared, self.processor.renderer(task, prepared)

    async def _prepare_push(self, push: _Take, stream: str, part: Any, request_id: str, end: bool) -> Push:
        return await self._in_thread(self._make_push, push, stream, part, request_id, end)

    def _make_push(self, push: _Take, stream: str, part: Any, request_id: str, end: bool) -> Push:
        """In a thread."""
        with family_code(f"{self.spec.key!r} could not take what a client sent", self.spec.processor):
            return push(stream, part, request_id, end)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._stopped:
            raise NotReady(f"the model {self.spec.key!r} has been stopped")
        run = contextvars.copy_context().run  # what is logged there belongs to this request
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, run, _no_stop_iteration, function, *arguments)

    # --- time limits ----------------------------------------------------------------------------------------------

    def _limit(self, task: Task, request_id: str) -> float | None:
        """Begin the time that *task* may take; returns its end in monotonic seconds."""
        limits = (task.timeout, self.config.deployment.request_timeout_s)
        seconds = min((limit for limit in limits if limit is not None), default=None)
        if seconds is None:
            return None
        timer = asyncio.get_running_loop().call_later(seconds + _LATE_S, self._overdue, request_id)
        self._limits[request_id] = (seconds, timer)
        return time.monotonic() + seconds

    def _timed_out(self, request_id: str) -> Failed:
        message = f"the request took longer than {self._limits[request_id][0]:.3g} s"
        return Failed(id=request_id, message=message, code="timeout", status=504)

    def _overdue(self, request_id: str) -> None:
        """The worker has not ended the request in time: it is in a long step, or hangs. The client need not wait; the
        request stays open here until the worker has ended it or is dead."""
        answer = self._answers.get(request_id)
        if answer is not None and not answer.ended:
            answer.deliver(self._timed_out(request_id))
            self._executor.cancel(Cancel(id=request_id))

    # --- from the executor -------------------------------------------------------------------------------------------

    def _sink(self, events: Sequence[Event]) -> None:
        answers = self._answers
        for event in events:
            answer = answers.get(event.id)
            if type(event) is Emit:  # nearly all are
                if answer is not None:
                    answer.deliver(event)
                continue
            if isinstance(event, Failed) and event.code == "timeout" and event.id in self._limits:
                event = self._timed_out(event.id)  # with the whole time, preparation included
            if answer is not None:
                answer.deliver(event)
            if isinstance(event, _ENDS):
                if (watched := self._watched.get(event.id)) is not None:
                    watched.worker_ended(event)
                self._forget(event.id)

    def _forget(self, request_id: str) -> None:
        self._open.discard(request_id)
        self._watched.pop(request_id, None)
        if (limit := self._limits.pop(request_id, None)) is not None:
            limit[1].cancel()
        self._note_idle()

    def _note_idle(self) -> None:
        if not (self._open or self._holds):
            self._idle.set()

    def _on_phase(self, phase: Phase) -> None:
        self._phase = phase
        if phase.name == "failed" or (
            phase.name == "ready" and phase.detail
        ):  # other ranks serve in a lost one's place
            self._broken = True
        elif phase.name == "ready" and self._broken:
            self._broken = False
            _log.info("%r is whole again", self.spec.key)


async def _in_turn(steps: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Not side by side: both import large libraries, and in CPython 3.11 two threads that build syntax trees at a time
    (as torch's and numba's compilers do) may fail with "AST constructor recursion depth mismatch"."""
    rest = list(steps)
    try:
        while rest:
            await rest.pop(0)
    finally:
        for step in rest:
            step.close()


def _no_stop_iteration(function: Callable[..., T], *arguments: Any) -> T:
    """Call *function*. A bare ``next()`` in a processor may raise StopIteration, which no future can carry: whoever
    awaited it would wait for ever."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError(f"{function.__qualname__} raised StopIteration") from error


def open_service(
    key: str,
    settings: Settings,
    overrides: Mapping[str, Any],
    registry: Registry,
    *,
    config: str | Path | None = None,
    say: Say | None = None,
    inline: bool = False,
) -> Service:
    """The service for model *key*, not yet started: its deployment merged, its weights fetched if need be.

    :param overrides: deployment fields that win over the file's; ``None`` values do not count.
    :param config: a deployment file (YAML), which wins over the family's defaults.
    :param say: takes sentences for the operator; default: standard error.
    :param inline: run in this process, if nobody names an executor and one process is enough.
    :raises SetupError: the key, the file or the weights are not as they must be.
    """
    spec = find_model(key, registry, config)
    worker = prepare_config(spec, settings, overrides, registry, config=config, say=say)
    alone = ranks_of(worker.deployment.placement) * worker.deployment.replicas == 1
    chosen = "inline" if inline and alone and "executor" not in worker.places else None
    return Service(spec, worker, registry, chosen)

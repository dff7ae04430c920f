"""Models that are loaded when they are first asked for, and unloaded when nobody uses them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from mstar.cluster.base import Phase
from mstar.runtime.watch import Watcher
from mstar.spec.canvas import Canvas
from mstar.spec.errors import MstarError, NotReady, RequestError, TooBusy
from mstar.spec.model import ModelSpec
from mstar.spec.origin import describe
from mstar.spec.processor import Processor, Voice
from mstar.spec.tasks import Task
from mstar_server.openai.speakers import model_voices
from mstar_server.options import ServerOptions
from mstar_server.protocols import Answer, Generates, Hold, Service

__all__ = ["OnDemand", "Shelf", "model_state", "not_ready"]

log = logging.getLogger("mstar.server")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""After a load that failed, how long requests are refused with its cause before the next one tries again; doubled with
every failure in a row."""

STATUS_TIMEOUT_S = 5.0


def not_ready(key: str, phase: Phase) -> NotReady:
    """The error for a request to model *key* in *phase*."""
    progress = "" if phase.progress is None else f" ({phase.progress:.0%})"
    detail = f", {phase.detail}" if phase.detail else ""
    return NotReady(f"the model {key!r} is not ready: {phase.name}{progress}{detail}")


def model_state(service: Service) -> str:
    """``loaded``, ``unloaded``, ``loading`` or ``failed``, for listings."""
    match service.phase.name:
        case "ready" | "draining":
            return "loaded"
        case "unloaded" | "failed" as name:
            return name
        case "stopped" | "unloading":
            return "unloaded"
        case _:
            return "loading"


def _nothing() -> None:
    """For a model of which nothing is known before it is loaded."""


class Shelf:
    """The models of a server that are loaded on demand, and the limit that they share."""

    def __init__(self, options: ServerOptions):
        self.options = options
        self._models: list[OnDemand] = []
        self._lock = asyncio.Lock()

    def add(
        self, spec: ModelSpec, make: Callable[[], Service], peek: Callable[[], Processor | None] = _nothing
    ) -> OnDemand:
        """One more model. *make* opens it (weights may be fetched) and is called once for each load; *peek* makes its
        processor alone, where that takes no fetching. Both are called in a thread."""
        model = OnDemand(spec, make, self, peek)
        self._models.append(model)
        return model

    async def make_room(self, model: OnDemand) -> None:
        """Unload what nobody uses, the one used longest ago first, until *model* may be loaded. Raises
        :class:`TooBusy` when all are in use."""
        most = self.options.max_loaded
        async with self._lock:
            while (
                most is not None and len(others := [m for m in self._models if m.occupies and m is not model]) >= most
            ):
                for other in sorted(others, key=lambda m: m.last_used):
                    if await other.unload_if_idle():
                        break
                else:
                    names = ", ".join(other.spec.key for other in others)
                    error = TooBusy(
                        f"{model.spec.key!r} cannot be loaded: {names} in use, and no more fit", retry_after=5
                    )
                    error.code, error.status, error.type = "no_room", 503, "server_error"
                    raise error
            model.occupies = True


class OnDemand:
    """A service that is opened and started by the first request, while others wait for the same start.

    A request waits at most ``options.load_wait_s``; then it is answered 503 with the phase, and the load goes on. When
    a load fails, requests get its cause at once until it is time to try again. A model is never unloaded while it has
    requests or sessions.

    :ivar occupies: it has, or is about to have, a worker. :ivar last_used: in monotonic seconds.
    """

    def __init__(
        self, spec: ModelSpec, make: Callable[[], Service], shelf: Shelf, peek: Callable[[], Processor | None]
    ):
        self.spec, self._make, self._shelf, self.options = spec, make, shelf, shelf.options
        self._peek, self._peeking = peek, asyncio.Lock()
        self._voices: list[Voice] | None = None
        self.occupies, self.last_used = False, time.monotonic()
        self.watcher: Watcher | None = None
        self._service: Service | None = None  # from its opening on, ready or not
        self._loading: asyncio.Task[None] | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._idling: asyncio.Task[None] | None = None
        self._users = 0  # requests that wait for the load, or are being handed over
        self._failures, self._retry_at, self._fault = 0, 0.0, ""
        self._stopped = False

    # --- what it is now ----------------------------------------------------------------------------------------------

    @property
    def loaded(self) -> bool:
        return self._service is not None and self._loading is None

    @property
    def phase(self) -> Phase:
        if self._stopped:
            return Phase(name="stopped")
        if self._unloading is not None:
            return Phase(name="unloading")
        if self._service is not None:
            return self._service.phase
        if self._loading is not None:
            return Phase(name="starting", detail="opening the model")
        return Phase(name="failed", detail=self._fault) if self._fault else Phase(name="unloaded")

    @property
    def processor(self) -> Processor:
        if self._service is None:
            raise not_ready(self.spec.key, self.phase)
        return self._service.processor

    async def voices(self) -> list[Voice]:
        """The voices that the model brings, also while it is not loaded; none where that would take fetching its
        weights, or its processor is broken (which a load would tell)."""
        async with self._peeking:
            if self._voices is None:
                try:
                    processor = await asyncio.to_thread(self._peek) if self._service is None else self.processor
                    if processor is not None:
                        self._voices = await asyncio.to_thread(model_voices, self.spec, processor)
                except NotReady:
                    pass  # it is being loaded: known when that is done
                except MstarError as error:
                    log.warning("the voices of %r are not known: %s", self.spec.key, error)
                    self._voices = []
        return self._voices or []

    @property
    def limits(self) -> Mapping[str, Any]:
        """What the operator set; known once it has been opened."""
        return {} if self._service is None else self._service.limits

    @property
    def canvas(self) -> Canvas | None:
        """The spec's until it has been opened."""
        return self.spec.canvas if self._service is None else self._service.canvas

    @property
    def open_requests(self) -> int:
        return self._users + (0 if self._service is None else self._service.open_requests)

    async def status(self) -> Mapping[str, Any]:
        return {} if self._service is None else await self._service.status()

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Nothing: it waits for its first request."""

    async def stop(self) -> None:
        self._stopped = True
        tasks = [task for task in (self._loading, self._idling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._unloading is not None:
            await self._unloading
        if self._service is not None:
            await self._service.stop()

    async def drain(self, seconds: float) -> bool:
        return self._service is None or await self._service.drain(seconds)

    def check_loadable(self) -> None:
        """Raise :class:`NotReady` with the cause while a load that failed is not tried again."""
        left = self._retry_at - time.monotonic()
        if self._loading is None and left > 0:
            error = NotReady(f"the model {self.spec.key!r} could not be loaded: {self._fault}", retry_after=left)
            error.code = "load_failed"
            raise error

    async def load(self, *, seconds: float | None = None, force: bool = False) -> Service:
        """The loaded service, after waiting for it: at most ``options.load_wait_s``, and *seconds*.

        :param force: try at once, however lately a load has failed.
        :raises NotReady: it is not loaded by then, or could not be.
        """
        if self.loaded and self._service is not None:
            return self._service
        if self._stopped:
            raise not_ready(self.spec.key, self.phase)
        if not force:
            self.check_loadable()
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
            self._loading.add_done_callback(_seen)  # perhaps nobody waits any more
        loading = self._loading
        most = self.options.load_wait_s
        await asyncio.wait((loading,), timeout=most if seconds is None else min(most, seconds))
        if not loading.done():
            raise not_ready(self.spec.key, self.phase)
        if loading.cancelled():
            raise NotReady("the server is shutting down")
        error = loading.exception()
        if isinstance(error, TooBusy):
            raise error
        if error is not None:
            self.check_loadable()
        if self._service is None:
            raise not_ready(self.spec.key, self.phase)
        return self._service

    async def _load(self) -> None:
        try:
            if self._unloading is not None:
                await self._unloading
            await self._shelf.make_room(self)
            log.info("loading %r", self.spec.key)
            began = time.monotonic()
            self._service = await asyncio.to_thread(self._make)
            self._service.watcher = self.watcher
            await self._service.start()
        except BaseException as error:
            self._service, self.occupies, self._loading = None, False, None
            if isinstance(error, Exception) and not isinstance(error, TooBusy):
                self._note_failure(error)
            raise
        self._failures, self._fault, self._retry_at = 0, "", 0.0
        self._voices = None  # what was found without it may be less
        self._loading, self.last_used = None, time.monotonic()
        log.info("%r is loaded after %.1f s", self.spec.key, self.last_used - began)
        if self.options.idle_unload_s is not None:
            self._idling = asyncio.create_task(self._unload_when_idle(self.options.idle_unload_s))

    def _note_failure(self, error: Exception) -> None:
        deliberate = isinstance(error, MstarError)
        self._fault = str(error) if deliberate else describe(error)
        pause = min(FIRST_PAUSE_S * 2**self._failures, LONGEST_PAUSE_S)
        self._failures = min(self._failures + 1, 16)
        self._retry_at = time.monotonic() + pause
        log.error(
            "%r could not be loaded, not tried again for %g s: %s",
            self.spec.key, pause, self._fault, exc_info=None if deliberate else error,
        )  # fmt: skip

    async def unload(self) -> None:
        """End its worker. Raises status 409 when it is in use; does nothing when it is not loaded."""
        if (self._unloading or self._service or self._loading) and not await self.unload_if_idle():
            message = f"the model {self.spec.key!r} is in use: it has requests or sessions, or is being loaded"
            raise RequestError(message, param="model", code="model_in_use", status=409)

    async def unload_if_idle(self) -> bool:
        """End its worker, unless it has requests or sessions or is being loaded. Returns whether it is unloaded."""
        if self._unloading is not None:
            await asyncio.shield(self._unloading)
            return True
        service = self._service
        if service is None or not self.loaded or self.open_requests or await _sessions(service):
            return False
        if self._service is not service or self.open_requests:  # meanwhile
            return False
        self._service = None
        if self._idling is not None and self._idling is not asyncio.current_task():
            self._idling.cancel()
        self._idling = None
        self._unloading = asyncio.create_task(self._end(service))
        await asyncio.shield(self._unloading)
        return True

    async def _end(self, service: Service) -> None:
        try:
            await service.stop()
            log.info("%r is unloaded", self.spec.key)
        finally:
            self._unloading, self.occupies = None, False

    async def _unload_when_idle(self, seconds: float) -> None:
        pause = min(max(seconds / 4, 0.05), 1.0)
        while True:
            await asyncio.sleep(pause)
            if self.open_requests:
                self.last_used = time.monotonic()
            elif time.monotonic() - self.last_used >= seconds and await self.unload_if_idle():
                return

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, task: Task, request_id: str | None = None, sibling_of: str | None = None) -> Answer:
        return await self._generate(task, request_id, sibling_of, None)

    async def _generate(self, task: Task, request_id: str | None, sibling_of: str | None, hold: _Held | None) -> Answer:
        began = time.monotonic()
        self._users += 1
        try:
            service = await self.load(seconds=task.timeout)
            if task.timeout is not None:
                task = replace(task, timeout=max(task.timeout - (time.monotonic() - began), 1e-3))
            return await (service if hold is None else hold.of(service)).generate(task, request_id, sibling_of)
        finally:
            self._leave()

    def hold(self) -> Hold:
        """The model is loaded by its first request and stays until it is closed."""
        self._users += 1
        return _Held(self._generate, self._leave)

    def _leave(self) -> None:
        self._users -= 1
        self.last_used = time.monotonic()


class _Held:
    """A hold on a model that may have to be loaded first, and on the service that it has then."""

    def __init__(self, generate: Callable[..., Awaitable[Answer]], leave: Callable[[], None]):
        self._generate, self._leave = generate, leave
        self._inner: Hold | None = None
        self._closed = False

    async def generate(self, task: Task, request_id: str | None = None, sibling_of: str | None = None) -> Answer:
        return await self._generate(task, request_id, sibling_of, self)

    def of(self, service: Service) -> Generates:
        """What its next request is made with. It is the same service each time: a model that is held is not
        unloaded."""
        if self._closed:
            return service
        if self._inner is None:
            self._inner = service.hold()
        return self._inner

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._inner is not None:
                self._inner.close()
            self._leave()


def _seen(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()


async def _sessions(service: Service) -> int:
    """Sessions that *service*'s worker keeps. A worker that does not answer counts as one in use."""
    try:
        status = await asyncio.wait_for(service.status(), STATUS_TIMEOUT_S)
    except TimeoutError:
        return 1
    return int(status.get("sessions", 0))

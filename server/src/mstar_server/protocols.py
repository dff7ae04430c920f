"""What the server needs of a running model. :class:`mstar.runtime.service.Service` is the implementation.

Stated here as protocols, so that the server can be built and tested against anything that behaves alike.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from mstar.cluster.base import Phase
from mstar.runtime.watch import Watcher
from mstar.spec.canvas import Canvas
from mstar.spec.model import ModelSpec
from mstar.spec.processor import Delta, Processor
from mstar.spec.request import Usage
from mstar.spec.tasks import Task

__all__ = ["Answer", "Generates", "Hold", "Registry", "Service", "Takeable"]


class Answer(Protocol):
    """One running request: iterate it for its deltas.

    The iterator raises :class:`~mstar.spec.errors.RequestError` when the request fails. ``usage`` and ``finish_reason``
    are set once it has ended.
    """

    @property
    def id(self) -> str: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def usage(self) -> Usage | None: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def follow(self) -> Task | None:
        """What goes on with this answer, once it has ended well."""

    @property
    def heard(self) -> Mapping[str, int]:
        """Live stream → how many of its items had been read for the delta that was taken last."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def push(self, stream: str, part: Any, end: bool = False) -> range:
        """Send *part* (a task part, an array, or ``None``) on one of the request's live streams; gives the positions
        of its items in the stream."""

    def cancel(self, reason: str = "cancelled") -> None:
        """End the request within one step. Does nothing once it has ended."""

    def close(self) -> None:
        """Cancel it, if it has not ended: nobody reads it any more."""


@runtime_checkable
class Takeable(Protocol):
    """What an answer has whose deltas can be taken without waiting: the engine's own have, others need not."""

    def take_now(self) -> list[Delta] | None:
        """All deltas that are there by now, possibly none; ``None`` at the end. Raises what the iterator would, when
        what came before it has been taken."""

    def listen(self, wake: Callable[[], None] | None) -> None:
        """From now on call *wake* whenever there may be more for :meth:`take_now`; at once, if there is. ``None`` ends
        it."""


class Generates(Protocol):
    """What takes tasks."""

    async def generate(self, task: Task, request_id: str | None = None, sibling_of: str | None = None) -> Answer: ...


class Hold(Generates, Protocol):
    """A place for requests that follow one another: it counts as one that runs, and while the model drains its requests
    are taken (:class:`mstar.runtime.hold.Hold`)."""

    def close(self) -> None:
        """The last of them has ended. May be called more than once."""


class Service(Generates, Protocol):
    """One served model. What is told of its requests is set by the server (``watcher``)."""

    watcher: Watcher | None

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def processor(self) -> Processor: ...

    @property
    def phase(self) -> Phase: ...

    @property
    def limits(self) -> Mapping[str, Any]: ...

    @property
    def canvas(self) -> Canvas | None:
        """Which pictures and videos this deployment makes, as far as that is known before it is loaded."""

    @property
    def open_requests(self) -> int:
        """Requests that are being prepared, waiting or running."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def drain(self, seconds: float) -> bool: ...

    async def status(self) -> Mapping[str, Any]: ...

    def hold(self) -> Hold:
        """Raises what :meth:`generate` would if the model takes no requests. Close it."""


class Registry(Protocol):
    """Of :class:`mstar.registry.Registry`, only the plugins: ``call_each(hook, **arguments)`` gives pairs (plugin,
    result), and ``reject(plugin, error)`` puts one aside."""

    plugins: Any

"""A place in a service for requests that follow one another."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mstar.runtime.answer import Answer
from mstar.spec.model import ModelSpec
from mstar.spec.tasks import Task

__all__ = ["Hold"]


class Hold:
    """What one client asked for and takes several requests, as a long clip takes one for each of its windows. Until it
    is closed it counts as a request that runs, also between two of its own: the model is not unloaded, draining waits
    for it, and its requests are taken while others are refused. Made by :meth:`mstar.runtime.service.Service.hold`.

    :ivar ids: of its requests, those that run at least.
    """

    def __init__(
        self,
        spec: ModelSpec,
        limits: Mapping[str, Any],
        begin: Callable[[Task, str, str | None, Hold], Awaitable[Answer]],
        let_go: Callable[[Hold], None],
    ):
        self.spec, self.limits, self.ids = spec, limits, set[str]()
        self._begin, self._let_go = begin, let_go

    async def generate(self, task: Task, request_id: str | None = None, sibling_of: str | None = None) -> Answer:
        """As :meth:`mstar.runtime.service.Service.generate`; once it is closed, exactly that."""
        return await self._begin(task, request_id or uuid.uuid4().hex, sibling_of, self)

    def close(self) -> None:
        """The last request has ended, or will not be made. May be called more than once."""
        self._let_go(self)

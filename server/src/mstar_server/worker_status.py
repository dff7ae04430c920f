"""What workers say of themselves, and what they said last while they are in the middle of a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mstar_server.protocols import Service

__all__ = ["Known", "WorkerStatuses"]


@dataclass(frozen=True)
class Known:
    """A worker's *status*, *age_s* seconds after it was told; ``None``: it has told none yet."""

    status: Mapping[str, Any] | None
    age_s: float = 0.0


class WorkerStatuses:
    """Asks the worker of each model, and remembers the answer."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[Mapping[str, Any], float]] = {}

    async def ask(self, key: str, service: Service, timeout_s: float) -> Known:
        """The status of model *key*'s worker. A worker in a long step does not answer within *timeout_s*: then it is
        what it, whoever asked, has told last."""
        try:
            status = await asyncio.wait_for(service.status(), timeout_s)
        except TimeoutError:
            if key not in self._told:
                return Known(None)
            status, at = self._told[key]
            return Known(status, time.monotonic() - at)
        self._told[key] = status, time.monotonic()
        return Known(status)

    def forget(self, key: str) -> None:
        """The worker of model *key* is another one, or none."""
        self._told.pop(key, None)

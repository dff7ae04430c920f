"""What models that are not ready yet are waiting for, said in the log while they start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from mstar.cluster.base import Phase

__all__ = ["tell_phases"]


class _Starting(Protocol):
    @property
    def phase(self) -> Phase: ...


async def tell_phases(services: Mapping[str, _Starting], log: logging.Logger, every_s: float) -> None:
    """Say every few seconds what a start still waits for: weights and compilers take their time. Runs until it is
    cancelled."""
    while True:
        await asyncio.sleep(every_s)
        waiting = {key: service.phase for key, service in services.items() if service.phase.name != "ready"}
        told = (f"{key}: {phase.name}{f', {phase.detail}' if phase.detail else ''}" for key, phase in waiting.items())
        if waiting:
            log.info("not ready yet (%s)", "; ".join(told))

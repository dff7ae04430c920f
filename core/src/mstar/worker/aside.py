"""What a device does beside its steps, and not behind those that were launched already.

State that leaves a rank was computed by a step that is over, while the next ones may be long prompts. On the stream of
the steps its gathering would wait for them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mstar.resources.staging import record

__all__ = ["Aside"]


class Aside:
    """A stream of *device* beside that of its steps, whose few blocks do not queue behind theirs. On a CPU, where what
    was launched is over, nothing."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """Where the steps are now: behind all that has been launched."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        record(event, self._device)
        return event

    @contextmanager
    def behind(self, mark: Any = None) -> Iterator[None]:
        """Within it, what is launched runs beside the steps, once they have come to *mark*."""
        if self._stream is None:
            yield
            return
        if mark is not None:
            self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield

"""One step: plan → forward → commit, and what happens when it fails.

``collect`` is the scheduler's; this is the rest of design §6. A step either commits for all of its rows or is rolled
back for all of them. A failed step of several rows is run again in halves until the rows that fail are alone (promise
P7): resources are pure until commit, so the others get exactly the result that they would have had.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from mstar.engine.base import Runner
from mstar.engine.device import raise_if_lost
from mstar.engine.step import RowResult, Work, gather, make_step, split
from mstar.nn.node import Node
from mstar.resources.base import Owner, Resource, Row
from mstar.spec.errors import RequestError

__all__ = ["Engine"]

log = logging.getLogger(__name__)


class Engine:
    """Runs steps of one model's nodes on one device.

    :param owner: gives the owner of a call's state in one resource: ``(request id, context)`` or a session's.
    :param on_step: told of each step that ran: node, entry, rows, items, seconds.
    """

    def __init__(
        self,
        nodes: Mapping[str, Node],
        resources: Mapping[str, Resource],
        runner: Runner,
        owner: Callable[[Work, str], Owner],
        device: torch.device,
        dtype: torch.dtype,
        on_step: Callable[[str, str, int, int, float], None] | None = None,
    ):
        self.nodes, self.resources, self.runner = nodes, resources, runner
        self.device, self.dtype = device, dtype
        self._owner, self._on_step = owner, on_step
        self.steps = 0

    def run(self, work: Sequence[Work]) -> list[RowResult | Exception]:
        """One result per call, in order: what it computed, or why it failed.

        :raises DeviceLost: nothing more can be computed here.
        """
        try:
            return list(self._step(work))
        except Exception as error:
            raise_if_lost(error)
            failure = error
        if len(work) == 1:
            trace = None if isinstance(failure, RequestError) else failure
            log.error("a step of node %r failed for request %r: %s", *_names(work[0]), failure, exc_info=trace)
            return [failure]
        log.warning("a step of %d requests failed (%s); running it in halves", len(work), failure)
        middle = len(work) // 2
        return [*self.run(work[:middle]), *self.run(work[middle:])]

    def _step(self, work: Sequence[Work]) -> list[RowResult]:
        began = time.perf_counter()
        op = work[0].call.op
        entry = op.entry
        used = [self.resources[name] for name in entry.resources]
        rows = [self._rows(work, resource.name) for resource in used]
        planned = 0
        try:
            with torch.inference_mode():
                views = {}
                for resource, mine in zip(used, rows, strict=True):
                    planned += 1
                    views[resource.name] = resource.plan(mine, resource.name in entry.frozen)
                step = make_step(work, views, self.device, self.dtype)
                inputs = gather(entry, op, work, self.device, self.dtype)
                outputs = self.runner.run(self.nodes[op.call.node], entry.name, step, inputs)
                results = split(entry, work, outputs)
                for resource, mine in zip(used, rows, strict=True):
                    resource.commit(mine, resource.name in entry.frozen)
        except Exception:
            for resource, mine in zip(used[:planned], rows, strict=False):
                resource.rollback(mine, resource.name in entry.frozen)
            for w in work:
                _trim_partial(w)
            raise
        self.steps += 1
        if self._on_step is not None:
            tokens = sum(w.tokens for w in work)
            self._on_step(op.call.node, entry.name, len(work), tokens, time.perf_counter() - began)
        return results

    def _rows(self, work: Sequence[Work], resource: str) -> list[Row]:
        return [Row(self._owner(w, resource), w.tokens, w.complete, _ids(w)) for w in work]


def _ids(w: Work) -> Sequence[int] | None:
    """The step's token ids, when the host knows them."""
    chunk = w.call.op.entry.chunk
    if chunk is None:
        return None
    ref = w.call.inputs[chunk]
    if ref.host is None:
        return None
    if ref.row:
        return (ref.host,)
    host: Sequence[int] = ref.host
    return host if w.tokens == len(host) else host[w.start : w.start + w.tokens]


def _trim_partial(w: Work) -> None:
    """Forget what a failed chunk appended to its call's joined outputs."""
    for pieces in (w.call.partial or {}).values():
        del pieces[w.call.chunks :]


def _names(w: Work) -> tuple[str, str]:
    return w.call.op.call.node, w.call.run.request.id

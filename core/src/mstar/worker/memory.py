"""The memory plan: what each pool may take of a device, what it took, and what would fit when one does not.

What is free once the weights are there is given away in this order: the reserve (graphs, workspaces), pools with a
size of their own, and of the rest ``engine.memory_fraction`` to the pools without one, in equal shares; what a pool
leaves of its share goes to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil
import torch

from mstar.graph.program import Plan
from mstar.resources.base import Resource, ResourceContext
from mstar.resources.budget import DoesNotFit
from mstar.resources.slotted import SlotResource
from mstar.resources.staging import Stage
from mstar.spec.deployment import Deployment
from mstar.spec.errors import SetupError
from mstar.spec.resources import ResourceSpec
from mstar.spec.sizes import bytes_in_words

__all__ = ["MemoryPlan", "free_memory"]

_GPU_FRACTION, _CPU_FRACTION = 0.9, 0.25  # a computer has other work to do


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on *device*: what torch keeps for reuse counts, and so does what the system keeps as
    file cache (the weights just read)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return int(psutil.virtual_memory().available)


class MemoryPlan:
    """Makes the pools of a model within the memory of its device.

    :param plan: the compiled graph, which says how many contexts a request opens in each resource.
    :param stage: of the worker; it says which device.
    :param free: bytes free once the weights are there; ``None``: not known, nothing is refused.
    :param weights_bytes: what the weights take, to be told beside the rest.
    :param reserve_bytes: of *free*, for what is allocated after the pools: graphs, workspaces.
    :param vocabulary: of a resource; see :class:`~mstar.resources.base.ResourceContext`.
    """

    def __init__(
        self,
        declared: Mapping[str, ResourceSpec],
        plan: Plan,
        deployment: Deployment,
        stage: Stage,
        dtype: torch.dtype,
        backends: Sequence[Any],
        *,
        free: int | None,
        weights_bytes: int = 0,
        reserve_bytes: int = 0,
        vocabulary: Callable[[str], Callable[[], Sequence[bytes]] | None] = lambda name: None,
    ):
        self._vocabulary = vocabulary
        self._declared, self._plan, self._deployment = declared, plan, deployment
        self._stage, self._dtype, self._backends = stage, dtype, backends
        self._free, self._weights, self._reserve = free, weights_bytes, reserve_bytes
        unsized = [name for name, spec in declared.items() if getattr(spec, "tokens", 0) is None]
        self.order = (*(name for name in declared if name not in unsized), *unsized)
        """The resources in the order in which they must be made."""
        self._waiting, self._sharers = unsized, len(unsized)
        default = _GPU_FRACTION if stage.device.type == "cuda" else _CPU_FRACTION
        self._fraction = deployment.engine.memory_fraction or default
        self._unshared = 0
        self._pools: dict[str, Resource] = {}

    def make(self, name: str, make: Callable[[ResourceContext], Resource]) -> Resource:
        """The pool of resource *name*, by *make*. Call it in :attr:`order`.

        :raises SetupError: it does not fit; with the plan so far and a setting with which it would.
        """
        try:
            pool = self._pools[name] = make(self._context(name))
        except DoesNotFit as error:
            raise SetupError(self._refusal(name, error)) from error
        if name in self._waiting:
            self._waiting.remove(name)
        else:
            self._unshared += pool.device_bytes()
        return pool

    def _context(self, name: str) -> ResourceContext:
        memory = self._budget(name)
        owners = self._owners(name)
        return ResourceContext(
            self._stage.device,
            self._dtype,
            owners,
            memory,
            self._backends,
            self._deployment.engine.deterministic,
            self._vocabulary(name),
            stage=self._stage,
        )

    def _contexts(self, name: str) -> int:
        return len(self._plan.contexts.get(name, ())) or 1

    def _owners(self, name: str) -> int:
        requests = self._deployment.max_concurrent_requests
        sessions = self._deployment.max_sessions if name in self._plan.graph.sessions else 0
        return (requests + sessions) * self._contexts(name)

    # --- shares -------------------------------------------------------------------------------------------------------
    def _budget(self, name: str) -> int | None:
        if self._free is None:
            return None
        rest = max(0, self._rest(self._free))
        if name not in self._waiting:
            return rest
        return max(0, int(rest * self._fraction) - self._shared()) // len(self._waiting)

    def _rest(self, free: int) -> int:
        """What weights, reserve and sized pools leave; negative when they take more than there is."""
        return free - self._reserve - self._unshared

    def _shared(self) -> int:
        """What pools without a size have taken."""
        return sum(pool.device_bytes() for pool in self._pools.values()) - self._unshared

    # --- words --------------------------------------------------------------------------------------------------------
    def table(self) -> str:
        """Where the device's memory went, a line each: weights, pools, reserve, what is left."""
        rows = [("weights", self._weights, "")] if self._weights else []
        rows += [(name, pool.device_bytes(), _units(pool)) for name, pool in self._pools.items() if pool.device_bytes()]
        if self._reserve:
            rows.append(("graphs and workspace", self._reserve, "reserved"))
        if self._free is not None:
            taken = self._reserve + sum(pool.device_bytes() for pool in self._pools.values())
            rows.append(("free", max(0, self._free - taken), ""))
        wide = max((len(name) for name, _, _ in rows), default=0)
        lines = [f"  {name:<{wide}}  {bytes_in_words(size):>7}  {note}".rstrip() for name, size, note in rows]
        return "\n".join([f"memory of {self._stage.device}:", *lines])

    def _refusal(self, name: str, error: DoesNotFit) -> str:
        settings = [*error.settings, *(() if self._free is None else self._other_settings(name, error, self._free))]
        remedy = "It would fit with " + ", or with ".join(settings) if settings else "No single setting makes it fit"
        return f"{error.message}\n{self.table()}\n{remedy}"

    def _other_settings(self, name: str, error: DoesNotFit, free: int) -> Iterator[str]:
        """Settings beside the resource's own with which it would fit."""
        rest, wanted = self._rest(free), float(error.needed)
        if name in self._waiting:
            total = error.needed * self._sharers  # an equal share is the least that each can get
            fraction = math.ceil(total / rest * 1000 + 1e-6) / 1000 if rest > 0 else math.inf
            if fraction <= 1:
                yield f"engine.memory_fraction: {fraction:g}"
            wanted = total / self._fraction
        yield from self._fewer(name, error, wanted - rest)

    def _fewer(self, name: str, error: DoesNotFit, missing: float) -> Iterator[str]:
        """Fewer requests, or fewer and no sessions, to leave *missing* bytes more: pools of slots shrink with them."""
        slots = {name: float(error.slot_bytes)}
        for other, pool in self._pools.items():
            if isinstance(pool, SlotResource):
                slots[other] = pool.slot_bytes()
        shrinking = [other for other in slots if getattr(self._declared[other], "slots", None) is None]
        owner = {other: slots[other] * self._contexts(other) for other in shrinking}
        request = sum(owner.values())
        session = sum(size for other, size in owner.items() if other in self._plan.graph.sessions)
        most, sessions = self._deployment.max_concurrent_requests, self._deployment.max_sessions
        if not request:
            return
        if (requests := most - math.ceil(missing / request)) >= 1:
            yield f"max_concurrent_requests: {requests}"
        elif (requests := most - max(0, math.ceil((missing - session * sessions) / request))) >= 1:
            yield f"max_concurrent_requests: {requests} and max_sessions: 0"


def _units(pool: Resource) -> str:
    if isinstance(pool, SlotResource):
        return pool.size_in_words()
    size = getattr(pool.spec, "page_size", None)
    if size is None:
        return f"{pool.capacity():,} slots"
    return f"{pool.capacity():,} pages, {pool.capacity() * size:,} tokens"

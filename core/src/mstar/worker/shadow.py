"""The books of a pool that lies on another rank.

Rank 0 admits requests, so it must know at once what a pool elsewhere can hold. A shadow is that pool, made by its own
class with the same numbers, on the meta device: it counts and has no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mstar.graph.program import Plan
from mstar.registry import Registry
from mstar.resources.attention import AttentionBackend, AttentionNeed, KVBatch, KVMemory, KVPlan, RaggedPlan
from mstar.resources.base import Resource, ResourceContext
from mstar.resources.staging import Stage
from mstar.spec.deployment import Deployment
from mstar.spec.resources import ResourceSpec
from mstar.worker.build import make_resource, memory_plan

__all__ = ["META", "Elsewhere", "on_meta", "shadow_pools"]

META = torch.device("meta")


class Elsewhere(AttentionBackend):
    """A backend that is asked for the device which is meant, while the pools stand on the meta device."""

    def __init__(self, inner: AttentionBackend, device: torch.device):
        self._inner, self._device = inner, device
        self.name, self.priority = inner.name, inner.priority

    def supports(self, need: AttentionNeed) -> str | None:
        return self._inner.supports(replace(need, device=self._device))

    def plan_kv(self, memory: KVMemory, batch: KVBatch, stage: Stage, key: str) -> KVPlan:
        return self._inner.plan_kv(memory, batch, stage, key)

    def plan_ragged(self, lengths: Any, stage: Stage, key: str) -> RaggedPlan:
        return self._inner.plan_ragged(lengths, stage, key)


def on_meta(context: ResourceContext, device: torch.device) -> ResourceContext:
    """*context* for a pool without memory, whose backends are those of *device*."""
    backends = [Elsewhere(backend, device) for backend in context.attention_backends]
    return replace(context, device=META, attention_backends=backends, stage=Stage(META))


def shadow_pools(
    declared: Mapping[str, ResourceSpec],
    capacities: Mapping[str, int],
    plan: Plan,
    deployment: Deployment,
    registry: Registry,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Resource]:
    """Shadows of pools on another rank. *capacities*: how many units each has there."""
    specs = {name: _sized(declared[name], units) for name, units in capacities.items()}
    memory = memory_plan(specs, plan, deployment, registry, Stage(device), dtype, free=None)
    return {
        name: memory.make(
            name,
            lambda context, name=name: make_resource(name, specs[name], on_meta(context, device), registry),  # type: ignore[misc]
        )
        for name in memory.order
    }


def _sized(spec: ResourceSpec, units: int) -> ResourceSpec:
    """*spec* with as many tokens as the pool has got, where that was left to its device's memory."""
    size = getattr(spec, "page_size", None)
    if size is None or getattr(spec, "tokens", 0) is not None:
        return spec
    return replace(spec, tokens=units * size)  # type: ignore[call-arg]

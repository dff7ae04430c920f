"""What ``engine.deterministic`` cannot cover, found before the first request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from mstar.graph.program import Plan
from mstar.registry import Registry
from mstar.spec.resources import ResourceSpec

__all__ = ["option_faults"]


def option_faults(
    device: torch.device, dtype: torch.dtype, declared: Mapping[str, ResourceSpec], plan: Plan, registry: Registry
) -> Iterator[tuple[str, str]]:
    """(key, fault) of what on *device*, in *dtype*, keeps a request's tokens from being the same in any batch. Nodes
    are looked at by :mod:`mstar.nn.deterministic`, attention by :func:`mstar.resources.attention.pick_backend`."""
    key = "engine.deterministic"
    if device.type == "cpu":
        if dtype is not torch.float32:
            yield (
                key,
                f"on the CPU it needs dtype float32, not {_name(dtype)}, whose products depend on the number of rows",
            )
        return
    if device.type != "cuda":
        yield key, f"there are no deterministic kernels for device {device.type!r}, only for cuda and cpu"
        return
    if dtype not in (torch.bfloat16, torch.float16):
        yield key, f"on a GPU it needs dtype bfloat16 or float16, not {_name(dtype)}"
    for name, spec in declared.items():
        if not getattr(registry.resource(spec.kind), "batch_invariant", False):
            yield key, f"resource {name!r} of kind {spec.kind!r} has no deterministic way to compute"
    for node in plan.graph.nodes:
        for entry in node.entries:
            if entry.frozen:
                frozen = ", ".join(map(repr, entry.frozen))
                yield (
                    key,
                    f"node {node.name!r}, entry {entry.name!r}: steps over frozen {frozen} cannot be deterministic",
                )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

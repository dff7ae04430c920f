"""One rank's part of a model: what its nodes, resources and memory are where several ranks compute a node together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from mstar.nn.mesh import SINGLE, Mesh, World
from mstar.nn.node import Node, says
from mstar.nn.shards import layout_faults
from mstar.spec.deployment import EngineOptions
from mstar.spec.errors import SetupError, nearest
from mstar.spec.graph import Graph
from mstar.spec.resources import ResourceSpec

__all__ = ["Meshes", "agreed_memory", "divided_resources", "mesh_faults", "open_world"]

Meshes = Mapping[str, Mesh]
"""Node → the ranks that compute it; one that is not named is this rank's alone."""


def open_world(device: torch.device, engine: EngineOptions) -> World:
    """The ranks of this model, once ``torch.distributed`` has been initialised, adding up as *engine* says."""
    ordered = device.type == "cpu" or engine.deterministic
    return World(device, ordered, engine.symmetric_bytes)


def mesh_faults(name: str, node: Node, mesh: Mesh) -> Iterator[str]:
    """Why *node*, called *name* and built for *mesh*, cannot be computed by its ranks."""
    kind = type(node)
    if mesh.tp.size > 1:
        if says(kind, "tensor_parallel"):
            yield from layout_faults(name, node, mesh.tp.size)
        else:
            yield (
                f"node {name!r} cannot be divided by tp={mesh.tp.size}: {kind.__name__} does not say that its layers "
                "can be (tensor_parallel = True); tp: 1 would do"
            )
    if mesh.sp.size > 1 and not says(kind, "sequence_parallel"):
        yield (
            f"node {name!r} cannot be divided by sp={mesh.sp.size}: {kind.__name__} does not say that its tokens can "
            "be (sequence_parallel = True); sp: 1 would do"
        )


def divided_resources(declared: Mapping[str, ResourceSpec], graph: Graph, meshes: Meshes) -> dict[str, ResourceSpec]:
    """What this rank holds of each resource: the heads of its share of the nodes that use it.

    :raises SetupError: a resource's heads do not divide, or nodes that share one are divided differently.
    """
    for name in meshes:
        if all(node.name != name for node in graph.nodes):
            raise SetupError(f"a mesh for node {name!r}: unknown node{nearest(name, [n.name for n in graph.nodes])}")
    ranks: dict[str, dict[str, int]] = {}
    for node in graph.nodes:
        for entry in node.entries:
            for resource in entry.resources:
                ranks.setdefault(resource, {})[node.name] = meshes.get(node.name, SINGLE).tp.size
    found = dict(declared)
    for resource, users in ranks.items():
        sizes = set(users.values())
        spec = declared[resource]
        if len(sizes) > 1 and all(_divided(resource, spec, size) == spec for size in sizes):
            continue  # it has no heads: all ranks hold all of it
        if len(sizes) > 1:
            told = ", ".join(f"{node!r} with tp={size}" for node, size in users.items())
            raise SetupError(f"resource {resource!r} is used by {told}: nodes that share state need the same tp")
        found[resource] = _divided(resource, spec, sizes.pop())
    return found


def _divided(name: str, spec: ResourceSpec, ranks: int) -> ResourceSpec:
    try:
        return spec.divided(ranks)
    except SetupError as error:
        raise SetupError(f"resource {name!r}: {error}") from None


def agreed_memory(free: Callable[[torch.device], int], device: torch.device, meshes: Meshes, processes: int) -> int:
    """Bytes that this rank may plan with: as many as the rank of its meshes that has the fewest, so that all have pools
    of one size, and admit the same requests.

    :param processes: those of the deployment that have this memory in common.
    """
    several = [mesh for mesh in dict.fromkeys(meshes.values()) if mesh.size > 1]
    for mesh in several:
        mesh.least(0)  # all have loaded what takes memory
    found = free(device) // processes
    for mesh in several:
        found = mesh.least(found)
    return found

"""The nodes of a worker: built, filled with published weights, and made ready for their device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mstar.cluster.base import Phase
from mstar.graph.program import Plan
from mstar.nn.cpu_linear import prepare_cpu
from mstar.nn.deterministic import deterministic_faults, prepare_deterministic
from mstar.nn.mesh import SINGLE, building
from mstar.nn.model import Model
from mstar.nn.node import Node
from mstar.spec.deployment import EngineOptions
from mstar.spec.errors import SetupError, WeightsError, nearest
from mstar.spec.graph import NodeSpec
from mstar.worker.layout import Meshes, mesh_faults
from mstar.worker.machine import compiles

__all__ = ["load_nodes", "node_faults"]


def load_nodes(
    model: Model,
    plan: Plan,
    mine: Sequence[str],
    weights: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    on_phase: Callable[[Phase], None],
    engine: EngineOptions,
    meshes: Meshes,
) -> tuple[dict[str, Node], int]:
    """The nodes that are *mine*, and the bytes of their weights as loaded."""
    maps, nodes = {}, {}
    for name in mine:
        with building(meshes.get(name, SINGLE)):
            maps[name] = model.weights(name)
            nodes[name] = _build_node(model, name, on_meta=maps[name] is not None)
    for fault in chain.from_iterable(node_faults(plan.graph.node(name), node) for name, node in nodes.items()):
        raise SetupError(fault)
    found_faults = [*chain.from_iterable(mesh_faults(name, nodes[name], mesh) for name, mesh in meshes.items())]
    if found_faults:
        raise SetupError("\n  ".join(found_faults))
    told = engine.deterministic and device.type == "cuda"  # elsewhere the operations are what they are anyway
    if told and (refused := [fault for name, node in nodes.items() for fault in deterministic_faults(name, node)]):
        raise SetupError("engine.deterministic: " + "\n  ".join(refused))
    mapped = {name: found for name, found in maps.items() if found is not None}
    size = _load_weights(nodes, mapped, weights, device, dtype, on_phase) if mapped else 0
    if mapped:  # what follows takes a while on a CPU
        on_phase(Phase(name="weights", progress=1.0, detail=f"read; getting them ready for {device.type}"))
    with torch.no_grad():
        for name in mapped:
            model.loaded(name, nodes[name])
    if device.type == "cpu" and not compiles(engine, device):  # compilers cannot look into what is packed
        for name in mapped:
            prepare_cpu(nodes[name])  # after counting: what is packed lies outside of the parameters
    size += sum(_tensor_bytes(node) for name, node in nodes.items() if name not in mapped)
    loaded = {name: node.to(device).eval().requires_grad_(False) for name, node in nodes.items()}
    if told and (refused := [fault for name, node in loaded.items() for fault in prepare_deterministic(name, node)]):
        raise SetupError("engine.deterministic: " + "\n  ".join(refused))
    return loaded, size


def _tensor_bytes(node: Node) -> int:
    return sum(tensor.nbytes for tensor in (*node.parameters(), *node.buffers()))


def _build_node(model: Model, name: str, on_meta: bool) -> Node:
    if not on_meta:
        return model.build(name)
    with torch.device("meta"):
        return model.build(name)


def _load_weights(
    nodes: Mapping[str, Node],
    maps: Mapping[str, Any],
    weights: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    on_phase: Callable[[Phase], None],
) -> int:
    """Fill the nodes that have published weights; returns their bytes. What does not match is told for all of them,
    before any is read."""
    from mstar.weights.loader import load, mismatches  # models without weights need no safetensors

    if weights is None:
        raise SetupError(f"node {next(iter(maps))!r} needs weights and none were given; pass --weights DIR")
    faults = [
        f"node {name!r}: {line}" if line[0] != " " else line
        for name, found in maps.items()
        for line in mismatches(nodes[name], found, weights)
    ]
    if faults:
        raise WeightsError(f"the weights in {weights} do not match the model:\n  " + "\n  ".join(faults))
    size = 0
    for name, found in maps.items():

        def report(done: int, total: int, name: str = name) -> None:
            share = done / total if total else 1.0
            on_phase(Phase(name="weights", progress=share, detail=f"{name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"))

        load(nodes[name], found, weights, device, dtype, report)
        size += _tensor_bytes(nodes[name])
    return size


def node_faults(spec: NodeSpec, node: Node) -> Iterator[str]:
    """Entries of *spec* that its module does not have."""
    for entry in spec.entries:
        method = getattr(type(node), entry.name, None)
        if not callable(method) or method is getattr(torch.nn.Module, entry.name, None):
            methods = [name for name in vars(type(node)) if not name.startswith("_")]
            known = nearest(entry.name, methods)
            yield f"node {spec.name!r}: {type(node).__name__} has no method for entry {entry.name!r}{known}"

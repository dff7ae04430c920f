"""What a deployment file says of a model's resources and of where its nodes run, and what of that cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from mstar.nn.model import Model
from mstar.spec.deployment import Deployment
from mstar.spec.errors import nearest
from mstar.spec.graph import Graph
from mstar.spec.placement import layout_of, placement_faults, users_of
from mstar.spec.resources import ResourceSpec
from mstar.worker.machine import ranks_on_device

__all__ = ["Faults", "declared_resources", "layout_faults"]

Faults = list[tuple[str, str]]
"""(key in the deployment, what is wrong with it)."""


def declared_resources(model: Model, deployment: Deployment) -> tuple[dict[str, ResourceSpec], Faults]:
    """The model's resources with the deployment's overrides applied, and the faults of overrides left out."""
    declared, faults = dict(model.resources()), Faults()
    for name, overrides in deployment.resources.items():
        if name not in declared:
            faults.append((f"resources.{name}", f"unknown resource{nearest(name, declared)}"))
            continue
        known = {f.name: f for f in dataclasses.fields(declared[name])}
        types = get_type_hints(type(declared[name]))
        values = {}
        for key, value in overrides.items():
            if key not in known:
                faults.append((f"resources.{name}.{key}", f"unknown key{nearest(key, known)}"))
                continue
            try:
                values[key] = TypeAdapter(types[key]).validate_python(value)
            except ValidationError as error:
                faults.append((f"resources.{name}.{key}", f"{error.errors()[0]['msg']} (got {value!r})"))
                continue
            least = 1 if key == "page_size" else 0
            if isinstance(values[key], int) and values[key] < least:
                faults.append((f"resources.{name}.{key}", f"must be at least {least} (got {value!r})"))
                del values[key]
        declared[name] = dataclasses.replace(declared[name], **values)
    attention = deployment.engine.attention
    if attention is not None:
        for name, spec in declared.items():
            if getattr(spec, "backend", "") is None:
                declared[name] = dataclasses.replace(spec, backend=attention)  # type: ignore[call-arg]
    return declared, faults


def layout_faults(
    deployment: Deployment, graph: Graph, declared: Mapping[str, ResourceSpec], type_of: Callable[[ResourceSpec], Any]
) -> Iterator[tuple[str, str]]:
    """What cannot be of *deployment*'s placement for a model with *graph*. *type_of*: the class of a resource."""
    yield from placement_faults(deployment.placement, graph)
    by_walk = layout_of(deployment.placement, [node.name for node in graph.nodes]).by_walk
    for name, users in users_of(graph).items():
        if name in declared and by_walk.keys() & {*users} and not type_of(declared[name]).moves:
            node = next(node for node in users if node in by_walk)
            yield (
                f"placement.{node}",
                f"resource {name!r} ({declared[name].kind}) cannot move from rank to rank; give node {node!r} one "
                "place for all walks",
            )
    ranks, name = ranks_on_device(deployment), deployment.executor
    if name == "ray" and deployment.device is not None and ":" in deployment.device:
        yield "device", f"{deployment.device!r}: Ray chooses the GPU of each rank; use 'cuda'"
        return
    yield from _device_faults(deployment)
    if ranks == 1:
        return
    if name == "inline":
        yield "executor", f"{name!r} runs one process, and the layout has {ranks} ranks; use 'processes'"
    if deployment.device is not None and ":" in deployment.device:
        yield (
            "device",
            f"{deployment.device!r} is one device for {ranks} ranks; use 'cuda': rank N takes cuda:N, unless "
            "rank_devices say otherwise",
        )
    if deployment.engine.trace is not None:
        yield "engine.trace", "a timeline shows one rank; leave it out where the layout has several"


def _device_faults(deployment: Deployment) -> Iterator[tuple[str, str]]:
    """What cannot be of the GPUs that *deployment* gives its ranks."""
    if not deployment.rank_devices:
        return
    if deployment.executor == "ray":
        yield "rank_devices", "Ray chooses the GPU of each rank; leave it out, and set 'ray.gpus: 0.5' for two on one"
    elif ranks_on_device(deployment) == 1 and deployment.device is not None and ":" in deployment.device:
        yield "rank_devices", f"the device is {deployment.device!r} already; leave one of them out"
    for replica in range(deployment.replicas):
        yield from _mesh_device_faults(deployment, replica)


def _mesh_device_faults(deployment: Deployment, replica: int) -> Iterator[tuple[str, str]]:
    for node, place in deployment.placement.items():
        for seat in place.seats:
            first: dict[int, int] = {}
            for rank in seat.ranks:
                other = first.setdefault(deployment.gpu_of(rank, replica), rank)
                if other != rank:
                    yield (
                        "rank_devices",
                        f"ranks {other} and {rank} compute node {node!r} together, so each needs a GPU of its own",
                    )

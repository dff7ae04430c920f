"""Proving a deployment sound without weights or a device: what ``mstar check`` and ``mstar graph`` do.

It is the worker's own build (:mod:`mstar.worker.build`), taken apart: every stage that can still run does, so that all
faults are listed at once. Pools and nodes are made on torch's meta device, where a tensor has a shape and no memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mstar.graph.program import Plan, compile_graph
from mstar.nn.mesh import SINGLE, Mesh, building
from mstar.nn.model import Model
from mstar.registry import load_object
from mstar.resources.base import Resource, ResourceContext
from mstar.resources.staging import Stage
from mstar.runtime.checked import Checked, Fault, NodeSize, PoolSize
from mstar.runtime.checked_deployment import Where, read_deployment, usable
from mstar.runtime.deployment_files import (
    named_model,
    read_file,
)
from mstar.runtime.opening import find_model, value_faults
from mstar.spec.check import faults as graph_faults
from mstar.spec.check import params_of
from mstar.spec.deployment import Deployment
from mstar.spec.errors import (
    DeploymentError,
    FaultFound,
    MstarError,
    PluginError,
    SetupError,
    WeightsError,
    innermost,
    nearest,
)
from mstar.spec.graph import Graph
from mstar.spec.knobs import read_options
from mstar.spec.model import ModelSpec
from mstar.spec.placement import layout_of, users_of
from mstar.spec.processor import ProcessorContext
from mstar.weights.sources import (
    SourceContext,
    check_checkpoint,
    check_override,
    expanded,
    parse_override,
    present_weights,
)
from mstar.worker import build, machine
from mstar.worker.declared import declared_resources, layout_faults
from mstar.worker.layout import divided_resources, mesh_faults
from mstar.worker.memory import free_memory
from mstar.worker.nodes import node_faults
from mstar.worker.shadow import META, on_meta

if TYPE_CHECKING:
    from mstar.registry import Registry
    from mstar.settings import Settings

__all__ = ["check_model", "find_target", "model_of_file"]


def find_target(target: str, registry: Registry) -> tuple[ModelSpec, Path | None]:
    """The model and the deployment file that *target* names: a key, or a file with ``model: KEY`` in it.

    :raises SetupError: there is no such model or file, or the file names no model, or one that is not there.
    """
    path = Path(target)
    if target in registry.models or not (path.suffix in (".yaml", ".yml") or path.exists()):
        return registry.model(target), None
    return model_of_file(path, registry), path


def model_of_file(file: Path, registry: Registry) -> ModelSpec:
    """The model that deployment *file* names.

    :raises SetupError: it cannot be read, or names no model, or one that is not there.
    """
    written = read_file(file)
    key = named_model(file, written)
    try:
        return find_model(key, registry, file)
    except (FaultFound, PluginError):
        raise
    except SetupError as error:
        raise DeploymentError([("model", str(error))], {"model": f"{file}:{written.lines['model']}"}) from None


def check_model(
    spec: ModelSpec,
    settings: Settings,
    registry: Registry,
    *,
    config: Path | None = None,
    layout: str | None = None,
    weights: str | None = None,
) -> Checked:
    """Check *spec* as deployment file *config* would serve it.

    :param layout: one of the package's; default: the one that *config* names, if any.
    :param weights: a folder (its ``config.json`` is enough) or Hub id; default: the deployment's, then the spec's.
    :raises SetupError: *config* cannot be read, or *weights* are not there.
    """
    checked = Checked(spec)
    _check_names(checked, registry)
    deployment, where = read_deployment(checked, config, layout)
    if weights is not None:
        check_override(weights)
        deployment = deployment.model_copy(update={"weights": weights})
    unusable = value_faults(spec, deployment, registry, weights=weights is None)
    checked.faults += [Fault(where.file_of(key), key, fault) for key, fault in unusable]
    checked.left_out = tuple(key for key, _ in unusable if key.partition(".")[0] in ("model_kwargs", "weights"))
    _check_kinds(checked, deployment, registry, where)
    deployment = checked.deployment = usable(deployment, [key for key, _ in unusable])
    checked.weights = _folder(spec, deployment.weights, registry, settings)
    if not checked.left_out:
        _check_processor(checked, deployment)
    with checked.stage(where.file_of("device"), "device"):
        checked.device = _device(deployment.device)
    if checked.device is not None:
        if checked.device.type == "cuda" and not torch.cuda.is_available():
            checked.remarks.append(f"{checked.device} was not looked at: this machine has no GPU that PyTorch sees")
        checked.dtype = machine.pick_dtype(deployment.dtype, checked.device)
        _check_model(checked, deployment, registry, where)
    checked.faults = [
        replace(fault, line=innermost(where.lines, fault.key)) if fault.file == where.file else fault
        for fault in checked.faults
    ]
    return checked


def _device(name: str | None) -> torch.device:
    """As :func:`~mstar.worker.machine.pick_device`, but a GPU need not be here."""
    if name is not None and name.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        return torch.device(name)
    return machine.pick_device(name)


def _check_names(checked: Checked, registry: Registry) -> None:
    """What the spec names must be there."""
    spec = checked.spec
    where = f"spec of {spec.key!r}"
    for key, target in (("model", spec.model), ("processor", spec.processor)):
        with checked.stage(where, key):
            load_object(target)
    with checked.stage(where, "knobs"):
        spec.knobs()
        spec.knobs.model_json_schema()
    for ref in spec.weights:
        with checked.stage(where, "weights"):
            registry.weight_source(ref.source)


def _check_kinds(checked: Checked, deployment: Deployment, registry: Registry, where: Where) -> None:
    """What the deployment names must be importable; that it is there has been checked."""
    lookups: Mapping[str, tuple[Callable[[str], Any], str]] = {
        "executor": (registry.executor, deployment.executor),
        "scheduler.policy": (registry.scheduler, deployment.scheduler.policy),
        "engine.runner": (registry.runner, deployment.engine.runner or "eager"),
    }
    for key, (look_up, name) in lookups.items():
        if not checked.has_fault(where.file_of(key), key):
            with checked.stage(where.file_of(key), key):
                look_up(name)


def _folder(spec: ModelSpec, weights: str | None, registry: Registry, settings: Settings) -> Path | None:
    """The folder with the model's configuration, if it is on this machine."""
    if weights is not None:
        ref = parse_override(weights)
        if ref.source == "path":
            return expanded(ref.id)
    return present_weights(spec, weights, registry.weight_source, SourceContext.of(settings))


def _check_processor(checked: Checked, deployment: Deployment) -> None:
    """Make the processor, from the weights' folder or, where that is not here, from the model's tiny checkpoint."""
    spec, folder = checked.spec, checked.weights
    if checked.has_fault(f"spec of {spec.key!r}", "processor"):
        return  # it cannot be imported, which has been said
    if folder is not None or not (spec.tiny or spec.weights):
        _make_processor(checked, deployment, folder)
    elif spec.tiny is None:
        checked.remarks.append(
            "the processor was not tried: it may need the weights' folder, which is not on this machine"
        )
    else:
        with tempfile.TemporaryDirectory(prefix="mstar-check-") as tiny:
            with checked.stage(spec.tiny):
                load_object(spec.tiny)(Path(tiny))
            if not checked.has_fault(spec.tiny, ""):
                _make_processor(checked, deployment, Path(tiny))


def _make_processor(checked: Checked, deployment: Deployment, folder: Path | None) -> None:
    spec = checked.spec
    with checked.stage(spec.processor):
        make = load_object(spec.processor)
        options = read_options(spec.options, deployment.model_kwargs)
        try:
            make(ProcessorContext(spec, folder, options))
        except (MstarError, OSError) as error:
            if folder is None or _is_complete(folder):
                raise
            # a folder with the model's configuration alone is enough for all else
            checked.remarks.append(f"the processor was not tried, it needs more than is in {folder}: {error}")


def _is_complete(folder: Path) -> bool:
    try:
        check_checkpoint(folder)
    except WeightsError:
        return False
    return True


def _check_model(checked: Checked, deployment: Deployment, registry: Registry, where: Where) -> None:
    spec, device, dtype = checked.spec, checked.device, checked.dtype
    assert device is not None
    assert dtype is not None
    if checked.has_fault(f"spec of {spec.key!r}", "model"):
        return  # it cannot be imported, which has been said
    with checked.stage(spec.model):
        try:
            model = build.make_model(spec, checked.weights, deployment, device, dtype)
        except DeploymentError as error:  # of options whose values alone do not tell, as files that are not there
            checked.faults += [Fault(where.file_of(key), key, message) for key, message in error.faults]
            return
        except WeightsError as error:
            if checked.weights is not None or not spec.weights:
                raise
            raise WeightsError(
                "this model's configuration stands beside its weights, which are not on this machine: "
                f"`mstar download {spec.key}` fetches them; or give their folder with --weights DIR"
            ) from error
        graph = model.graph()
        declared, faults = declared_resources(model, deployment)
        checked.model, checked.graph, checked.declared = model, graph, declared
        found = list(graph_faults(graph, declared))
        checked.faults += [Fault(spec.model, "graph", fault) for fault in found]
        checked.remarks += _strange_params(spec, graph)
        faults += layout_faults(deployment, graph, declared, lambda spec: registry.resource(spec.kind))
        if checked.device is not None:
            faults += machine.values_faults(deployment, checked.device)
            faults += machine.gpu_faults(deployment, checked.device)
        checked.faults += [Fault(where.file_of(key), key, message) for key, message in faults]
        seats = {name: place.seats[0] for name, place in deployment.placement.items()}
        meshes = {name: Mesh.sketch(seat.tp, seat.sp) for name, seat in seats.items()}
        meshes = {node.name: meshes.get(node.name, SINGLE) for node in graph.nodes}
        _check_nodes(checked, model, graph, deployment, meshes, where)
        with checked.stage(where.file_of("placement"), "placement"):
            checked.declared = divided_resources(declared, graph, meshes)
        if not found:
            _check_pools(checked, compile_graph(graph), deployment, registry, where)
            checked.complete = not checked.left_out
        if checked.left_out:
            checked.remarks.append(f"graph, placement and pools were checked without {', '.join(checked.left_out)}")


def _strange_params(spec: ModelSpec, graph: Graph) -> Iterator[str]:
    """Parameters that are none of the knobs: a processor may send them, which nothing here can tell."""
    for where, param in params_of(graph):
        if param.name not in spec.knobs.model_fields:
            yield (
                f"{where}: {param.name!r} is no knob of {spec.key!r}{nearest(param.name, spec.knobs.model_fields)}; "
                f"unless {spec.processor} puts it into request.params, "
                + ("every request fails" if param.default is None else f"it is always {param.default!r}")
            )


def _check_nodes(
    checked: Checked, model: Model, graph: Graph, deployment: Deployment, meshes: Mapping[str, Mesh], where: Where
) -> None:
    """Build each node as one of its ranks has it."""
    device, dtype = checked.device, checked.dtype
    assert device is not None
    assert dtype is not None
    for spec in graph.nodes:
        mesh = meshes[spec.name]
        with checked.stage(checked.spec.model, f"node {spec.name!r}"), building(mesh):
            # Nodes without published weights make their own tensors, perhaps from values: they are built for real.
            if model.weights(spec.name) is None:
                node = model.build(spec.name)
            else:
                with META:
                    node = model.build(spec.name)
            tensors = [*node.parameters(), *node.buffers()]
            count = sum(parameter.numel() for parameter in node.parameters())
            size = sum(t.numel() * (dtype.itemsize if t.is_floating_point() else t.dtype.itemsize) for t in tensors)
            step = machine.step_bytes(spec, node, deployment, device, dtype)
            checked.nodes.append(NodeSize(spec.name, type(node).__name__, count, size, step))
            checked.faults += [Fault(checked.spec.model, "", fault) for fault in node_faults(spec, node)]
            key = f"placement.{spec.name}"
            checked.faults += [Fault(where.file_of(key), key, fault) for fault in mesh_faults(spec.name, node, mesh)]


def _check_pools(checked: Checked, plan: Plan, deployment: Deployment, registry: Registry, where: Where) -> None:
    """Make each rank's pools beside the weights of its nodes. Those of a resource are told once."""
    layout, users = layout_of(deployment.placement, [node.name for node in plan.graph.nodes]), users_of(plan.graph)
    for rank in range(layout.ranks):
        mine = layout.nodes_of(rank)
        used = [name for name in checked.declared if not users.get(name) or {*users[name]} & {*mine}]
        _check_rank(checked, rank, mine, used, plan, deployment, registry, where)
    checked.faults = [*dict.fromkeys(checked.faults)]  # ranks that are alike have the same


def _check_rank(
    checked: Checked,
    rank: int,
    mine: Sequence[str],
    used: Sequence[str],
    plan: Plan,
    deployment: Deployment,
    registry: Registry,
    where: Where,
) -> None:
    device, dtype = checked.device, checked.dtype
    assert device is not None
    assert dtype is not None
    declared = {name: checked.declared[name] for name in used}
    absent = device.type == "cuda" and not torch.cuda.is_available()  # the sizes asked for, then, and no budget
    weights = sum(node.bytes for node in checked.nodes if node.name in mine)
    processes = machine.sharers(deployment, device, rank)
    memory = build.memory_plan(
        declared,
        plan,
        deployment,
        registry,
        Stage(device),
        dtype,
        free=None if absent else max(0, free_memory(device) // processes - weights),  # as when they are loaded
        weights_bytes=weights,
        reserve_bytes=machine.reserved_bytes(deployment, device)
        + max((node.step_bytes for node in checked.nodes if node.name in mine), default=0),
    )

    def make(name: str, context: ResourceContext) -> Resource:
        return build.make_resource(name, declared[name], on_meta(context, device), registry)

    told = {pool.name for pool in checked.pools}
    for name in memory.order:
        key = f"resources.{name}"
        with checked.stage(where.file_of(key), key):
            pool = memory.make(name, partial(make, name))
            per_request = len(plan.contexts.get(name, ())) or 1
            if name not in told:
                checked.pools.append(_size(pool, pool.context.max_owners, per_request))


def _size(pool: Resource, owners: int, per_request: int) -> PoolSize:
    longest = getattr(pool.spec, "max_tokens", None)
    full = None if longest is None else pool.capacity() // (pool.units(longest) * per_request)
    return PoolSize(pool.name, pool.spec.kind, pool.capacity(), pool.device_bytes(), owners, full)

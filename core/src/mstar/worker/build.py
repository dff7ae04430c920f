"""Builds what a worker runs: the model, its resources and its loaded nodes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import psutil
import torch
from pydantic import TypeAdapter, ValidationError

from mstar.cluster.base import Phase, WorkerConfig
from mstar.graph.program import Plan, compile_graph
from mstar.nn.cpu_linear import prepare_cpu
from mstar.nn.model import BuildContext, Model
from mstar.nn.node import Node
from mstar.registry import Registry, load_object
from mstar.resources.base import Resource, ResourceContext
from mstar.spec.check import check_graph
from mstar.spec.deployment import Deployment
from mstar.spec.errors import SetupError, nearest
from mstar.spec.resources import ResourceSpec

__all__ = ["Built", "build", "pick_device", "pick_dtype"]

log = logging.getLogger(__name__)


@dataclass
class Built:
    model: Model
    plan: Plan
    resources: dict[str, Resource]
    nodes: dict[str, Node]
    device: torch.device
    dtype: torch.dtype


def build(config: WorkerConfig, registry: Registry, on_phase: Callable[[Phase], None]) -> Built:
    """Everything that a worker of *config* needs. Raises :class:`SetupError` with what to change."""
    deployment = config.deployment
    device = pick_device(deployment.device)
    dtype = pick_dtype(deployment.dtype, device)
    if device.type == "cpu" and deployment.engine.threads is not None:
        torch.set_num_threads(deployment.engine.threads)
    spec = registry.model(config.key)
    weights = None if config.weights is None else Path(config.weights)
    model = load_object(spec.model)(BuildContext(weights, dtype, device, deployment.model_kwargs))
    graph, declared = model.graph(), _declared(model, deployment)
    check_graph(config.key, graph, declared)
    _check_placement(deployment, [n.name for n in graph.nodes])
    plan = compile_graph(graph)
    nodes = _load_nodes(model, plan, weights, device, dtype, on_phase)
    compiling = "loading CPU kernels, which the first start compiles" if device.type == "cpu" else ""
    on_phase(Phase(name="warmup", detail=compiling))
    resources = _make_resources(declared, plan, deployment, registry, device, dtype)
    return Built(model, plan, resources, nodes, device, dtype)


def pick_device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise SetupError(f"--device {name}: this PyTorch ({torch.__version__}) sees no CUDA device; use --device cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise SetupError(f"device {name!r} is not one that PyTorch knows; use cpu, cuda or cuda:N") from None


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The asked-for dtype; by default bfloat16 on a GPU and float32 on the CPU, where it is exact: answers are those of
    the reference, token for token, alone and in any batch."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is not None:
        if name not in known:
            raise SetupError(f"dtype {name!r} is not supported{nearest(name, known)}")
        return known[name]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _declared(model: Model, deployment: Deployment) -> dict[str, ResourceSpec]:
    """The model's resources with the deployment's overrides applied."""
    declared = dict(model.resources())
    for name, overrides in deployment.resources.items():
        if name not in declared:
            raise SetupError(f"deployment: resources.{name}: unknown resource{nearest(name, declared)}")
        declared[name] = _overridden(declared[name], overrides, f"deployment: resources.{name}")
    return declared


def _overridden(spec: ResourceSpec, overrides: Mapping[str, Any], where: str) -> ResourceSpec:
    """*spec* with *overrides*, each checked against the type of its field."""
    fields, types = {f.name for f in dataclasses.fields(spec)}, get_type_hints(type(spec))
    values = {}
    for key, value in overrides.items():
        if key not in fields:
            raise SetupError(f"{where}.{key}: unknown key{nearest(key, fields)}")
        try:
            values[key] = TypeAdapter(types[key]).validate_python(value)
        except ValidationError as error:
            raise SetupError(f"{where}.{key}: {error.errors()[0]['msg']} (got {value!r})") from None
        least = 1 if key == "page_size" else 0
        if isinstance(values[key], int) and values[key] < least:
            raise SetupError(f"{where}.{key}: must be at least {least} (got {value!r})")
    return dataclasses.replace(spec, **values)


def _check_placement(deployment: Deployment, nodes: list[str]) -> None:
    for node, ranks in deployment.placement.items():
        if node not in nodes:
            raise SetupError(f"deployment: placement.{node}: unknown node{nearest(node, nodes)}")
        if any(rank != 0 for rank in ranks):
            raise SetupError(f"deployment: placement.{node}: ranks {ranks}, but this worker has only rank 0")


def _make_resources(
    declared: Mapping[str, ResourceSpec],
    plan: Plan,
    deployment: Deployment,
    registry: Registry,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Resource]:
    backends: list[Any] = [backend() for backend in registry.attention_backends().values()]
    free = _free_memory(device)
    # Pools without a size of their own share most of what a GPU has left once the weights are there, and a quarter of
    # a computer's free memory (it has other work to do). One with a size is refused only if it cannot be had at all.
    unsized = sum(getattr(spec, "tokens", 0) is None for spec in declared.values())
    share = int(free * (0.85 if device.type == "cuda" else 0.25)) // max(unsized, 1)
    made: dict[str, Resource] = {}
    for name, spec in declared.items():
        contexts = len(plan.contexts.get(name, ())) or 1
        owners = deployment.max_concurrent_requests * contexts
        if name in plan.graph.sessions:
            owners += deployment.max_sessions * contexts
        if getattr(spec, "backend", "") is None and deployment.engine.attention is not None:
            spec = dataclasses.replace(spec, backend=deployment.engine.attention)  # type: ignore[call-arg]
        memory = share if getattr(spec, "tokens", 0) is None else free
        context = ResourceContext(device, dtype, owners, memory, backends)
        made[name] = _make_resource(registry, name, spec, context)
    return made


def _make_resource(registry: Registry, name: str, spec: ResourceSpec, context: ResourceContext) -> Resource:
    try:
        return registry.resource(spec.kind)(name, spec, context)
    except (MemoryError, RuntimeError) as error:
        # PyTorch has an error of its own for a GPU's memory only; the host's is told from others by its text
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "memory" in str(error):
            raise SetupError(
                f"resource {name!r}: its pool for {context.max_owners} owners does not fit into memory; lower "
                f"max_concurrent_requests or resources.{name}"
            ) from error
        raise


def _free_memory(device: torch.device) -> int:
    """Bytes that can still be had on *device*: what the system keeps as file cache (the weights just read) counts."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return int(psutil.virtual_memory().available)


def _load_nodes(
    model: Model,
    plan: Plan,
    weights: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    on_phase: Callable[[Phase], None],
) -> dict[str, Node]:
    nodes: dict[str, Node] = {}
    for spec in plan.graph.nodes:
        weight_map = model.weights(spec.name)
        if weight_map is None:
            node = model.build(spec.name).to(device)
        else:
            if weights is None:
                raise SetupError(f"node {spec.name!r} needs weights and none were given; pass --weights DIR")

            def report(done: int, total: int, name: str = spec.name) -> None:
                share = done / total if total else 1.0
                detail = f"{name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"
                on_phase(Phase(name="weights", progress=share, detail=detail))

            with torch.device("meta"):
                node = model.build(spec.name)
            from mstar.weights.loader import load  # models without weights need no safetensors

            load(node, weight_map, weights, device, dtype, report)
            if device.type == "cpu":
                prepare_cpu(node)
        for entry in spec.entries:
            method = getattr(type(node), entry.name, None)
            if not callable(method) or method is getattr(torch.nn.Module, entry.name, None):
                raise SetupError(f"node {spec.name!r}: {type(node).__name__} has no method for entry {entry.name!r}")
        nodes[spec.name] = node.eval().requires_grad_(False)
    return nodes

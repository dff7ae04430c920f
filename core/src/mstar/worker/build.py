"""Builds what a worker runs: the model, its resources and its loaded nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mstar.cluster.base import Phase, WorkerConfig
from mstar.graph.program import Plan, compile_graph
from mstar.nn.model import BuildContext, Model
from mstar.nn.node import Node
from mstar.registry import Registry, load_object
from mstar.resources.base import Resource, ResourceContext
from mstar.resources.staging import Stage
from mstar.spec.check import check_graph
from mstar.spec.deployment import Deployment
from mstar.spec.errors import DeploymentError, MstarError, SetupError
from mstar.spec.knobs import read_options
from mstar.spec.model import ModelSpec
from mstar.spec.origin import family_fault
from mstar.spec.placement import Layout, layout_of, users_of
from mstar.spec.resources import ResourceSpec
from mstar.worker.accord import Accord
from mstar.worker.declared import declared_resources, layout_faults
from mstar.worker.deterministic import option_faults
from mstar.worker.groups import join_meshes
from mstar.worker.layout import Meshes, divided_resources
from mstar.worker.machine import (
    compile_faults,
    cpu_threads,
    pick_dtype,
    plannable,
    rank_device,
    reserved_bytes,
    step_bytes,
    values_faults,
)
from mstar.worker.memory import MemoryPlan
from mstar.worker.nodes import load_nodes

__all__ = ["Built", "build", "make_model", "make_resource", "memory_plan", "vocabulary_of"]

log = logging.getLogger(__name__)


@dataclass
class Built:
    """What a worker runs; of a layout with several ranks, what one rank has.

    :ivar accord: by which the ranks of its mesh tell each other whether a step has failed on all of them.
    """

    model: Model
    plan: Plan
    resources: dict[str, Resource]
    nodes: dict[str, Node]
    layout: Layout
    stage: Stage
    device: torch.device
    dtype: torch.dtype
    accord: Accord | None = None


def build(
    config: WorkerConfig, registry: Registry, on_phase: Callable[[Phase], None], meshes: Meshes | None = None
) -> Built:
    """Everything that a worker of *config* needs: of a layout with several ranks, the nodes of its own rank and the
    pools that these use. Raises :class:`SetupError` with what to change, also when the family's own code raises.

    :param meshes: of the nodes that this rank computes together with others, of which it gets its share; by default
        those of the deployment's placement.
    """
    spec = registry.model(config.key)
    try:
        return _build(config, spec, registry, on_phase, meshes or {})
    except MstarError:
        raise
    except Exception as error:
        what = f"{config.name} could not be built"
        fault = family_fault(what, error, (spec.model, spec.processor))
        if fault is None:
            raise
        raise fault from error


def _build(
    config: WorkerConfig, spec: ModelSpec, registry: Registry, on_phase: Callable[[Phase], None], meshes: Meshes
) -> Built:
    deployment = config.deployment
    device = rank_device(config)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams, events, captures and Triton's kernels are of this thread's device
    dtype = pick_dtype(deployment.dtype, device)
    if device.type == "cpu" and (threads := cpu_threads(deployment)) is not None:
        torch.set_num_threads(threads)
    weights = None if config.weights is None else Path(config.weights)
    try:
        model = make_model(spec, weights, deployment, device, dtype)
    except DeploymentError as error:
        raise DeploymentError(error.faults, config.places) from None
    graph = model.graph()
    declared, faults = declared_resources(model, deployment)
    check_graph(config.key, graph, declared)
    if faults := [*faults, *layout_faults(deployment, graph, declared, lambda spec: registry.resource(spec.kind))]:
        raise DeploymentError(faults, config.places)
    plan = compile_graph(graph)
    layout = layout_of(deployment.placement, [n.name for n in graph.nodes])
    accord = None
    if not meshes:
        meshes, accord = join_meshes(layout, config.rank, device, deployment.engine, config.meeting)
    declared = divided_resources(declared, graph, meshes)
    mine = layout.nodes_of(config.rank)
    users = users_of(graph)
    declared = {name: found for name, found in declared.items() if not users.get(name) or set(users[name]) & set(mine)}
    deterministic = deployment.engine.deterministic
    faults = [*option_faults(device, dtype, declared, plan, registry)] if deterministic else []
    faults += values_faults(deployment, device)
    if deployment.engine.compile is True:
        faults += compile_faults(device, deterministic)
    if faults:
        raise DeploymentError(faults, config.places)
    nodes, weights_bytes = load_nodes(model, plan, mine, weights, device, dtype, on_phase, deployment.engine, meshes)
    compiling = "loading CPU kernels, which the first start compiles" if device.type == "cpu" else ""
    on_phase(Phase(name="warmup", detail=compiling))
    stage = Stage(device)
    memory = memory_plan(
        declared,
        plan,
        deployment,
        registry,
        stage,
        dtype,
        free=plannable(config, device, meshes),
        weights_bytes=weights_bytes,
        reserve_bytes=reserved_bytes(deployment, device)
        + max(
            (step_bytes(graph.node(name), node, deployment, device, dtype) for name, node in nodes.items()), default=0
        ),
        vocabulary=partial(vocabulary_of, model, weights),
    )
    made = {
        name: memory.make(name, partial(make_resource, name, declared[name], registry=registry))
        for name in memory.order
    }
    resources = {name: made[name] for name in declared}
    log.info("%s", memory.table())
    return Built(model, plan, resources, nodes, layout, stage, device, dtype, accord)


def memory_plan(
    declared: Mapping[str, ResourceSpec],
    plan: Plan,
    deployment: Deployment,
    registry: Registry,
    stage: Stage,
    dtype: torch.dtype,
    *,
    free: int | None,
    weights_bytes: int = 0,
    reserve_bytes: int = 0,
    vocabulary: Callable[[str], Callable[[], Sequence[bytes]] | None] = lambda name: None,
) -> MemoryPlan:
    """The :class:`~mstar.worker.memory.MemoryPlan` of a model, with the backends that are installed."""
    backends: list[Any] = [backend() for backend in registry.attention_backends().values()]
    return MemoryPlan(
        declared,
        plan,
        deployment,
        stage,
        dtype,
        backends,
        free=free,
        weights_bytes=weights_bytes,
        reserve_bytes=reserve_bytes,
        vocabulary=vocabulary,
    )


def vocabulary_of(model: Model, weights: Path | None, sampler: str) -> Callable[[], Sequence[bytes]] | None:
    """The vocabulary of a sampler, read when it is asked for; ``None`` if there is none."""
    if type(model).vocabulary is not Model.vocabulary:
        return lambda: model.vocabulary(sampler) or ()
    if weights is None or not (weights / "tokenizer.json").is_file():
        return None

    def read() -> Sequence[bytes]:
        from mstar.processing.tokenizer import TextTokenizer

        return TextTokenizer(weights).vocabulary()

    return read


def make_resource(name: str, spec: ResourceSpec, context: ResourceContext, registry: Registry) -> Resource:
    """The pool of resource *name*. Raises :class:`SetupError` when it cannot be as asked for, with the numbers."""
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


def make_model(
    spec: ModelSpec,
    weights: Path | None,
    deployment: Deployment,
    device: torch.device,
    dtype: torch.dtype,
) -> Model:
    """The model that *spec* names, which reads configuration files in *weights* but no tensor.

    :raises DeploymentError: an option does not fit it.
    """
    options = read_options(spec.options, deployment.model_kwargs)
    model: Model = load_object(spec.model)(BuildContext(weights, dtype, device, options))
    model.check_options()
    return model

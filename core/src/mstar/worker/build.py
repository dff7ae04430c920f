"""Builds what a worker runs: the model, its resources and its loaded nodes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError

from mstar.cluster.base import Phase, WorkerConfig
from mstar.engine.compile import compiler_fault
from mstar.graph.program import Plan, compile_graph
from mstar.nn.cpu_linear import prepare_cpu
from mstar.nn.deterministic import deterministic_faults, prepare_deterministic
from mstar.nn.mesh import SINGLE, building
from mstar.nn.model import BuildContext, Model
from mstar.nn.node import Node
from mstar.registry import Registry, load_object
from mstar.resources.base import Resource, ResourceContext
from mstar.resources.staging import Stage
from mstar.spec.check import check_graph
from mstar.spec.deployment import Deployment, EngineOptions
from mstar.spec.errors import DeploymentError, MstarError, SetupError, WeightsError, counted, nearest
from mstar.spec.graph import Graph, NodeSpec
from mstar.spec.knobs import read_options
from mstar.spec.model import ModelSpec
from mstar.spec.origin import family_fault
from mstar.spec.placement import Layout, layout_of, placement_faults, ranks_of, users_of
from mstar.spec.resources import ResourceSpec
from mstar.worker.accord import Accord
from mstar.worker.deterministic import option_faults
from mstar.worker.groups import join_meshes
from mstar.worker.layout import Meshes, agreed_memory, divided_resources, mesh_faults
from mstar.worker.memory import MemoryPlan, free_memory
from mstar.worker.tensor_channel import way_between

__all__ = [
    "Built",
    "Faults",
    "build",
    "compiles",
    "declared_resources",
    "layout_faults",
    "make_model",
    "make_resource",
    "memory_plan",
    "node_faults",
    "pick_device",
    "pick_dtype",
    "rank_device",
    "reserved_bytes",
    "runner_name",
    "step_bytes",
    "values_faults",
    "vocabulary_of",
]

log = logging.getLogger(__name__)

_GRAPHS_RESERVE = 3 << 29
"""1.5 GiB of a GPU for what comes after the pools when steps are captured: the graphs' private memory, workspaces of
attention and matrix products, activations of the largest step."""
_PLAIN_RESERVE = 1 << 28
"""0.25 GiB: the same without graphs."""
_LANES_RESERVE = 1 << 29
"""0.5 GiB for NCCL's communicators with other ranks, which are opened when these are there, and what is on its way."""


@dataclass
class Built:
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
    if device.type == "cpu" and (threads := _threads(deployment)) is not None:
        torch.set_num_threads(threads)
    weights = None if config.weights is None else Path(config.weights)
    model = make_model(spec, weights, deployment, device, dtype)
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
    nodes, weights_bytes = _load_nodes(model, plan, mine, weights, device, dtype, on_phase, deployment.engine, meshes)
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
        free=_free(config, device, meshes),
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


def compiles(engine: EngineOptions, device: torch.device) -> bool:
    """Whether the layers of nodes on *device* are compiled."""
    if engine.compile != "cuda":
        return bool(engine.compile)
    fault = next(compile_faults(device, engine.deterministic), None) if device.type == "cuda" else None
    if fault is not None:
        log.warning("nothing is compiled: %s", fault[1])
    return device.type == "cuda" and fault is None


def compile_faults(device: torch.device, deterministic: bool) -> Iterator[tuple[str, str]]:
    if deterministic and device.type == "cuda":
        yield (
            "engine.compile",
            "with engine.deterministic on a GPU nothing can be compiled: compilers order sums by the number of rows",
        )
    elif (fault := compiler_fault(device)) is not None:
        yield "engine.compile", fault


def values_faults(deployment: Deployment, device: torch.device) -> Iterator[tuple[str, str]]:
    """Why tensors cannot pass between the ranks of *deployment*, which are on devices like *device*, as it says."""
    asked = deployment.engine.values
    if asked is not None and ranks_of(deployment.placement) > 1:
        found, why = way_between(asked, device.type, device.type)
        if found != asked:
            yield "engine.values", f"{why}; leave it out"


def make_model(
    spec: ModelSpec,
    weights: Path | None,
    deployment: Deployment,
    device: torch.device,
    dtype: torch.dtype,
) -> Model:
    """The model that *spec* names, which reads configuration files in *weights* but no tensor."""
    options = read_options(spec.options, deployment.model_kwargs)
    model: Model = load_object(spec.model)(BuildContext(weights, dtype, device, options))
    return model


def pick_device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise SetupError(f"--device {name}: this PyTorch ({torch.__version__}) sees no CUDA device; use --device cpu")
    return torch.device(name)


def rank_device(config: WorkerConfig) -> torch.device:
    """The device of *config*'s rank: on CUDA, each rank of each copy of the layout has one of its own."""
    deployment = config.deployment
    device = pick_device(deployment.device)
    if device.type != "cuda" or config.own_device or ranks_on_device(deployment) == 1:
        return device
    number = config.replica * ranks_of(deployment.placement) + config.rank
    there = torch.cuda.device_count()
    if number >= there:
        raise SetupError(
            f"rank {config.rank} of copy {config.replica} needs cuda:{number}, and this machine has "
            f"{counted(there, 'GPU')}; the layout has {ranks_of(deployment.placement)} ranks × "
            f"{deployment.replicas} replicas"
        )
    return torch.device("cuda", number)


def _threads(deployment: Deployment) -> int | None:
    """CPU threads of one worker: as the deployment says, else all cores, which the ranks share."""
    ranks, threads = ranks_on_device(deployment), deployment.engine.threads
    return threads if threads is not None or ranks == 1 else max(1, torch.get_num_threads() // ranks)


def _free(config: WorkerConfig, device: torch.device, meshes: Meshes) -> int:
    """Bytes that this rank may plan with. Ranks on CPUs share what their machine has, also with those of other nodes
    and of other copies."""
    everyone = max([ranks_on_device(config.deployment), *(mesh.size for mesh in meshes.values())])
    return agreed_memory(free_memory, device, meshes, config.sharing or everyone)


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The asked-for dtype; by default bfloat16 on a GPU and float32 on the CPU, where it is exact: answers are those of
    the reference, token for token, alone and in any batch."""
    if name is not None:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def runner_name(deployment: Deployment, device: torch.device) -> str:
    """The engine's runner: as the deployment says, else captured graphs on a GPU."""
    return deployment.engine.runner or ("graphs" if device.type == "cuda" else "eager")


def reserved_bytes(deployment: Deployment, device: torch.device) -> int:
    """Bytes of *device* that no pool may take, for what is allocated after them. The CPU's share leaves enough."""
    if device.type != "cuda":
        return 0
    several = ranks_of(deployment.placement) > 1
    lanes = _LANES_RESERVE if several and way_between(deployment.engine.values, "cuda", "cuda")[0] == "nccl" else 0
    return lanes + (_GRAPHS_RESERVE if runner_name(deployment, device) == "graphs" else _PLAIN_RESERVE)


def step_bytes(spec: NodeSpec, node: Node, deployment: Deployment, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of *device* that the largest steps of *node* need besides (:meth:`Node.step_bytes`)."""
    if device.type != "cuda":
        return 0
    tokens = deployment.scheduler.step_tokens(device.type)
    items = [tokens * entry.step_items for entry in spec.entries if entry.chunk is not None]
    return node.step_bytes(max(items), device, dtype) if items else 0


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
    if ranks == 1:
        return
    if name == "inline":
        yield "executor", f"{name!r} runs one process, and the layout has {ranks} ranks; use 'processes'"
    if deployment.device is not None and ":" in deployment.device:
        yield "device", f"{deployment.device!r} is one device for {ranks} ranks; use 'cuda': rank N takes cuda:N"
    if deployment.engine.trace is not None:
        yield "engine.trace", "a timeline shows one rank; leave it out where the layout has several"


def ranks_on_device(deployment: Deployment) -> int:
    """Processes of the whole deployment, which share the host's memory and cores."""
    return ranks_of(deployment.placement) * deployment.replicas


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


def _load_nodes(
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

"""What a worker has of its machine: a device, a dtype, threads, memory; and how it runs nodes there."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from mstar.cluster.base import WorkerConfig
from mstar.engine.compile import compiler_fault
from mstar.nn.node import Node
from mstar.spec.deployment import Deployment, EngineOptions
from mstar.spec.errors import SetupError, counted
from mstar.spec.graph import NodeSpec
from mstar.spec.placement import ranks_of
from mstar.worker.layout import Meshes, agreed_memory
from mstar.worker.memory import free_memory
from mstar.worker.tensor_channel import way_between

__all__ = [
    "compile_faults",
    "compiles",
    "cpu_threads",
    "gpu_faults",
    "pick_device",
    "pick_dtype",
    "plannable",
    "rank_device",
    "ranks_on_device",
    "reserved_bytes",
    "runner_name",
    "sharers",
    "step_bytes",
    "values_faults",
]

log = logging.getLogger(__name__)

_GRAPHS_RESERVE = 3 << 29
"""1.5 GiB of a GPU for what comes after the pools when steps are captured: the graphs' private memory, workspaces of
attention and matrix products, activations of the largest step."""
_PLAIN_RESERVE = 1 << 28
"""0.25 GiB: the same without graphs."""
_LANES_RESERVE = 1 << 29
"""0.5 GiB for NCCL's communicators with other ranks, which are opened when these are there, and what is on its way."""


def pick_device(name: str | None) -> torch.device:
    """The device that *name* says, by default a GPU if there is one.

    :raises SetupError: a GPU is asked for that is not there.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise SetupError(f"--device {name}: this PyTorch ({torch.__version__}) sees no CUDA device; use --device cpu")
    device = torch.device(name)
    if device.type == "cuda" and device.index is not None and device.index >= (there := torch.cuda.device_count()):
        raise SetupError(f"--device {name}: this machine has {counted(there, 'GPU')}, up to cuda:{there - 1}")
    return device


def rank_device(config: WorkerConfig) -> torch.device:
    """The device of *config*'s rank: on CUDA, each rank of each copy of the layout has one of its own, unless the
    deployment says which (``rank_devices``)."""
    deployment = config.deployment
    device = pick_device(deployment.device)
    alone = ranks_on_device(deployment) == 1 and not deployment.rank_devices
    if device.type != "cuda" or config.own_device or alone:
        return device
    number = deployment.gpu_of(config.rank, config.replica)
    there = torch.cuda.device_count()
    if number >= there:
        raise SetupError(
            f"rank {config.rank} of copy {config.replica} needs cuda:{number}, and this machine has "
            f"{counted(there, 'GPU')}; the layout has {ranks_of(deployment.placement)} ranks × "
            f"{deployment.replicas} replicas"
        )
    return torch.device("cuda", number)


def gpu_faults(deployment: Deployment, device: torch.device) -> Iterator[tuple[str, str]]:
    """Whether the GPUs that the ranks of *deployment* take are on this machine. Nothing where it has none: then it is
    not the machine that serves."""
    ranks, everyone = ranks_of(deployment.placement), ranks_on_device(deployment)
    if device.type != "cuda" or deployment.executor == "ray" or not torch.cuda.is_available():
        return
    there = torch.cuda.device_count()
    if deployment.rank_devices:
        if (last := max(deployment.rank_devices)) >= there:
            yield "rank_devices", f"cuda:{last}: this machine has {counted(there, 'GPU')}, up to cuda:{there - 1}"
    elif everyone > max(there, 1):
        key, would = ("replicas", there // ranks) if ranks <= there else ("placement", 0)
        nearest_right = f"; replicas: {would} would do" if would else "; ranks may share one (rank_devices)"
        layout = f"{counted(ranks, 'rank')} × {counted(deployment.replicas, 'replica')}"
        yield key, f"{layout} need a GPU each, and this machine has {counted(there, 'GPU')}{nearest_right}"


def cpu_threads(deployment: Deployment) -> int | None:
    """CPU threads of one worker: as the deployment says, else all cores, which the ranks share."""
    ranks, threads = ranks_on_device(deployment), deployment.engine.threads
    return threads if threads is not None or ranks == 1 else max(1, torch.get_num_threads() // ranks)


def plannable(config: WorkerConfig, device: torch.device, meshes: Meshes) -> int:
    """Bytes that this rank may plan with. Ranks on CPUs share what their machine has, also with those of other nodes
    and of other copies; on a GPU, those that have the same one."""
    everyone = sharers(config.deployment, device, config.rank, config.replica)
    if device.type != "cuda":
        everyone = config.sharing or max([everyone, *(mesh.size for mesh in meshes.values())])
    return agreed_memory(free_memory, device, meshes, everyone)


def sharers(deployment: Deployment, device: torch.device, rank: int, replica: int = 0) -> int:
    """How many processes of *deployment* have the memory of *device* in common, which is that of *rank*."""
    if device.type != "cuda":
        return ranks_on_device(deployment)
    return max(1, deployment.rank_devices.count(deployment.gpu_of(rank, replica)))


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The asked-for dtype; by default bfloat16 on a GPU and float32 on the CPU, where it is exact: answers are those of
    the reference, token for token, alone and in any batch."""
    if name is not None:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def ranks_on_device(deployment: Deployment) -> int:
    """Processes of the whole deployment, which share the host's memory and cores."""
    return ranks_of(deployment.placement) * deployment.replicas


def runner_name(deployment: Deployment, device: torch.device) -> str:
    """The engine's runner: as the deployment says, else captured graphs on a GPU."""
    return deployment.engine.runner or ("graphs" if device.type == "cuda" else "eager")


def reserved_bytes(deployment: Deployment, device: torch.device) -> int:
    """Bytes of *device* that no pool may take, for what is allocated after them. The CPU's share leaves enough."""
    if device.type != "cuda":
        return 0
    others = [
        rank for rank in range(1, ranks_of(deployment.placement)) if deployment.gpu_of(rank) != deployment.gpu_of(0)
    ]
    lanes = _LANES_RESERVE if others and way_between(deployment.engine.values, "cuda", "cuda")[0] == "nccl" else 0
    return lanes + (_GRAPHS_RESERVE if runner_name(deployment, device) == "graphs" else _PLAIN_RESERVE)


def step_bytes(spec: NodeSpec, node: Node, deployment: Deployment, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of *device* that the largest steps of *node* need besides (:meth:`Node.step_bytes`)."""
    if device.type != "cuda":
        return 0
    tokens = deployment.scheduler.step_tokens(device.type)
    items = [tokens * entry.step_items for entry in spec.entries if entry.chunk is not None]
    return node.step_bytes(max(items), device, dtype) if items else 0


def compiles(engine: EngineOptions, device: torch.device) -> bool:
    """Whether the layers of nodes on *device* are compiled."""
    if engine.compile != "cuda":
        return bool(engine.compile)
    fault = next(compile_faults(device, engine.deterministic), None) if device.type == "cuda" else None
    if fault is not None:
        log.warning("nothing is compiled: %s", fault[1])
    return device.type == "cuda" and fault is None


def compile_faults(device: torch.device, deterministic: bool) -> Iterator[tuple[str, str]]:
    """Why nothing can be compiled for *device*, by the key of the deployment."""
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
    if asked is not None and (ranks := ranks_of(deployment.placement)) > 1:
        shared = any(deployment.gpu_of(rank) == deployment.gpu_of(0) for rank in range(1, ranks))
        found, why = way_between(asked, device.type, device.type, shared)
        if found != asked:
            yield "engine.values", f"{why}; leave it out"

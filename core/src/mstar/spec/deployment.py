"""The deployment file: how one model is served. Typed YAML; unknown keys are refused with the nearest known one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from mstar.spec.errors import DeploymentError, counted, nearest
from mstar.spec.placement import NodePlacement, Placed, ranks_of, same_form

__all__ = ["Deployment", "EngineOptions", "RayOptions", "SchedulerOptions", "merge_deployment"]

_DTYPES = ("float32", "bfloat16", "float16")
_OPTIONS = frozenset({"knobs", "kwargs", "options", "model_options", "parameters"})
"""Words that people try for ``model_kwargs``."""
_MAPPING = "this must be a mapping (key: value)"
_WORDS = {"tuple_type": "this must be a list", "dict_type": _MAPPING, "model_type": _MAPPING}
"""What pydantic says in Python's words."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SchedulerOptions(_Section):
    """How work is chosen."""

    policy: str = Field("default", description="A name registered through `mstar_schedulers`.")
    max_step_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens of one step, prefill chunks and decodes together; default: 1024 on a GPU, 512 on the "
        "CPU.",
    )
    max_step_rows: int = Field(256, ge=1, description="Most requests in one step.")
    max_mixed_rows: int | None = Field(
        None,
        ge=0,
        description="While more requests than this decode, prompts have steps of their own, in turn with theirs; "
        "default: 48 on a GPU, no limit on the CPU.",
    )
    max_queue: int = Field(1024, ge=0, description="Requests that may wait; one more is answered 429.")
    fairness: Literal["fifo", "tenant"] = Field(
        "tenant", description="`tenant` shares the rows between tenants, `fifo` serves in order of arrival."
    )

    def step_tokens(self, device: str) -> int:
        """``max_step_tokens``, or the default of a *device* of this type (``cpu``, ``cuda``)."""
        if self.max_step_tokens is not None:
            return self.max_step_tokens
        return 512 if device == "cpu" else 1024

    def mixed_rows(self, device: str) -> int | None:
        """``max_mixed_rows``, or the default of a *device* of this type; ``None``: no limit.

        A captured step with prompts in it attends in tiles of many queries, whatever a row has: with hundreds of
        decoding rows it takes several times as long as a step of theirs and one of the prompts."""
        if self.max_mixed_rows is not None:
            return self.max_mixed_rows
        return None if device == "cpu" else 48


class EngineOptions(_Section):
    """How steps are run."""

    runner: str | None = Field(
        None, description="A name registered through `mstar_engines`; default: `graphs` on a GPU, `eager` on the CPU."
    )
    attention: str | None = Field(None, description="Force an attention backend by name.")
    max_graph_tokens: int = Field(
        1024,
        ge=0,
        description="Runner `graphs`: most tokens of a step with prompts in it that runs as a captured graph; 0: none "
        "does.",
    )
    memory_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the memory that weights and sized pools leave, for pools without a size; default: 0.9 on "
        "a GPU, 0.25 on the CPU.",
    )
    lookahead: bool | None = Field(
        None, description="Plan and launch a step while the one before still runs; default: on a GPU."
    )
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; default: all cores.")
    trace: str | None = Field(
        None, description="File for a timeline of host, device and requests; an earlier one becomes `NAME.old.json`."
    )
    deterministic: bool = Field(
        False,
        description="A request's tokens are the same alone and in any batch, however its prompt is cut: on a GPU with "
        "slower kernels of M*'s own, on the CPU in float32 anyway. What cannot be so is refused at the start.",
    )
    compile: bool | Literal["cuda"] = Field(
        False,
        description="Compile the layers of the nodes with `torch.compile`, at their first step; what was compiled is "
        "kept in `<MSTAR_CACHE>/compile`. Needs a C++ compiler (on a GPU, Triton). `cuda`: on a GPU that has what it "
        "takes, nowhere else.",
    )
    compile_rounding: bool = Field(
        False,
        description="Compiled layers round what lies between fused operations, as plain calls do; slower.",
    )
    values: Literal["nccl", "gloo", "shm"] | None = Field(
        None,
        description="How large tensors pass between rank 0 and the others: from GPU to GPU by `nccl`, between CPUs by "
        "`gloo`, or through the host's `shm` (shared memory); default: `nccl` where both have a GPU, else `shm`. What "
        "cannot be opened is `shm`; the log says so.",
    )
    symmetric_bytes: int = Field(
        1_048_576,
        ge=0,
        description="Nodes on several GPUs that see each other's memory: sums of up to so many bytes, as decode steps "
        "have, go through symmetric memory, in one kernel, and not through NCCL; 0: none do. Takes 4 times as much "
        "memory for each rank of a node.",
    )
    idle_check_s: float = Field(1.0, gt=0, description="How often an idle worker checks its pools' books.")


class RayOptions(_Section):
    """Where `executor: ray` runs the workers."""

    address: str = Field(
        "auto",
        description="`HOST:PORT` of the cluster's head; `auto`: the cluster that this machine belongs to, or "
        "`RAY_ADDRESS`.",
    )
    namespace: str = Field("mstar", min_length=1, description="Ray's namespace for the actors' names.")
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "PACK",
        description="How the ranks of one copy are placed: on few nodes, on one, on many, each on its own.",
    )
    cpus: float | None = Field(
        None, gt=0, description="CPUs of each rank; on a CPU also its threads. Default: `engine.threads`, or 1."
    )
    gpus: float | None = Field(
        None,
        ge=0,
        le=1,
        description="GPUs of each rank, less than 1 to share one. Default: 1, with `device: cpu` or in a cluster "
        "without GPUs 0.",
    )
    memory: int | None = Field(None, ge=1, description="Bytes of the host's memory that Ray counts for each rank.")
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="What else a rank's node must have, by Ray's names: `{fast_disk: 1}`."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the workers.")
    max_restarts: int = Field(
        -1, ge=-1, description="How often Ray starts the actor of a rank again; -1: as often as it takes."
    )
    placement_timeout_s: float = Field(
        300.0, gt=0, description="How long the start waits for nodes that have all this (an autoscaler's, say)."
    )

    @field_validator("address")
    @classmethod
    def _is_address(cls, address: str) -> str:
        if address.startswith("ray://"):
            raise ValueError(
                f"{address!r} is for Ray's client, which workers cannot reach; run the server on a node of the cluster "
                "and use 'auto', or HOST:PORT of the head (6379)"
            )
        if address != "auto" and re.fullmatch(r"[^\s/]+:[0-9]{1,5}", address) is None:
            raise ValueError(f"{address!r} is no address of a Ray cluster; use auto, or HOST:PORT")
        return address


class Deployment(_Section):
    """One model's deployment. Its defaults come from the family's package."""

    model: str = Field(description="The model's key; `mstar models` lists them.")
    required_plugins: tuple[str, ...] = Field(
        (), description="Plugins that must be there, as pip has them: `mstar-tts>=0.2`. The start names all that miss."
    )
    weights: str | None = Field(
        None, description="Folder in the published layout, relative to the file's own, or HUB_ID[@REVISION]."
    )
    layout: str | None = Field(
        None,
        description="One of the layouts that ship with the model's package, by name: what it says comes before what "
        "this file says. `mstar models KEY` lists them.",
    )
    placement: dict[str, Placed] = Field(
        default_factory=dict,
        description="Node → where it runs: a rank, several (replicas), `{ranks: [0, 1], tp: 2}`, or a place for each "
        "walk (`{prefill: 1, decode: 0}`); default: rank 0. A rank is a process with a device of its own; see "
        "[layouts](layouts/README.md).",
    )
    replicas: int = Field(
        1, ge=1, le=64, description="Copies of the whole layout, each on ranks of its own; requests go to the idlest."
    )
    rank_devices: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (),
        description="Number of the GPU of each rank, those of all copies one after the other; ranks may share one "
        "(`[0, 0]`). Default: rank N takes cuda:N. On a CPU it says nothing.",
    )
    resources: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Resource → fields of its declaration to change (a pool's size, say)."
    )
    model_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="The model's options; `mstar models KEY` lists them."
    )
    max_concurrent_requests: int = Field(32, ge=1, description="Requests that run at once; others wait.")
    max_sessions: int = Field(8, ge=0, description="Sessions that are kept.")
    session_ttl_s: float = Field(600.0, gt=0, description="Seconds after which an unused session is dropped.")
    engine: EngineOptions = EngineOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    executor: str = Field("processes", description="A name registered through `mstar_executors`.")
    ray: RayOptions = RayOptions()
    device: str | None = Field(None, description="cpu, cuda or cuda:N; default: cuda when there is one.")
    dtype: str | None = Field(
        None, description="float32, bfloat16 or float16; default: bfloat16 on a GPU, float32 on the CPU."
    )
    request_timeout_s: float | None = Field(None, gt=0, description="Seconds that a request may take, queue included.")

    def gpu_of(self, rank: int, replica: int = 0) -> int:
        """The number of the GPU that *rank* of copy *replica* has, where ranks have GPUs."""
        number = replica * ranks_of(self.placement) + rank
        return self.rank_devices[number] if self.rank_devices else number

    @field_validator("required_plugins")
    @classmethod
    def _are_requirements(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        for line in lines:
            try:
                Requirement(line)
            except InvalidRequirement:
                raise ValueError(f"{line!r} is not a requirement such as 'mstar-tts>=0.2'") from None
        return lines

    @field_validator("rank_devices")
    @classmethod
    def _is_one_for_each(cls, numbers: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if numbers and "placement" in info.data and "replicas" in info.data:
            ranks = ranks_of(info.data["placement"]) * info.data["replicas"]
            if len(numbers) != ranks:
                raise ValueError(f"{counted(len(numbers), 'number')} for {counted(ranks, 'rank')}; give one for each")
        return numbers

    @field_validator("device")
    @classmethod
    def _is_device(cls, name: str | None) -> str | None:
        if name is not None and re.fullmatch(r"cpu|cuda(:[0-9]+)?", name) is None:
            raise ValueError(f"device {name!r} is not one that M* knows; use cpu, cuda or cuda:N")
        return name

    @field_validator("dtype")
    @classmethod
    def _is_dtype(cls, name: str | None) -> str | None:
        if name is not None and name not in _DTYPES:
            raise ValueError(f"dtype {name!r} is not supported{nearest(name, _DTYPES)}")
        return name


def merge_deployment(
    model: str,
    *layers: dict[str, Any] | None,
    knobs: Iterable[str] = (),
) -> Deployment:
    """Merge *layers* (package defaults, file, flags; later ones win, mappings are merged) into a checked deployment.

    :param knobs: names of the model's request parameters, for the hint when one is taken for a deployment's key.
    :raises DeploymentError: with every fault.
    """
    merged: dict[str, Any] = {"model": model}
    for layer in layers:
        _merge(_without_other_forms(merged, layer or {}), layer or {})
    try:
        return Deployment.model_validate(merged)
    except ValidationError as error:
        options = merged.get("model_kwargs")
        known = options if isinstance(options, dict) else {}
        faults = [_fault(e, known, frozenset(knobs)) for e in error.errors(include_url=False)]
        raise DeploymentError(faults) from None


def _without_other_forms(merged: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """*merged* without the places that *layer* gives in another form: a place for each walk stands instead of a mesh,
    and a mesh instead of it, not beside."""
    before, after = merged.get("placement"), layer.get("placement")
    if isinstance(before, dict) and isinstance(after, dict):
        kept = {node: place for node, place in before.items() if same_form(place, after.get(node) or place)}
        merged["placement"] = kept
    return merged


def _merge(into: dict[str, Any], layer: dict[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            into[key] = dict(into[key])
            _merge(into[key], value)
        elif value is not None:
            into[key] = value


def _fault(error: Any, options: Mapping[str, Any], knobs: frozenset[str]) -> tuple[str, str]:
    """*options*: the ``model_kwargs`` that the deployment has."""
    path = ".".join(str(p) for p in error["loc"] if p != "[key]")  # pydantic's mark for a fault of the key itself
    if error["type"] == "value_error":
        return path, error["msg"].removeprefix("Value error, ")
    if error["type"] != "extra_forbidden":
        return path, f"{_WORDS.get(error['type'], error['msg'])} (got {error['input']!r})"
    if path in options:
        return path, f"unknown key; did you mean 'model_kwargs: {{{path}: …}}'?"
    if path in _OPTIONS:
        return path, "unknown key; did you mean 'model_kwargs'? A model's options stand there"
    if path in knobs:
        return path, "unknown key: this is a parameter of requests; options of the model stand under 'model_kwargs:'"
    sections: dict[str, type[BaseModel]] = {
        "engine": EngineOptions,
        "scheduler": SchedulerOptions,
        "ray": RayOptions,
        "placement": NodePlacement,
    }
    section = sections.get(str(error["loc"][0]), Deployment)
    return path, f"unknown key{nearest(str(error['loc'][-1]), section.model_fields)}"

"""Shapes 9 to 13: denoising, rollouts with a session, interactive worlds, robot policies, unified models."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mstar.nn.model import Demand, Model, Outcome, Run
from mstar.nn.node import Node, Step
from mstar.patterns.denoise import DenoiseFacts, DenoiseLoop
from mstar.spec.graph import (
    CLIENT,
    Call,
    EndOf,
    Entry,
    Graph,
    Index,
    Loop,
    NodeSpec,
    Param,
    Partition,
    Port,
    Pull,
    Seq,
    Stream,
    Times,
)
from mstar.spec.request import EngineRequest
from mstar.spec.resources import Positions, RecurrentState, ResourceSpec, Sampler, WindowKV
from mstar.testing.miniatures.catalog import CHUNK, CONTROLS, VOCAB, WINDOW
from mstar.testing.miniatures.text import (
    IDS,
    KV,
    PROMPT,
    SHAPE,
    TEXT,
    TOKEN,
    SumNode,
    context_sums,
    generate,
    id_sum,
    one_hot,
    text_demand,
)

__all__ = ["Denoise", "Policy", "Rollout", "Unified", "World"]

IMAGE = Stream("image", "main", CLIENT, Port("image", "float32", ("H", "W", 3), "stacked"), "image")


# --- shape 9
# -----------------------------------------------------------------------------------------------------------


class Dit(Node):
    """Reads the prompt into KV once per guidance branch, then predicts a velocity from latent and frozen context."""

    def read(self, step: Step, ids: Tensor) -> dict[str, Any]:
        return {"seen": context_sums(step, ids)[step.last]}

    def velocity(
        self, step: Step, latent: Tensor, seen: Tensor, branch: Tensor, index: Tensor, steps: Tensor
    ) -> dict[str, Any]:
        probe = torch.zeros(latent.shape[0], 1, VOCAB, dtype=step.dtype, device=latent.device)
        # One probe token per row: its own value counts for nothing, the frozen context's mean for the rest.
        mean = step["kv"].attend(0, probe, probe, probe)[:, 0]
        total = id_sum(mean.float() * (step["positions"].positions + 1)[:, None])
        drive = total / (1 + branch) / VOCAB + seen * 0
        return {"velocity": latent * 0.5 - drive.view(-1, *[1] * (latent.ndim - 1))}

    def update(
        self,
        step: Step,
        latent: Tensor,
        cond: Tensor,
        uncond: Tensor,
        index: Tensor,
        steps: Tensor,
        guidance: Tensor,
    ) -> dict[str, Any]:
        """One Euler step of size 1/steps."""
        shape = (-1, *[1] * (latent.ndim - 1))
        guided = uncond + guidance.view(shape) * (cond - uncond)
        return {"latent": latent - guided / steps.view(shape)}


class Picture(Node):
    def forward(self, step: Step, latent: Tensor) -> dict[str, Any]:
        return {"image": latent.clamp(0, 255).round()}


class Denoise(DenoiseLoop):
    """Shape 9: a denoise loop with guidance branches; requests at different steps share a step."""

    def facts(self) -> DenoiseFacts:
        latent = Port("latent", "float32", ("H", "W", 3), "stacked")
        return DenoiseFacts(latent, Port("seen", "int64", (), "stacked"), IMAGE, kv=SHAPE)

    def latent_tokens(self, request: EngineRequest) -> int:
        return 1

    def build(self, node: str) -> Node:
        return Dit() if node == "denoiser" else Picture()


# --- shape 10
# ----------------------------------------------------------------------------------------------------------


class WorldStep(Node):
    """Rolls the world forward one window: the state decays and takes in the window's action."""

    def forward(self, step: Step, drive: Tensor, index: Tensor) -> dict[str, Any]:
        state = step["world"].read("x")
        state = state * 0.5 + (drive + index)[:, None]
        step["world"].write("x", state)
        return {"state": state}


class Rollout(Model):
    """Shape 10: a windowed rollout whose state a session keeps and a later request resumes."""

    def graph(self) -> Graph:
        scalars = (Port("drive", "float32", (), "stacked"), Port("index", "float32", (), "stacked"))
        state = Port("state", "float32", (3,), "stacked")
        call = Call("world", inputs={"drive": Param("drive"), "index": Index()}, emit={"state": "state"})
        return Graph(
            nodes=(NodeSpec("world", (Entry(inputs=scalars, outputs=(state,), resources=("world",)),)),),
            walks={"roll": Loop(call, Times(Param("windows")))},
            partitions=(Partition("main", ("roll",)),),
            streams=(Stream("state", "main", CLIENT, state, "state"),),
            sessions=("world",),
        )

    def resources(self) -> Mapping[str, ResourceSpec]:
        return {"world": RecurrentState({"x": ((3,), "float32")})}

    def build(self, node: str) -> Node:
        return WorldStep()


# --- shape 11
# ----------------------------------------------------------------------------------------------------------


class LiveWorld(Node):
    """Each frame is the mean of the controls in a rolling window of KV."""

    def forward(self, step: Step, controls: Tensor) -> dict[str, Any]:
        value = torch.nn.functional.pad(controls, (0, VOCAB - CONTROLS))[:, None].to(step.dtype)
        zero = torch.zeros_like(value)
        mean = step["window"].attend(0, zero, zero, value)[:, 0, :CONTROLS]
        return {"frames": mean.float()}


class World(Model):
    """Shape 11: an interactive world: rolling KV, one frame per control that the client sends."""

    def graph(self) -> Graph:
        item = Port("control", "float32", (CONTROLS,), "stacked")
        controls = Port("controls", "float32", ("N", CONTROLS), "packed")
        frames = Port("frames", "float32", ("N", CONTROLS), "packed")
        entry = Entry(inputs=(controls,), outputs=(frames,), resources=("window",))
        call = Call("world", inputs={"controls": Pull("controls")}, emit={"frames": "frames"})
        return Graph(
            nodes=(NodeSpec("world", (entry,)),),
            walks={"live": Loop(call, EndOf("controls"))},
            partitions=(Partition("main", ("live",)),),
            streams=(
                Stream("controls", CLIENT, "main", item, "state", max_items=1024),
                Stream("frames", "main", CLIENT, item, "state"),
            ),
        )

    def resources(self) -> Mapping[str, ResourceSpec]:
        window = WindowKV(layers=1, kv_heads=1, query_heads=1, head_dim=VOCAB, window=WINDOW)
        return {"window": window}

    def build(self, node: str) -> Node:
        return LiveWorld()


# --- shape 12
# ----------------------------------------------------------------------------------------------------------


class PolicyNode(Node):
    def forward(self, step: Step, observation: Tensor) -> dict[str, Any]:
        """One observation ``[rows, 3]`` becomes a chunk of actions ``[rows, CHUNK, 3]``."""
        gains = torch.arange(1, CHUNK + 1, dtype=torch.float32, device=observation.device)
        return {"actions": observation[:, None, :] * gains[None, :, None]}


class Policy(Model):
    """Shape 12: observation → action chunk, many a second over one connection."""

    def graph(self) -> Graph:
        item = Port("observation", "float32", (3,), "stacked")
        observation = Port("observation", "float32", ("N", 3), "packed")
        actions = Port("actions", "float32", (CHUNK, 3), "stacked")
        call = Call("policy", inputs={"observation": Pull("observations")}, emit={"actions": "actions"})
        return Graph(
            nodes=(NodeSpec("policy", (Entry(inputs=(observation,), outputs=(actions,)),)),),
            walks={"act": Loop(call, EndOf("observations"))},
            partitions=(Partition("main", ("act",)),),
            streams=(
                Stream("observations", CLIENT, "main", item, "state", max_items=1024),
                Stream("actions", "main", CLIENT, actions, "action"),
            ),
        )

    def build(self, node: str) -> Node:
        return PolicyNode()


# --- shape 13
# ----------------------------------------------------------------------------------------------------------


class UnifiedNode(SumNode):
    """The text model of shape 1 that also paints from its own frozen context."""

    def imagine(self, step: Step, canvas: Tensor) -> dict[str, Any]:
        """The canvas' tokens see the whole context and each other, and leave no trace in the cache. ``[N, 3]``."""
        ids = torch.ones(canvas.shape[0], dtype=torch.int64, device=canvas.device)
        value = one_hot(ids, step.dtype)  # every canvas token counts as id 1
        zero = torch.zeros_like(value)
        mean = step["kv"].attend(0, zero, zero, value, causal=False)[:, 0]
        return {"canvas": canvas * 0.5 + id_sum(mean)[:, None]}


class Unified(Model):
    """Shape 13: understanding and generation walks on one node."""

    def graph(self) -> Graph:
        canvas = Port("canvas", "float32", ("P", 3), "packed")
        text = Entry(
            inputs=(IDS,), outputs=(TOKEN,), chunk="ids", resources=("kv", "positions", "sampler"), prefix=True
        )
        imagine = Entry("imagine", (canvas,), (canvas,), resources=("kv",), frozen=("kv",))
        call = Call("model", outputs={"token": "token"}, emit={"token": "text"})
        paint = Call("model", "imagine", {"canvas": "canvas"}, {"canvas": "canvas"})
        show = Call("model", "imagine", {"canvas": "canvas"}, {"canvas": "canvas"}, {"canvas": "pixels"})
        return Graph(
            nodes=(NodeSpec("model", (text, imagine)),),
            walks={"write": generate(call), "paint": Seq(Loop(paint, Times(Param("steps"))), show)},
            partitions=(Partition("main", ("write", "paint")),),
            streams=(TEXT, Stream("pixels", "main", CLIENT, Port("pixel", "float32", (3,), "stacked"), "state")),
            inputs=(PROMPT, canvas),
        )

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        yield Run("write")
        if "state" in request.want or not request.want:
            yield Run("paint")

    def resources(self) -> Mapping[str, ResourceSpec]:
        return {"kv": KV, "positions": Positions(), "sampler": Sampler(vocab=VOCAB)}

    def build(self, node: str) -> Node:
        return UnifiedNode()

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        for demand in text_demand(request):
            yield Demand(demand.resource, demand.context, demand.tokens + len(request.inputs["canvas"]))

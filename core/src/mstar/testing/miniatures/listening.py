"""Shape 4 again: recognition of a live stream, whose labels leave while the client still speaks."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mstar.nn.model import Model, Outcome, Run
from mstar.nn.node import Node, Packed, Step
from mstar.spec.graph import CLIENT, Call, EndOf, Entry, Fixed, Graph, Loop, NodeSpec, Partition, Port, Pull, Stream
from mstar.spec.request import EngineRequest
from mstar.spec.resources import RecurrentState, ResourceSpec
from mstar.testing.miniatures.catalog import HOP, HOPS, PAUSE, VOCAB
from mstar.testing.miniatures.text import TEXT

__all__ = ["Scribe"]

LEVELS = 2 * VOCAB  # distance of two levels, inverted
STEADY = 0.75 / LEVELS  # most that a hop of one level may vary: an edge, or what a resampler leaves of it, is no level
SILENCE = 0
SPACE = VOCAB - 2
SPEAKING, PAUSED = 1, 2  # 0, as states begin: nothing was said


class ScribeNode(Node):
    """A level that is held is a label each 20 ms, told when it begins; a pause between two words is a space.

    Its state is the level of the last steady hop (the label + 1, 0: silence), how many hops in a row had it, and
    whether anything was said, and then a pause.
    """

    def forward(self, step: Step, samples: Tensor) -> dict[str, Any]:
        """*samples*: of all rows of this step, one after the other, [N]. Returns `labels` int64, packed."""
        kept = {name: step["state"].read(name).clone() for name in ("level", "held", "said")}
        told: list[list[int]] = []
        for row, heard in enumerate(torch.split(samples, list(step.lengths))):
            state = tuple(int(kept[name][row, 0]) for name in kept)
            labels: list[int] = []
            for hop in torch.split(heard, HOP):
                state = _hear(state, hop, labels)
            for name, value in zip(kept, state, strict=True):
                kept[name][row, 0] = value
            told.append(labels)
        for name, tensor in kept.items():
            step["state"].write(name, tensor)
        flat = torch.tensor([label for labels in told for label in labels], dtype=torch.int64, device=step.device)
        return {"labels": Packed(flat, [len(labels) for labels in told])}


def _hear(state: tuple[int, ...], hop: Tensor, labels: list[int]) -> tuple[int, ...]:
    """The state after *hop*; what it tells is added to *labels*."""
    level, held, said = state
    if len(hop) < HOP or float(hop.max() - hop.min()) > STEADY:
        return state
    now = int(torch.round(hop.mean() * LEVELS))
    now = now if 0 < now <= VOCAB else SILENCE
    held = held + 1 if now == level else 1
    if now == SILENCE:
        return now, held, PAUSED if said == SPEAKING and held >= PAUSE * HOPS else said
    if held % HOPS == 1:
        labels += [SPACE] * (said == PAUSED) + [now - 1]
        said = SPEAKING
    return now, held, said


class Scribe(Model):
    """Hears a whole clip, or a client's stream as it comes; both in the same node."""

    def graph(self) -> Graph:
        sample = Port("sample", "float32", (), "stacked")
        samples, clip = (Port(name, "float32", ("S",), "packed") for name in ("samples", "clip"))
        labels = Port("labels", "int64", ("L",), "packed")
        whole = Call("ear", inputs={"samples": "clip"}, emit={"labels": "text"})
        piece = Call("ear", inputs={"samples": Pull("audio")}, emit={"labels": "text"})
        return Graph(
            nodes=(NodeSpec("ear", (Entry(inputs=(samples,), outputs=(labels,), resources=("state",)),)),),
            walks={"transcribe": whole, "listen": Loop(piece, EndOf("audio"))},
            partitions=(Partition("main", ("transcribe", "listen")),),
            streams=(
                Stream("audio", CLIENT, "main", sample, "audio", Fixed(2 * HOP), max_items=480_000),
                TEXT,
            ),
            inputs=(replace(clip, optional=True),),
        )

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        yield Run("listen" if request.inputs.get("clip") is None else "transcribe")

    def resources(self) -> Mapping[str, ResourceSpec]:
        number = ((1,), "int64")
        return {"state": RecurrentState({"level": number, "held": number, "said": number})}

    def build(self, node: str) -> Node:
        return ScribeNode()

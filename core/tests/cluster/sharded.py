"""A plugin: the first miniature, divided among the processes of a mesh; importable by name in child processes.

Each process knows the ids of its share of the vocabulary only: an answer is right if all of them ran every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import mstar
from mstar.nn.mesh import ProcessMesh
from mstar.nn.node import Node, Step
from mstar.spec.model import ModelSpec
from mstar.testing.miniatures import miniature
from mstar.testing.miniatures.common import VOCAB, encode
from mstar.testing.miniatures.speech import Tts
from mstar.testing.miniatures.text import Chat, one_hot, token_logits

POISON, SPLITTER = encode("KL")
"""So many of the one in a step that no process can take, and of the other that the last process cannot."""
MANY = 12


class ShardedSum(Node):
    def __init__(self, mesh: ProcessMesh):
        super().__init__()
        self.mesh = mesh
        share = -(-VOCAB // mesh.tp)
        mine = torch.zeros(VOCAB)
        mine[mesh.tp_rank * share : (mesh.tp_rank + 1) * share] = 1
        self.register_buffer("ids", mine * torch.arange(VOCAB))

    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        if (ids == POISON).sum() >= MANY:
            raise ValueError("poison")
        if self.mesh.tp_rank == self.mesh.tp - 1 and (ids == SPLITTER).sum() >= MANY:
            raise ValueError("only here")
        value = one_hot(ids, step.dtype)
        mean = step["kv"].attend(0, torch.zeros_like(value), torch.zeros_like(value), value)[:, 0]
        counts = torch.round(mean.float() * (step["positions"].positions + 1)[:, None])
        sums = counts @ self.ids
        if self.mesh.tp_group is not None:
            torch.distributed.all_reduce(sums, group=self.mesh.tp_group)
        token = (sums.long() + step["positions"].positions + 1) % VOCAB
        return {"token": step["sampler"].sample(token_logits(token[step.last]))}


class ShardedChat(Chat):
    def build(self, node: str) -> Node:
        return ShardedSum(self.context.mesh(node))

    def parallel_faults(self, node: str, tp: int, sp: int) -> Iterator[str]:
        if sp > 1:
            yield f"node {node!r} has no sequence to share"


class ShardedTts(Tts):
    def build(self, node: str) -> Node:
        return ShardedSum(self.context.mesh(node)) if node == "lm" else super().build(node)

    def parallel_faults(self, node: str, tp: int, sp: int) -> Iterator[str]:
        if node != "lm":
            yield f"node {node!r} runs in one process"


@mstar.hookimpl
def mstar_models() -> list[ModelSpec]:
    chat, tts = miniature("mini_chat").spec, miniature("mini_tts").spec
    return [
        replace(chat, key="sharded_chat", model="sharded:ShardedChat"),
        replace(tts, key="sharded_tts", model="sharded:ShardedTts"),
    ]

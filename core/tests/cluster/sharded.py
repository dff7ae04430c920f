"""A plugin: the first miniature, divided among the processes of a mesh; importable by name in child processes.

Each process knows the ids of its share of the vocabulary only: an answer is right if all of them ran every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import mstar
from mstar.nn.mesh import current_mesh
from mstar.nn.node import Node, Step
from mstar.spec.model import ModelSpec
from mstar.spec.resources import ResourceSpec
from mstar.testing.miniatures import miniature
from mstar.testing.miniatures.common import VOCAB, encode
from mstar.testing.miniatures.speech import Tts
from mstar.testing.miniatures.text import KV, Chat, one_hot, token_logits

POISON, SPLITTER = encode("KL")
"""So many of the one in a step that no process can take, and of the other that the last process cannot."""
MANY = 12
HEADS = 4
"""Each sees the same."""


class ShardedSum(Node):
    tensor_parallel = True

    def __init__(self) -> None:
        super().__init__()
        self.tp = current_mesh().tp
        share = -(-VOCAB // self.tp.size)
        mine = torch.zeros(VOCAB)
        mine[self.tp.rank * share : (self.tp.rank + 1) * share] = 1
        self.register_buffer("ids", mine * torch.arange(VOCAB))

    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        if (ids == POISON).sum() >= MANY:
            raise ValueError("poison")
        if self.tp.rank == self.tp.size - 1 and (ids == SPLITTER).sum() >= MANY:
            raise ValueError("only here")
        value = one_hot(ids, step.dtype).expand(-1, HEADS // self.tp.size, -1)
        mean = step["kv"].attend(0, torch.zeros_like(value), torch.zeros_like(value), value)[:, 0]
        counts = torch.round(mean.float() * (step["positions"].positions + 1)[:, None])
        sums = self.tp.all_reduce(counts @ self.ids)
        token = (sums.long() + step["positions"].positions + 1) % VOCAB
        return {"token": step["sampler"].sample(token_logits(token[step.last]))}


class ShardedChat(Chat):
    def resources(self) -> Mapping[str, ResourceSpec]:
        return {**super().resources(), "kv": replace(KV, kv_heads=HEADS, query_heads=HEADS)}

    def build(self, node: str) -> Node:
        return ShardedSum()


class ShardedTts(Tts):
    def resources(self) -> Mapping[str, ResourceSpec]:
        return {**super().resources(), "kv": replace(KV, kv_heads=HEADS, query_heads=HEADS)}

    def build(self, node: str) -> Node:
        return ShardedSum() if node == "lm" else super().build(node)


@mstar.hookimpl
def mstar_models() -> list[ModelSpec]:
    chat, tts = miniature("mini_chat").spec, miniature("mini_tts").spec
    return [
        replace(chat, key="sharded_chat", model="sharded:ShardedChat"),
        replace(tts, key="sharded_tts", model="sharded:ShardedTts"),
    ]

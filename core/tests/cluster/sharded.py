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
from mstar.spec.resources import PagedKV, ResourceSpec
from mstar.testing.miniatures import miniature
from mstar.testing.miniatures.common import VOCAB, encode
from mstar.testing.miniatures.speech import Tts
from mstar.testing.miniatures.text import KV, Chat, one_hot, token_logits

POISON, SPLITTER = encode("KL")
"""So many of the one in a step that no process can take, and of the other that the last process cannot."""
MANY = 12
HEADS = 4


class ShardedSum(Node):
    """Each head holds the ids of its share of the vocabulary; a process has its share of the heads."""

    tensor_parallel = True

    def __init__(self) -> None:
        super().__init__()
        self.group = current_mesh().tp
        share, heads = VOCAB // HEADS, HEADS // self.group.size
        own = torch.arange(VOCAB).view(HEADS, share)[self.group.rank * heads :][:heads]
        mine = torch.zeros(heads, VOCAB)
        for head, ids in enumerate(own):
            mine[head, ids] = 1
        self.register_buffer("mine", mine)

    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        if (ids == POISON).sum() >= MANY:
            raise ValueError("poison")
        if self.group.rank == self.group.size - 1 > 0 and (ids == SPLITTER).sum() >= MANY:
            raise ValueError("only here")
        value = one_hot(ids, step.dtype) * self.mine
        mean = step["kv"].attend(0, torch.zeros_like(value), torch.zeros_like(value), value)
        counts = torch.round(mean.float() * (step["positions"].positions + 1)[:, None, None])
        sums = self.group.all_reduce(counts.sum(1) @ torch.arange(VOCAB, dtype=torch.float32))
        token = (sums.long() + step["positions"].positions + 1) % VOCAB
        return {"token": step["sampler"].sample(token_logits(token[step.last]))}


class ShardedChat(Chat):
    def resources(self) -> Mapping[str, ResourceSpec]:
        return {**super().resources(), "kv": replace(KV, kv_heads=HEADS, query_heads=HEADS)}

    def build(self, node: str) -> Node:
        return ShardedSum()


class ShardedTts(Tts):
    def resources(self) -> Mapping[str, ResourceSpec]:
        kv = super().resources()["kv"]
        assert isinstance(kv, PagedKV)
        return {**super().resources(), "kv": replace(kv, kv_heads=HEADS, query_heads=HEADS)}

    def build(self, node: str) -> Node:
        return ShardedSum() if node == "lm" else super().build(node)


@mstar.hookimpl
def mstar_models() -> list[ModelSpec]:
    chat, tts = miniature("mini_chat").spec, miniature("mini_tts").spec
    return [
        replace(chat, key="sharded_chat", model="sharded:ShardedChat"),
        replace(tts, key="sharded_tts", model="sharded:ShardedTts"),
    ]

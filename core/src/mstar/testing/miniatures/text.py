"""Shapes 1, 2, 8 and 14: text models whose next token is an exact sum over what their state holds.

Attention with equal scores returns the mean of the values. With one-hot values and a known context length the counts of
all tokens follow exactly, so the model knows its context through the KV cache and through nothing else.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mstar.nn.model import Demand, Model, Outcome, Run
from mstar.nn.node import Node, Step
from mstar.nn.ops import delta
from mstar.nn.ops.delta import Spans
from mstar.patterns.encoder_decoder import EncoderDecoder, EncoderDecoderFacts
from mstar.patterns.shapes import DecoderShape
from mstar.spec.graph import CLIENT, Call, Entry, Graph, Loop, NodeSpec, Partition, Port, Seq, Stream, TokenStop
from mstar.spec.request import EngineRequest
from mstar.spec.resources import Positions, RecurrentState, ResourceSpec, Sampler
from mstar.testing.miniatures.catalog import HYBRID_LAYERS, PRIME, VOCAB
from mstar.testing.miniatures.common import vocabulary

__all__ = ["Chat", "Hybrid", "Planner", "Seq2Seq"]

IDS = Port("ids", "int64", ("T",), "packed")
TOKEN = Port("token", "int64", (), "stacked")
PROMPT = Port("prompt", "int64", ("T",), "packed")
TEXT = Stream("text", "main", CLIENT, TOKEN, "tokens")
SHAPE = DecoderShape(vocab=VOCAB, layers=1, heads=1, kv_heads=1, head_dim=VOCAB, max_tokens=256)
KV = replace(SHAPE.kv(), page_size=4)


def one_hot(ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[N, 1, VOCAB]``."""
    return torch.nn.functional.one_hot(ids, VOCAB).to(dtype)[:, None]


def id_sum(counts: Tensor) -> Tensor:
    """Sum of the ids of which *counts* ``[N, VOCAB]`` says how many there are, ``[N]`` float32."""
    return counts.float() @ torch.arange(VOCAB, dtype=torch.float32, device=counts.device)


def context_sums(step: Step, ids: Tensor) -> Tensor:
    """Sum of all token ids up to and including each token, ``[N]``, read back from the KV cache."""
    value = one_hot(ids, step.dtype)
    mean = step["kv"].attend(0, torch.zeros_like(value), torch.zeros_like(value), value)[:, 0]
    return id_sum(torch.round(mean.float() * (step["positions"].positions + 1)[:, None])).long()


def token_logits(token: Tensor) -> Tensor:
    """Logits ``[rows, VOCAB]`` with a clear favourite at *token*."""
    return torch.nn.functional.one_hot(token, VOCAB).float() * 8


def generate(call: Call, inputs: Mapping[str, Any] | None = None) -> Seq:
    """Prefill from the prompt, then decode until the sampler's bounds."""
    extra = dict(inputs or {})
    prefill = Call(call.node, call.entry, {"ids": "prompt", **extra}, call.outputs, call.emit)
    decode_call = Call(call.node, call.entry, {"ids": "token", **extra}, call.outputs, call.emit)
    return Seq(prefill, Loop(decode_call, TokenStop("token")))


LM_CALL = Call("lm", outputs={"token": "token"}, emit={"token": "text"})


def text_demand(request: EngineRequest) -> Iterable[Demand]:
    length = len(request.inputs.get("prompt", ())) + request.sampling["sampler"].max_tokens
    yield Demand("kv", tokens=length)


class SumNode(Node):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        token = (context_sums(step, ids) + step["positions"].positions + 1) % VOCAB
        return {"token": step["sampler"].sample(token_logits(token[step.last]))}


class Chat(Model):
    """Shape 1: autoregressive text with paged KV and prefix reuse."""

    def graph(self) -> Graph:
        entry = Entry(
            inputs=(IDS,), outputs=(TOKEN,), chunk="ids", resources=("kv", "positions", "sampler"), prefix=True
        )
        return Graph(
            nodes=(NodeSpec("lm", (entry,)),),
            walks={"generate": generate(LM_CALL)},
            partitions=(Partition("main", ("generate",)),),
            streams=(TEXT,),
            inputs=(PROMPT,),
        )

    def resources(self) -> Mapping[str, ResourceSpec]:
        return {"kv": KV, "positions": Positions(), "sampler": Sampler(vocab=VOCAB)}

    def build(self, node: str) -> Node:
        return SumNode()

    def vocabulary(self, sampler: str) -> Sequence[bytes]:
        return vocabulary()

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        return text_demand(request)


# --- shape 2
# -----------------------------------------------------------------------------------------------------------


MEMORY = Port("memory", "float32", ("S", VOCAB), "packed")


class MemoryEncoder(Node):
    def forward(self, step: Step, prompt: Tensor) -> dict[str, Any]:
        return {"memory": one_hot(prompt)[:, 0]}


class CrossDecoder(Node):
    def prime(self, step: Step, memory: Tensor) -> dict[str, Any]:
        """Write the cross keys and values. Values are scaled by their number, so that their mean is their sum."""
        lengths = torch.tensor(step.lengths, device=memory.device)
        value = (memory * lengths.repeat_interleave(lengths)[:, None])[:, None].to(step.dtype)
        step["cross"].write(0, torch.zeros_like(value), value)
        return {}

    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        own = context_sums(step, ids)[step.last]
        query = torch.zeros(ids.shape[0], 1, VOCAB, dtype=step.dtype, device=ids.device)
        counts = step["cross"].attend(0, query)[:, 0][step.last]
        source = id_sum(torch.round(counts.float())).long()
        token = (own + source + step["positions"].positions[step.last] + 1) % VOCAB
        return {"token": step["sampler"].sample(token_logits(token))}


class Seq2Seq(EncoderDecoder):
    """Shape 2: an encoder, then a decoder with cross-attention that is written once."""

    def facts(self) -> EncoderDecoderFacts:
        return EncoderDecoderFacts(replace(PROMPT, shape=("S",)), MEMORY, max_memory=64, decoder=SHAPE)

    def build(self, node: str) -> Node:
        return MemoryEncoder() if node == "encoder" else CrossDecoder()


# --- shape 8
# -----------------------------------------------------------------------------------------------------------


class HybridNode(Node):
    """Two recurrences in a state slot beside attention's sum, in each of *HYBRID_LAYERS* layers, where ids are shifted
    by the layer's number.

    *s*: ``s ← 2s + id mod 97``. Over a row of T tokens that is ``2^T s + Σ 2^(T-1-i) id_i``: nothing of it needs the
    rows' lengths on the host. *matrix*: a gated delta net that keeps under each token the one that came after it last;
    its convolution gives the keys one token late.
    """

    powers: Tensor
    taps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("powers", torch.tensor([pow(2, k, PRIME) for k in range(PRIME - 1)]), persistent=False)
        taps = torch.zeros(3, VOCAB, 4)
        taps[[0, 2], :, 3] = taps[1, :, 2] = 1  # queries and values: this token; keys: the one before
        self.register_buffer("taps", taps.flatten(0, 1), persistent=False)

    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        token = context_sums(step, ids)[step.last]
        spans = Spans(step.offsets, ids.shape[0])
        for layer in range(HYBRID_LAYERS):
            shifted = (ids + layer) % VOCAB
            token = token + self._recurrence(step, spans, shifted, layer) + self._recall(step, spans, shifted, layer)
        return {"token": step["sampler"].sample(token_logits(token % VOCAB))}

    def _recurrence(self, step: Step, spans: Spans, ids: Tensor, layer: int) -> Tensor:
        place = torch.arange(ids.shape[0], device=ids.device)
        terms = self._power(step.offsets[1:][spans.row_of] - 1 - place) * ids
        state: Tensor = step["state"].read("s", layer)[:, 0] * self._power(step.offsets.diff())
        state = state.index_add(0, spans.row_of, terms) % PRIME
        step["state"].write("s", state[:, None], layer)
        return state

    def _recall(self, step: Step, spans: Spans, ids: Tensor, layer: int) -> Tensor:
        """The token that followed each row's last one when that came last; 0 if it never did."""
        hot = one_hot(ids, step.dtype).expand(-1, 3, -1).flatten(1)
        gate = hot.new_full((ids.shape[0], 1), 60.0)  # nothing fades, and all is overwritten
        none = hot.new_zeros(1)
        window, matrix = step["state"].slots("window", layer), step["state"].slots("matrix", layer)
        found = delta.gated_delta_net(hot, -gate, gate, self.taps, none, none, spans, window, matrix)
        one = torch.nn.functional.silu(torch.ones(())).item() * VOCAB**-0.5
        followers: Tensor = id_sum(found[step.last, 0] / one).round().long()
        return followers

    def _power(self, exponents: Tensor) -> Tensor:
        """Powers of 2, which repeat after ``PRIME - 1``."""
        return self.powers[exponents % (PRIME - 1)]


class Hybrid(Chat):
    """Shape 8: recurrent and attention layers in one node. Prompts are shared where a state is kept."""

    def graph(self) -> Graph:
        entry = Entry(
            inputs=(IDS,), outputs=(TOKEN,), chunk="ids", resources=("kv", "positions", "state", "sampler"), prefix=True
        )
        return Graph(
            nodes=(NodeSpec("lm", (entry,)),),
            walks={"generate": generate(LM_CALL)},
            partitions=(Partition("main", ("generate",)),),
            streams=(TEXT,),
            inputs=(PROMPT,),
        )

    def resources(self) -> Mapping[str, ResourceSpec]:
        tensors = {
            "s": ((1,), "int64"),
            "window": ((3 * VOCAB, 3), "model"),
            "matrix": ((1, VOCAB, VOCAB), "state"),
        }
        state = RecurrentState(tensors, layers=HYBRID_LAYERS, checkpoints=None, page=KV.page_size, checkpoint_tokens=16)
        return {**super().resources(), "state": state}

    def build(self, node: str) -> Node:
        return HybridNode()


# --- shape 14
# ----------------------------------------------------------------------------------------------------------

ACTIONS = ("twice", "shift")


class Calculator(Node):
    """Three entries on a register; which runs next is the previous one's doing."""

    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        return {"value": torch.stack([part.sum() for part in torch.split(ids, list(step.lengths))]) % VOCAB}

    def twice(self, step: Step, value: Tensor) -> dict[str, Any]:
        return {"value": value * 2 % VOCAB}

    def shift(self, step: Step, value: Tensor) -> dict[str, Any]:
        return {"value": (value + 5) % VOCAB}


class Planner(Model):
    """Shape 14: a sequence of walks chosen by what the previous walk produced."""

    def graph(self) -> Graph:
        value = Port("value", "int64", (), "stacked")
        entries = [Entry(inputs=(IDS,), outputs=(value,))]
        entries += [Entry(name, (value,), (value,)) for name in ACTIONS]
        walks: dict[str, Any] = {
            "read": Call("calc", inputs={"ids": "prompt"}, outputs={"value": "value"}, emit={"value": "text"})
        }
        for name in ACTIONS:
            walks[name] = Call("calc", name, {"value": "value"}, {"value": "value"}, {"value": "text"})
        return Graph(
            nodes=(NodeSpec("calc", tuple(entries)),),
            walks=walks,
            partitions=(Partition("main", ("read", *ACTIONS)),),
            streams=(TEXT,),
            inputs=(PROMPT,),
        )

    def build(self, node: str) -> Node:
        return Calculator()

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        outcome = yield Run("read", signals=("value",))
        for _ in range(12):
            value = outcome.signals["value"]
            if value % 7 == 0:
                return
            outcome = yield Run("twice" if value % 2 else "shift", signals=("value",))

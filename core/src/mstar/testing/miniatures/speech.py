"""Shapes 3 to 7: recognition without and with state, and speech that leaves while it is being made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mstar.nn.model import Demand, Model
from mstar.nn.node import Node, Packed, Step
from mstar.patterns import transducer as patterns
from mstar.patterns.lm_codec import LMCodec, LMCodecFacts
from mstar.patterns.transducer import TransducerFacts
from mstar.spec.graph import (
    CLIENT,
    AtEnd,
    Call,
    EndOf,
    Entry,
    Fixed,
    Graph,
    Left,
    Loop,
    NodeSpec,
    Partition,
    Port,
    Pull,
    Ramp,
    Stream,
    WhenTrue,
)
from mstar.spec.request import EngineRequest
from mstar.spec.resources import Positions, RecurrentState, ResourceSpec, Sampler
from mstar.testing.miniatures.catalog import BLANK, CODEBOOKS, FRAME, PADS, STEPS_PER_CALL, TAPS, VOCAB
from mstar.testing.miniatures.common import RATE
from mstar.testing.miniatures.text import IDS, KV, PROMPT, SHAPE, TEXT, TOKEN, SumNode, generate, text_demand

__all__ = ["Ctc", "Duplex", "Embed", "Omni", "Transducer", "Tts"]

FRAMES = Port("frames", "float32", ("F",), "packed")


# --- shape 3
# -----------------------------------------------------------------------------------------------------------


class CtcEncoder(Node):
    """Halves the frame rate: the mean of two frames, rounded, is the label. A trailing odd frame stands alone."""

    def forward(self, step: Step, frames: Tensor) -> dict[str, Any]:
        rows = []
        for row in torch.split(frames, list(step.lengths)):
            padded = torch.cat([row, row[-1:]]) if row.shape[0] % 2 else row
            rows.append(torch.round(padded.reshape(-1, 2).mean(1)).long())
        return {"labels": Packed(torch.cat(rows), [r.shape[0] for r in rows])}


class Ctc(Model):
    """Shape 3: encoder and CTC head, no state at all."""

    def graph(self) -> Graph:
        labels = Port("labels", "int64", ("L",), "packed")
        call = Call("encoder", inputs={"frames": "frames"}, emit={"labels": "text"})
        return Graph(
            nodes=(NodeSpec("encoder", (Entry(inputs=(FRAMES,), outputs=(labels,)),)),),
            walks={"transcribe": call},
            partitions=(Partition("main", ("transcribe",)),),
            streams=(TEXT,),
            inputs=(FRAMES,),
        )

    def build(self, node: str) -> Node:
        return CtcEncoder()


class EmbedNode(Node):
    """A text is its number of tokens, their sum, the first and the last."""

    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        rows = torch.split(ids, list(step.lengths))
        return {
            "vector": torch.stack([torch.stack([r.new_tensor(len(r)), r.sum(), r[0], r[-1]]) for r in rows]).float()
        }


class Embed(Model):
    """Shape 3 again: an encoder that gives one vector for the whole input."""

    def graph(self) -> Graph:
        vector = Port("vector", "float32", (4,), "stacked")
        call = Call("encoder", inputs={"ids": "prompt"}, emit={"vector": "vector"})
        return Graph(
            nodes=(NodeSpec("encoder", (Entry(inputs=(IDS,), outputs=(vector,)),)),),
            walks={"embed": call},
            partitions=(Partition("main", ("embed",)),),
            streams=(Stream("vector", "main", CLIENT, vector, "embedding"),),
            inputs=(PROMPT,),
        )

    def build(self, node: str) -> Node:
        return EmbedNode()


# --- shape 4
# -----------------------------------------------------------------------------------------------------------


class TransducerDecoder(Node):
    """Greedy transducer, several steps a call: the cursor and the predictor's state live in a slot."""

    def forward(self, step: Step, encoded: list[Tensor]) -> dict[str, Any]:
        cursor, last = step["state"].read("cursor").clone(), step["state"].read("last").clone()
        tokens: list[list[int]] = []
        done = []
        for row, mine in enumerate(encoded):
            out: list[int] = []
            at, previous = int(cursor[row, 0]), int(last[row, 0])
            for _ in range(STEPS_PER_CALL):
                if at >= mine.shape[0]:
                    break
                token = (int(mine[at]) + previous) % VOCAB
                at += 1
                if token % BLANK:  # a blank moves on without a token
                    out.append(token)
                    previous = token
            cursor[row, 0], last[row, 0] = at, previous
            tokens.append(out)
            done.append(at >= mine.shape[0])
        step["state"].write("cursor", cursor)
        step["state"].write("last", last)
        flat = torch.tensor([t for out in tokens for t in out], dtype=torch.int64, device=step.device)
        lengths = [len(out) for out in tokens]
        return {"tokens": Packed(flat, lengths), "done": torch.tensor(done, device=step.device)}


class TransducerEncoder(Node):
    def forward(self, step: Step, frames: Tensor) -> dict[str, Any]:
        return {"encoded": torch.round(frames)}


class Transducer(patterns.Transducer):
    """Shape 4: recurrent state slots, many steps an iteration."""

    def facts(self) -> TransducerFacts:
        state = {"cursor": ((1,), "int64"), "last": ((1,), "int64")}
        return TransducerFacts(FRAMES, Port("encoded", "float32", ("E",), "packed"), state)

    def build(self, node: str) -> Node:
        return TransducerEncoder() if node == "encoder" else TransducerDecoder()


# --- shape 5
# -----------------------------------------------------------------------------------------------------------

SAMPLES = Port("samples", "float32", ("S",), "packed")
AUDIO = Stream("audio", "codec", CLIENT, Port("sample", "float32", (), "stacked"), "audio", seconds_per_item=1 / RATE)


def fir(codes: Tensor) -> Tensor:
    """``[..., W]`` to ``[..., W * FRAME]``: every code becomes samples through a short filter over itself and the codes
    before it."""
    padded = torch.cat([codes.new_zeros((*codes.shape[:-1], len(TAPS) - 1)), codes], -1).float()
    width = padded.shape[-1]
    taps = [tap * padded[..., len(TAPS) - 1 - i : width - i] for i, tap in enumerate(TAPS)]
    return torch.stack(taps).sum(0).repeat_interleave(FRAME, -1)


class FirCodec(Node):
    """Windows of one size at a time, as the pattern wants them."""

    def forward(self, step: Step, codes: Tensor) -> dict[str, Any]:
        return {"samples": fir(codes)}


class Tts(LMCodec):
    """Shape 5: a language model whose tokens stream into a codec in windows that grow, with left context."""

    def facts(self) -> LMCodecFacts:
        chunk = Ramp(left=len(TAPS) - 1, padded=(1, 4, 10))
        return LMCodecFacts(SHAPE, rate=RATE, samples=FRAME, chunk=chunk, codes=((0, VOCAB),))

    def build(self, node: str) -> Node:
        return SumNode() if node == "lm" else FirCodec()


# --- shape 6
# -----------------------------------------------------------------------------------------------------------


class Thinker(SumNode):
    """A text model that also hands on a hidden state per token."""

    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        out = super().forward(step, ids)
        return {**out, "hidden": out["token"].ids.float() * 0.5}


class Talker(Node):
    """One frame of codes per step: an inner loop over the codebooks, each seeing the one before it."""

    def forward(self, step: Step, hidden: Tensor, ended: Tensor) -> dict[str, Any]:
        state = step["talker_state"].read("sum").clone()
        pads = step["talker_state"].read("pads").clone()
        base = (torch.round(hidden * 2).long() + state[:, 0]) % VOCAB
        codes = [base]
        for depth in range(1, CODEBOOKS):
            codes.append((codes[-1] * 2 + depth) % VOCAB)
        state[:, 0] = codes[-1]
        pads[:, 0] += ended.long()
        step["talker_state"].write("sum", state)
        step["talker_state"].write("pads", pads)
        return {"frame": torch.stack(codes, 1), "done": pads[:, 0] > PADS}


class FrameCodec(Node):
    """Sums each frame's codebooks; the FIR filter of shape 5 does the rest. Windows of all sizes in one step."""

    def forward(self, step: Step, codes: Tensor, left: Tensor) -> dict[str, Any]:
        windows = torch.split(codes.sum(1), list(step.lengths))
        rows = [fir(row)[seen * FRAME :] for row, seen in zip(windows, left.tolist(), strict=True)]
        return {"samples": Packed(torch.cat(rows), [r.shape[0] for r in rows])}


def codec_walk(stream: str) -> Loop:
    call = Call("codec", inputs={"codes": Pull(stream), "left": Left(stream)}, emit={"samples": "audio"})
    return Loop(call, EndOf(stream))


class Omni(Model):
    """Shape 6: thinker → talker with an inner depth loop → codec, three partitions at once."""

    def graph(self) -> Graph:
        hidden, frame = Port("hidden", "float32", (), "stacked"), Port("frame", "int64", (CODEBOOKS,), "stacked")
        thinker = Entry(inputs=(IDS,), outputs=(TOKEN, hidden), chunk="ids", resources=("kv", "positions", "sampler"))
        talker = Entry(
            inputs=(Port("hidden", "float32", ("H",), "packed"), Port("ended", "bool", (), "stacked")),
            outputs=(frame, Port("done", "bool", (), "stacked")),
            resources=("talker_state",),
        )
        ports = (Port("codes", "int64", ("C", CODEBOOKS), "packed"), Port("left", "int64", (), "stacked"))
        think = generate(Call("thinker", outputs={"token": "token"}, emit={"token": "text", "hidden": "hidden"}))
        talk = Call(
            "talker",
            inputs={"hidden": Pull("hidden", at_end="pad"), "ended": AtEnd("hidden")},
            outputs={"done": "done"},
            emit={"frame": "frames"},
        )
        return Graph(
            nodes=(
                NodeSpec("thinker", (thinker,)),
                NodeSpec("talker", (talker,)),
                NodeSpec("codec", (Entry(inputs=ports, outputs=(SAMPLES,)),)),
            ),
            walks={"think": think, "talk": Loop(talk, WhenTrue("done")), "decode": codec_walk("frames")},
            partitions=(
                Partition("main", ("think",)),
                Partition("talker", ("talk",)),
                Partition("codec", ("decode",)),
            ),
            streams=(
                TEXT,
                Stream("hidden", "main", "talker", hidden, capacity=4),
                Stream("frames", "talker", "codec", frame, chunk=Fixed(4, left=len(TAPS) - 1), capacity=8),
                AUDIO,
            ),
            inputs=(PROMPT,),
        )

    def resources(self) -> Mapping[str, ResourceSpec]:
        state = RecurrentState({"sum": ((1,), "int64"), "pads": ((1,), "int64")})
        return {"kv": KV, "positions": Positions(), "sampler": Sampler(vocab=VOCAB), "talker_state": state}

    def build(self, node: str) -> Node:
        return {"thinker": Thinker, "talker": Talker, "codec": FrameCodec}[node]()

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        return text_demand(request)


# --- shape 7
# -----------------------------------------------------------------------------------------------------------


class DuplexNode(Node):
    """Hears a frame, answers with a frame (its running sum so far) and one token, and remembers."""

    def forward(self, step: Step, audio: Tensor) -> dict[str, Any]:
        total = step["state"].read("total").clone()
        rows = []
        for row, heard in enumerate(torch.split(audio, list(step.lengths))):
            sums = total[row, 0] + torch.cumsum(heard, 0)
            total[row, 0] = sums[-1]
            rows.append(sums)
        step["state"].write("total", total)
        token = torch.round(total[:, 0].abs()).long() % VOCAB
        return {"samples": torch.cat(rows), "token": token}


class Duplex(Model):
    """Shape 7: the client streams in, frames stream out, clocked by the input."""

    def graph(self) -> Graph:
        item = Port("sample", "float32", (), "stacked")
        audio = Port("audio", "float32", ("S",), "packed")
        entry = Entry(inputs=(audio,), outputs=(SAMPLES, TOKEN), resources=("state",))
        call = Call("agent", inputs={"audio": Pull("audio_in")}, emit={"samples": "audio", "token": "text"})
        return Graph(
            nodes=(NodeSpec("agent", (entry,)),),
            walks={"converse": Loop(call, EndOf("audio_in"))},
            partitions=(Partition("main", ("converse",)),),
            streams=(
                Stream("audio_in", CLIENT, "main", item, "audio", Fixed(FRAME), max_items=480_000),
                Stream("audio", "main", CLIENT, item, "audio", capacity=8),
                TEXT,
            ),
        )

    def resources(self) -> Mapping[str, ResourceSpec]:
        return {"state": RecurrentState({"total": ((1,), "float32")})}

    def build(self, node: str) -> Node:
        return DuplexNode()

"""Every variant of the patterns' facts makes a sound graph. What the graphs compute is tested on the miniatures, which
stand on them, and on the scaffold's families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mstar.nn.model import BuildContext, Model
from mstar.nn.node import Node
from mstar.patterns.denoise import DenoiseFacts, DenoiseLoop
from mstar.patterns.encoder_decoder import EncoderDecoder, EncoderDecoderFacts
from mstar.patterns.lm_codec import LMCodec, LMCodecFacts
from mstar.patterns.shapes import DecoderShape
from mstar.patterns.transducer import Transducer, TransducerFacts
from mstar.spec.check import calls_of, faults
from mstar.spec.graph import CLIENT, Fixed, Param, Port, Stream
from mstar.spec.request import EngineRequest, SamplingParams
from mstar.spec.resources import RaggedAttention

SHAPE = DecoderShape(vocab=100, layers=3, heads=4, kv_heads=2, head_dim=8, max_tokens=64, windows=(None, 8, 8))
RAGGED = RaggedAttention(4, 4, 8)
FEATURES = Port("features", "float32", ("F", 80))
LATENT = Port("latent", "float32", ("h", "w", 4), "stacked")
IMAGE = Stream("image", "main", CLIENT, Port("image", "uint8", ("H", "W", 3), "stacked"), "image")

SPEECH = EncoderDecoderFacts(FEATURES, Port("memory", "model", ("S", 32)), 1500, SHAPE)
CODEC = LMCodecFacts(SHAPE, 24_000, 320, Fixed(25, left=3))
RNNT = TransducerFacts(FEATURES, Port("frames", "model", ("E", 32)), {"cell": ((2, 16), "model")})
PICTURE = DenoiseFacts(LATENT, Port("context", "model", ("T", 32), "list"), IMAGE)

VARIANTS = {
    "encoder-decoder": (EncoderDecoder, SPEECH),
    "encoder-decoder, attention": (EncoderDecoder, replace(SPEECH, attention=RAGGED)),
    "lm-codec": (LMCodec, CODEC),
    "lm-codec, codebooks": (LMCodec, replace(CODEC, codebooks=8)),
    "transducer": (Transducer, RNNT),
    "transducer, attention": (Transducer, replace(RNNT, attention=RAGGED)),
    "transducer, knobs": (Transducer, replace(RNNT, knobs=(Port("blank_penalty", "float32", (), "stacked"),))),
    "denoise": (DenoiseLoop, PICTURE),
    "denoise, attention": (DenoiseLoop, replace(PICTURE, attention=RAGGED)),
    "denoise, one branch": (DenoiseLoop, replace(PICTURE, branches={"cond": "prompt"})),
    "denoise, three": (DenoiseLoop, replace(PICTURE, branches={"all": "prompt", "text": "prompt", "none": "negative"})),
    "denoise, previews": (DenoiseLoop, replace(PICTURE, preview=Port("preview", "uint8", ("H", "W", 3), "stacked"))),
    "denoise, kv": (DenoiseLoop, replace(PICTURE, kv=SHAPE, latent=Port("latent", "float32", ("P", 4)))),
}


def family(pattern: type[Any], facts: Any) -> Model:
    def build(self: Model, node: str) -> Node:
        raise AssertionError("the graph needs no module")

    made = type("Family", (pattern,), {"facts": lambda self: facts, "build": build})
    return made(BuildContext(None, torch.float32, torch.device("cpu")))  # type: ignore[no-any-return]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_graph_is_sound(variant: str) -> None:
    model = family(*VARIANTS[variant])
    resources = model.resources()
    graph = model.graph()
    assert list(faults(graph, resources)) == []
    used = {name for node in graph.nodes for entry in node.entries for name in entry.resources}
    assert used == set(resources), "a resource that no entry uses costs memory for nothing"


def test_a_shape_is_that_of_its_resources() -> None:
    kv = SHAPE.kv()
    assert (kv.layers, kv.query_heads, kv.kv_heads, kv.head_dim, kv.max_tokens) == (3, 4, 2, 8, 64)
    assert kv.windows == SHAPE.windows
    cross = family(EncoderDecoder, SPEECH).resources()["cross"]
    assert (cross.layers, cross.query_heads, cross.kv_heads, cross.max_tokens) == (3, 4, 2, 1500)  # type: ignore[attr-defined]


def test_frames_travel_where_there_are_several_codebooks() -> None:
    graph = family(LMCodec, replace(CODEC, codebooks=8)).graph()
    assert graph.stream("codes").port.shape == (8,)
    assert {call.emit["frame"] for call in calls_of(graph.walks["speak"])} == {"codes"}
    assert not graph.node("lm").entry("forward").prefix
    assert graph.stream("audio").seconds_per_item == 1 / 24_000


def test_a_transducers_knobs_reach_its_decoder() -> None:
    graph = family(*VARIANTS["transducer, knobs"]).graph()
    (write,) = (call for call in calls_of(graph.walks["transcribe"]) if call.node == "decoder")
    assert write.inputs["blank_penalty"] == Param("blank_penalty")


@pytest.mark.parametrize(
    ("variant", "inputs", "expected"),
    [
        ("encoder-decoder", {"features": [[0.0] * 80] * 9, "start": [1, 2]}, [("main", 12)]),
        ("lm-codec", {"prompt": [1, 2, 3]}, [("main", 13)]),
        ("transducer", {"features": [[0.0] * 80] * 9}, []),
        ("denoise", {"prompt": [1, 2, 3], "negative": [1], "latent": [[0.0] * 4] * 5}, []),
        (
            "denoise, kv",
            {"prompt": [1, 2, 3], "negative": [1], "latent": [[0.0] * 4] * 5},
            [("cond", 8), ("uncond", 6)],
        ),
    ],
)
def test_demand(variant: str, inputs: dict[str, Any], expected: list[tuple[str, int]]) -> None:
    request = EngineRequest(id="r", inputs=inputs, sampling={"sampler": SamplingParams(max_tokens=10)})
    found = list(family(*VARIANTS[variant]).demand(request))
    assert [(demand.context, demand.tokens) for demand in found] == expected
    assert all(demand.resource == "kv" for demand in found)

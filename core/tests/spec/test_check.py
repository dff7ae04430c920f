"""A broken graph is refused when it is built, with every fault named (promise P2)."""

from __future__ import annotations

import dataclasses

import pytest

from mstar.spec.check import check_graph, faults
from mstar.spec.errors import GraphError
from mstar.spec.graph import (
    CLIENT,
    AtEnd,
    Call,
    Draft,
    EndOf,
    Entry,
    Fixed,
    Graph,
    Index,
    Loop,
    NodeSpec,
    Par,
    Param,
    Partition,
    Port,
    Pull,
    Ramp,
    Seq,
    Stream,
    Times,
    TokenStop,
    WhenTrue,
)
from mstar.spec.resources import PagedKV, RecurrentState, Sampler

IDS = Port("ids", "int64", ("T",), "packed")
TOKEN = Port("token", "int64", (), "stacked")
RESOURCES = {"kv": PagedKV(), "state": RecurrentState(), "sampler": Sampler(vocab=8)}
LM = NodeSpec("lm", (Entry(inputs=(IDS,), outputs=(TOKEN,), chunk="ids", resources=("kv", "sampler"), prefix=True),))
PREFILL = Call("lm", inputs={"ids": "prompt"}, outputs={"token": "token"}, emit={"token": "text"})
DECODE = Call("lm", inputs={"ids": "token"}, outputs={"token": "token"}, emit={"token": "text"})
GOOD = Graph(
    nodes=(LM,),
    walks={"go": Seq(PREFILL, Loop(DECODE, TokenStop("token")))},
    partitions=(Partition("main", ("go",)),),
    streams=(Stream("text", "main", CLIENT, TOKEN),),
    inputs=(Port("prompt", "int64", ("T",), "packed"),),
)


def walk(walk: object, **changes: object) -> Graph:
    return dataclasses.replace(GOOD, walks={"go": walk}, **changes)  # type: ignore[arg-type]


def lm(**changes: object) -> Graph:
    entry = dataclasses.replace(LM.entries[0], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(GOOD, nodes=(NodeSpec("lm", (entry,)),))


def test_a_sound_graph_has_no_fault() -> None:
    assert list(faults(GOOD, RESOURCES)) == []


CODES = Stream("codes", "main", "codec", TOKEN, chunk=Fixed(4), capacity=2)

BROKEN = {
    "node": (walk(dataclasses.replace(PREFILL, node="lmm")), "unknown node; did you mean 'lm'?"),
    "entry": (walk(dataclasses.replace(PREFILL, entry="forwrd")), "unknown entry 'forwrd'; did you mean 'forward'?"),
    "input port": (walk(dataclasses.replace(PREFILL, inputs={"id": "prompt"})), "unknown input port 'id'"),
    "no source": (walk(dataclasses.replace(PREFILL, inputs={})), "input port 'ids' has no source"),
    "output port": (walk(dataclasses.replace(PREFILL, outputs={"tok": "t"})), "unknown output port 'tok'"),
    "producer": (
        walk(dataclasses.replace(PREFILL, inputs={"ids": "promt"})),
        "nothing produces 'promt' (input port 'ids')",
    ),
    "order": (
        walk(Seq(dataclasses.replace(DECODE, inputs={"ids": "token"}), PREFILL)),
        "nothing produces 'token' before this call",
    ),
    "dtype": (
        walk(GOOD.walks["go"], inputs=(Port("prompt", "float32", ("T",), "packed"),)),
        "float32 does not fit int64",
    ),
    "rank": (walk(GOOD.walks["go"], inputs=(Port("prompt", "int64", ("T", 3), "packed"),)), "does not fit ('T',)"),
    "endless": (walk(Seq(PREFILL, Loop(DECODE, ()))), "a loop has no end"),
    "stuck": (
        walk(Seq(PREFILL, Loop(dataclasses.replace(DECODE, outputs={}), TokenStop("token")))),
        "which its body never changes",
    ),
    "early stop": (walk(Loop(PREFILL, TokenStop("token"))), "which nothing produces before it"),
    "sampler": (walk(Seq(PREFILL, Loop(DECODE, TokenStop("token", "kv")))), "'kv', which is no sampler resource"),
    "when true": (walk(Loop(PREFILL, WhenTrue("done"))), "'done' is true, which its body never produces"),
    "end of": (walk(Loop(PREFILL, EndOf("text"))), "ends with stream 'text', which its body never pulls"),
    "untold": (walk(Loop(PREFILL, Times(3), progress="tex")), "progress to unknown stream 'tex'; did you mean 'text'?"),
    "told wrongly": (walk(Loop(PREFILL, Times(3), progress="text")), "progress goes to the client as int64 (2,)"),
    "index": (walk(dataclasses.replace(PREFILL, inputs={"ids": Index()})), "only 0 loop(s) around it"),
    "pull outside": (
        walk(dataclasses.replace(PREFILL, inputs={"ids": Pull("text")})),
        "must stand in one",
    ),
    "at end": (
        walk(Loop(dataclasses.replace(PREFILL, inputs={"ids": AtEnd("text")}), Times(3))),
        "without a pull of that stream",
    ),
    "par": (walk(Par(PREFILL, PREFILL)), "two branches of a Par use resource 'kv' in context 'main'"),
    "par race": (walk(Par(PREFILL, PREFILL)), "two branches of a Par write 'token'"),
    "partition": (
        dataclasses.replace(GOOD, partitions=(Partition("main", ("go", "went")),)),
        "unknown walk 'went'",
    ),
    "idle walk": (
        dataclasses.replace(GOOD, walks={**GOOD.walks, "spare": PREFILL}),
        "walk 'spare' belongs to no partition",
    ),
    "idle node": (dataclasses.replace(GOOD, nodes=(LM, NodeSpec("vae", (Entry(),)))), "node 'vae' is never called"),
    "stream end": (
        dataclasses.replace(GOOD, streams=(Stream("text", "mian", CLIENT, TOKEN),)),
        "unknown source 'mian'; did you mean 'main'?",
    ),
    "silent stream": (
        dataclasses.replace(GOOD, streams=(*GOOD.streams, Stream("audio", "main", CLIENT, TOKEN))),
        "no call of its source partition 'main' emits to it",
    ),
    "small stream": (dataclasses.replace(GOOD, streams=(*GOOD.streams, CODES)), "capacity 2 is below"),
    "empty chunks": (
        dataclasses.replace(GOOD, streams=(*GOOD.streams, dataclasses.replace(CODES, chunk=Ramp(())))),
        "chunks hold at least one item",
    ),
    "chunks of nothing": (
        dataclasses.replace(GOOD, streams=(*GOOD.streams, dataclasses.replace(CODES, chunk=Fixed(0)))),
        "chunks hold at least one item",
    ),
    "unknown dtype": (
        walk(GOOD.walks["go"], inputs=(Port("prompt", "int46", ("T",), "packed"),)),
        "unknown dtype 'int46'; did you mean 'int64'?",
    ),
    "unknown stream": (
        walk(dataclasses.replace(PREFILL, emit={"token": "txt"})),
        "emits to unknown stream 'txt'; did you mean 'text'?",
    ),
    "resource": (lm(resources=("kv", "samplr")), "unknown resource 'samplr'; did you mean 'sampler'?"),
    "frozen": (lm(frozen=("state",)), "frozen resource 'state' is not among its resources"),
    "chunk": (lm(chunk="idz"), "chunk port 'idz' is not an input"),
    "prefix": (lm(chunk=None), "prefix reuse needs a chunk port"),
    "sessions": (dataclasses.replace(GOOD, sessions=("world",)), "sessions: unknown resource 'world'"),
    "twice": (dataclasses.replace(GOOD, nodes=(LM, LM)), "node 'lm' is declared twice"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_fault_is_named(name: str) -> None:
    graph, words = BROKEN[name]
    assert any(words in fault for fault in faults(graph, RESOURCES)), list(faults(graph, RESOURCES))


def test_all_faults_are_reported_at_once() -> None:
    graph = dataclasses.replace(GOOD, sessions=("world",), nodes=(LM, NodeSpec("vae", (Entry(),))))
    with pytest.raises(GraphError) as caught:
        check_graph("toy", graph, RESOURCES)
    assert len(caught.value.faults) == 2
    assert "'toy' has 2 faults" in str(caught.value)


def test_params_need_no_declaration() -> None:
    graph = walk(Seq(PREFILL, Loop(DECODE, (TokenStop("token"), Times(Param("rounds", 3))))))
    assert list(faults(graph, RESOURCES)) == []


def test_a_number_goes_into_a_port_of_one_number_a_row() -> None:
    packed = Port("gain", "float32", ("T",))
    call = dataclasses.replace(PREFILL, inputs={**PREFILL.inputs, "gain": Param("gain")})
    for port in (packed, dataclasses.replace(packed, shape=(), layout="list")):
        graph = dataclasses.replace(lm(inputs=(IDS, port)), walks={"go": call})
        (fault,) = faults(graph, RESOURCES)
        assert fault.endswith("declare it Port('gain', 'float32', (), 'stacked')")
    right = Port("gain", "float32", (), "stacked")
    assert list(faults(dataclasses.replace(lm(inputs=(IDS, right)), walks={"go": call}), RESOURCES)) == []


def draft(taken_back: tuple[str, ...], **entry: object) -> list[str]:
    graph = lm(prefix=False, **entry)
    body = Seq(PREFILL, Loop(DECODE, TokenStop("token")))
    return list(faults(dataclasses.replace(graph, walks={"go": Draft(body, taken_back)}), RESOURCES))


def test_a_draft_takes_back_what_can_be() -> None:
    assert draft(("kv",)) == []
    assert draft(("kw",)) == ["walk 'go': a draft takes back unknown resource 'kw'; known: kv, sampler, state"]
    assert "which a recurrent_state cannot" in draft(("state",), resources=("kv", "sampler", "state"))[0]
    assert "none of its calls uses" in draft(("kv",), resources=("sampler",))[0]
    shared = dataclasses.replace(GOOD, walks={"go": Draft(GOOD.walks["go"], ("kv",))})
    assert "whose prompts others may share" in next(faults(shared, RESOURCES))

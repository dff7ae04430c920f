"""What a call's outputs become for the client."""

from __future__ import annotations

from collections.abc import Generator

import torch

from mstar.graph.program import compile_graph
from mstar.graph.run import RequestRun
from mstar.graph.values import Ref
from mstar.nn.model import Outcome, Run
from mstar.spec.graph import CLIENT, Call, Entry, Graph, NodeSpec, Partition, Port, Stream
from mstar.spec.request import Emit, EngineRequest, TokenLogprob

TOKEN, SURE = Port("token", "int64", (), "stacked"), Port("sure", "float32", (), "stacked")


def route(partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
    yield Run("once")


def test_log_probabilities_go_with_tokens_only() -> None:
    graph = Graph(
        nodes=(NodeSpec("n", (Entry(outputs=(TOKEN, SURE)),)),),
        walks={"once": Call("n", emit={"sure": "sure", "token": "text"})},
        partitions=(Partition("main", ("once",)),),
        streams=(Stream("text", "main", CLIENT, TOKEN, "tokens"), Stream("sure", "main", CLIENT, SURE, "state")),
    )
    events: list[Emit] = []
    device = torch.device("cpu")
    run = RequestRun(compile_graph(graph), EngineRequest(id="r"), route, events.append, device, torch.float32)
    run.start()
    (call,) = run.ready
    outputs = {
        "token": Ref(torch.tensor([7]), 0, 1, row=True),
        "sure": Ref(torch.tensor([0.5]), 0, 1, row=True),
    }
    run.complete(call, outputs, [TokenLogprob(token=7, logprob=-1.0)])
    told = {event.stream: event.logprobs for event in events}
    assert told == {"sure": None, "text": [TokenLogprob(token=7, logprob=-1.0)]}

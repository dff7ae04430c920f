"""What a draft adds to a context is forgotten; what it said is its route's to judge."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mstar.nn.model import Demand, Outcome, Run
from mstar.registry import load_object
from mstar.resources.base import Owner
from mstar.spec.graph import Call, Draft, Graph, Loop, Partition, Port, Seq, TokenStop
from mstar.spec.request import Done, EngineRequest, Failed
from mstar.testing.drive import Driver
from mstar.testing.miniatures import Example, Miniature, miniature
from mstar.testing.miniatures.common import VOCAB, encode

pytestmark = pytest.mark.usefixtures("loop")
WORDS = ("abc", "", "zz", "abc")


def expected(prompt: str, most: int) -> list[int]:
    ids = encode(prompt)
    for _ in range(most):
        ids.append((sum(ids) + len(ids)) % VOCAB)
    return ids[len(encode(prompt)) :]


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> tuple[Miniature, list[Outcome]]:
    """The chat miniature; it reads its prompt once and then answers four times, each time after other words."""
    mini, outcomes = miniature("mini_chat"), []
    model = load_object(mini.model)
    plain = model.graph

    def graph(self: Any) -> Graph:
        found = plain(self)
        (node,) = found.nodes
        entry = replace(node.entry("forward"), prefix=False)
        read = Call("lm", inputs={"ids": "prompt"}, outputs={"token": "token"})
        answer = replace(read, inputs={"ids": "words"}, emit={"token": "text"})
        again = replace(answer, inputs={"ids": "token"})
        draft = Draft(Seq(answer, Loop(again, TokenStop("token"))), ("kv", "positions"))
        return replace(
            found,
            nodes=(replace(node, entries=(entry,)),),
            walks={"read": read, "draft": draft},
            partitions=(Partition("main", ("read", "draft")),),
            inputs=(*found.inputs, Port("words", "int64", ("T",), optional=True)),
        )

    def route(self: Any, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        yield Run("read")
        for words in WORDS:
            ids = np.array(encode("q" + words), dtype=np.int64)
            outcomes.append((yield Run("draft", tokens=("sampler",), values={"words": ids})))

    def demand(self: Any, request: EngineRequest) -> list[Demand]:
        most = len(request.inputs["prompt"]) + 4 + request.sampling["sampler"].max_tokens
        return [Demand("kv", tokens=most)]

    monkeypatch.setattr(model, "demand", demand)
    monkeypatch.setattr(model, "graph", graph)
    monkeypatch.setattr(model, "route", route)
    return mini, outcomes


def test_each_draft_begins_where_the_first_began(drafting: tuple[Miniature, list[Outcome]]) -> None:
    mini, outcomes = drafting
    driver = Driver(mini, resources={"kv": {"tokens": 64, "max_tokens": 64}})
    pool = driver.worker.resources["kv"].pool  # type: ignore[attr-defined]
    held: set[int] = set()
    driver.submit("r", Example("hello there", {"max_tokens": 6}))
    driver.run(until=lambda: bool(held.add(pool.held(Owner("r")))))
    answers = [expected("hello thereq" + words, 6) for words in WORDS]
    assert driver.result("r")["text"] == [token for answer in answers for token in answer]
    assert [outcome.tokens["sampler"] for outcome in outcomes] == answers
    assert [outcome.reason for outcome in outcomes] == ["length"] * 4
    end = driver.ended["r"]
    assert isinstance(end, Done)
    assert end.usage.output["tokens"] == 24  # what was taken back was generated all the same
    assert max(held) <= 11 + 4 + 6  # one draft's room is enough for all of them
    driver.assert_empty()


def test_side_by_side_and_cut_they_say_the_same(drafting: tuple[Miniature, list[Outcome]]) -> None:
    driver = Driver(drafting[0], resources={"kv": {"tokens": 256}}, scheduler={"max_step_tokens": 4})
    prompts = ("hello there", "a", "what is that")
    for prompt in prompts:
        driver.submit(prompt, Example(prompt, {"max_tokens": 5}))
    driver.run()
    for prompt in prompts:
        wanted = [token for words in WORDS for token in expected(f"{prompt}q{words}", 5)]
        assert driver.result(prompt)["text"] == wanted
    driver.assert_empty()


def test_a_cancel_in_a_draft_leaves_nothing(drafting: tuple[Miniature, list[Outcome]]) -> None:
    driver = Driver(drafting[0])
    driver.submit("r", Example("hello there", {"max_tokens": 9}))
    driver.run(until=lambda: len(driver.emitted.get("r", ())) == 12)
    driver.cancel("r")
    driver.run()
    driver.assert_empty()


def test_a_route_sets_inputs_only(drafting: tuple[Miniature, list[Outcome]], monkeypatch: pytest.MonkeyPatch) -> None:
    def route(self: Any, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        yield Run("read", values={"word": np.zeros(1, np.int64)})

    monkeypatch.setattr(load_object(drafting[0].model), "route", route)
    driver = Driver(drafting[0])
    driver.submit("r", Example("hello"))
    driver.run()
    end = driver.ended["r"]
    assert isinstance(end, Failed)
    assert "sets 'word', which is no input; did you mean 'words'?" in end.message
    driver.assert_empty()

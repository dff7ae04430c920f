"""How a request ends when its route goes on after the answer."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest

from mstar.nn.model import Outcome, Run
from mstar.registry import load_object
from mstar.spec.graph import Call, Graph, Loop, Partition, Seq, TokenStop
from mstar.spec.request import Done, EngineRequest
from mstar.testing.drive import Driver
from mstar.testing.miniatures import Example, miniature

pytestmark = pytest.mark.usefixtures("loop")


def test_a_walk_without_a_loop_does_not_hide_how_the_answer_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    mini = miniature("mini_chat")
    model = load_object(mini.model)
    plain = model.graph

    def graph(self: Any) -> Graph:
        found = plain(self)
        first = Call("lm", inputs={"ids": "prompt"}, outputs={"token": "token"}, emit={"token": "text"})
        more = replace(first, inputs={"ids": "token"})
        once = Call("lm", inputs={"ids": "token"}, outputs={"token": "token"})
        walks = {"answer": Seq(first, Loop(more, TokenStop("token"))), "after": once}
        return replace(found, walks=walks, partitions=(Partition("main", ("answer", "after")),))

    def route(self: Any, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        assert (yield Run("answer")).reason == "length"
        assert (yield Run("after")).reason == "done"

    monkeypatch.setattr(model, "graph", graph)
    monkeypatch.setattr(model, "route", route)
    driver = Driver(mini)
    driver.submit("r", Example("hello", {"max_tokens": 3}))
    driver.run()
    end = driver.ended["r"]
    assert isinstance(end, Done), end
    assert (end.reason, end.reasons) == ("length", {"main": "length"})
    driver.assert_empty()

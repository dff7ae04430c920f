"""How a request ends when its route goes on after the answer, and what is left of one that has ended."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mstar.nn.model import Outcome, Run
from mstar.registry import load_object
from mstar.spec.graph import Call, Graph, Loop, Partition, Seq, TokenStop
from mstar.spec.request import Done, EngineRequest
from mstar.testing.drive import Driver
from mstar.testing.miniatures import MINIATURES, Example, Miniature, miniature

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


@contextmanager
def without_the_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("mini", MINIATURES, ids=lambda m: m.key)
def test_what_a_request_brought_goes_with_its_end(mini: Miniature) -> None:
    """Pictures, clips and videos lie in shared memory: the collector, which counts objects, would come late."""
    driver, rng = Driver(mini), random.Random(3)
    brought: list[weakref.ref[Any]] = []
    with without_the_collector():
        for name in ("whole", "cancelled", "queued"):
            example = mini.example(rng)
            prepared = driver.prepare(name, example)
            arrays = [a for a in prepared.request.inputs.values() if isinstance(a, np.ndarray)]
            brought += [weakref.ref(array) for array in arrays]
            driver.submit_prepared(prepared, example)
            del prepared, arrays
            if name == "cancelled":
                driver.worker.step()
                driver.cancel(name)
        driver.cancel("queued")
        driver.run()
        assert driver.ended.keys() == {"whole", "cancelled", "queued"}
        assert [ref() for ref in brought if ref() is not None] == []
    driver.assert_empty()

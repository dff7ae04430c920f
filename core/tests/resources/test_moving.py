"""State that goes from one pool to another: what is read there is what was written here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mstar.resources.attention.torch_sdpa import TorchAttention
from mstar.resources.base import Owner, Resource, ResourceContext, Row
from mstar.resources.paged_kv import PagedKV
from mstar.resources.positions import PositionsResource
from mstar.resources.sampler import SamplerResource
from mstar.resources.staging import Stage
from mstar.resources.window_kv import WindowKV
from mstar.spec import resources as specs
from mstar.spec.request import EngineRequest, SamplingParams

ONE, OTHER = Owner("one"), Owner("other")


def pools(kind: type[Resource], spec: Any) -> tuple[Any, Any]:
    """Two alike, as on two ranks. In the second another owner has come before."""
    made = []
    for _ in range(2):
        context = ResourceContext(
            torch.device("cpu"), torch.float32, 4, attention_backends=[TorchAttention()], stage=Stage("cpu")
        )
        made.append(kind("pool", spec, context))
    begin(made[1], OTHER, EngineRequest(id="other", inputs={}))
    return made[0], made[1]


def begin(pool: Resource, owner: Owner, request: EngineRequest) -> None:
    assert pool.reserve(owner, pool.units(40))
    pool.open(owner, request)


def move(source: Resource, target: Resource, request: EngineRequest) -> None:
    state = source.export(ONE)
    assert target.reserve(ONE, target.units(40))
    source.close(ONE)
    source.check([])
    target.adopt(ONE, request, state)
    target.check([ONE, OTHER])


def attended(pool: Any, tokens: int, seed: int) -> torch.Tensor:
    """What *tokens* new ones see, of all before them too."""
    rows = [Row(ONE, tokens)]
    pool.context.stage.begin()
    view = pool.plan(rows)
    q, k, v = torch.randn(3, tokens, 1, 8, generator=torch.Generator().manual_seed(seed)).unbind(0)
    found: torch.Tensor = view.attend(0, q, k, v)
    pool.commit(rows)
    return found


@pytest.mark.parametrize("before", [1, 7, 19])
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (PagedKV, specs.PagedKV(layers=1, kv_heads=1, head_dim=8, query_heads=1, max_tokens=64, page_size=4)),
        (WindowKV, specs.WindowKV(layers=1, kv_heads=1, head_dim=8, query_heads=1, window=6, max_step=4, sink=2)),
    ],
    ids=["pages", "a ring"],
)
def test_keys_and_values(kind: type[Resource], spec: Any, before: int) -> None:
    request = EngineRequest(id="one", inputs={})
    source, target = pools(kind, spec)
    stays, _ = pools(kind, spec)
    for pool in (source, stays):
        begin(pool, ONE, request)
        for step in range(before):
            attended(pool, 1, step)
    move(source, target, request)
    for step in range(3):
        assert torch.equal(attended(target, 2, 100 + step), attended(stays, 2, 100 + step))


def test_positions_that_a_prompt_brought() -> None:
    given = np.array([[0, 1, 1, 2, 9], [0, 1, 5, 2, 9]])
    request = EngineRequest(id="one", inputs={"where": given})
    source, target = pools(PositionsResource, specs.Positions(axes=2, prompt="where"))
    begin(source, ONE, request)
    found = []
    for pool in (source, target):
        if pool is target:
            move(source, target, request)
        rows = [Row(ONE, 3)]
        pool.context.stage.begin()
        found.append(pool.plan(rows).positions)
        pool.commit(rows)
    assert torch.cat(found, 1).tolist() == [[0, 1, 1, 2, 9, 10], [0, 1, 5, 2, 9, 10]]


def test_what_penalties_have_seen() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1e6)
    request = EngineRequest(id="one", inputs={}, sampling={"pool": params})
    source, target = pools(SamplerResource, specs.Sampler(vocab=8))
    begin(source, ONE, request)
    said = []
    for pool, steps in ((source, 3), (target, 3)):
        if pool is target:
            move(source, target, request)
        for _ in range(steps):
            rows = [Row(ONE)]
            pool.context.stage.begin()
            view = pool.plan(rows)
            said += view.sample(torch.arange(8.0)[None] + 1).ids.tolist()
            pool.commit(rows)
    assert said == [7, 6, 5, 4, 3, 2]

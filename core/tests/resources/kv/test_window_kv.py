from __future__ import annotations

import pytest
import torch
from kv_reference import Driver, make_context

from mstar.resources.base import IntegrityError, Owner, Row
from mstar.resources.window_kv import WindowKV
from mstar.spec import resources as specs
from mstar.spec.errors import MstarError, SetupError
from mstar.spec.request import EngineRequest

pytestmark = pytest.mark.usefixtures("attention_backend")

A, B = Owner("A"), Owner("B", "uncond")


def make(max_owners: int = 4, memory: int | None = None, **fields: object) -> WindowKV:
    defaults = {"layers": 2, "kv_heads": 2, "query_heads": 4, "head_dim": 8, "window": 6, "sink": 2, "max_step": 4}
    spec = specs.WindowKV(**{**defaults, **fields})  # type: ignore[arg-type]
    return WindowKV("ring", spec, make_context(max_owners, memory))


def driver(resource: WindowKV, *owners: Owner) -> Driver:
    spec = resource.spec
    run = Driver(resource, spec.layers, spec.query_heads, spec.kv_heads, spec.head_dim)
    run.windows, run.sink = [spec.window] * spec.layers, spec.sink
    for owner in owners:
        assert resource.reserve(owner, resource.units(1000))
        resource.open(owner, EngineRequest(id=owner.key))
    return run


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "sink"), [(6, 2), (6, 0), (1, 0), (3, 5), (40, 3)])
def test_ring_equals_the_reference_over_several_turns(window: int, sink: int, causal: bool) -> None:
    run = driver(make(window=window, sink=sink), A, B)
    lengths = [(1, 4), (4, 1), (3, 3), (4, 4), (1, 1), (2, 4), (1, 1), (4, 2), (1, 3), (4, 4), (4, 4), (1, 1)]
    for a, b in lengths:
        run.step([Row(A, a), Row(B, b)], causal=causal)
    run.resource.check([A, B])


@pytest.mark.parametrize("causal", [True, False])
def test_frozen_and_failed_steps_leave_the_ring_as_it_was(causal: bool) -> None:
    run = driver(make(), A, B)
    for _ in range(5):
        run.step([Row(A, 4), Row(B, 1)], fail=True, causal=causal)
        run.step([Row(A, 9), Row(B, 2)], frozen=True, causal=causal)  # a frozen step may be longer than max_step
        run.step([Row(B, 1), Row(A, 4)], causal=causal)


def test_a_step_longer_than_max_step_names_the_setting() -> None:
    resource = make()
    driver(resource, A)
    with pytest.raises(MstarError, match="max_step=4"):
        resource.plan([Row(A, 5)])


def test_a_slot_that_is_used_again_starts_empty() -> None:
    resource = make(max_owners=1)
    run = driver(resource, A)
    run.step([Row(A, 4)])
    assert not resource.reserve(B, 1)
    resource.close(A)
    resource.check([])
    run = driver(resource, B)
    run.step([Row(B, 3)])
    resource.check([B])
    with pytest.raises(IntegrityError):
        resource.close(A)
    assert resource.usage() == (1, 1, 0)


def test_sizing() -> None:
    with pytest.raises(SetupError, match="slots=2, but 4 contexts"):
        make(slots=2)
    with pytest.raises(SetupError, match="memory budget"):
        make(memory=1000)
    with pytest.raises(SetupError, match="at least 1"):
        make(window=0)


def test_nothing_stale_is_read_in_a_reused_slot() -> None:
    resource = make(max_owners=1, sink=0)
    driver(resource, A)
    bad = torch.full((4, 2, 8), float("nan"))
    resource.plan([Row(A, 4)]).attend(0, torch.randn(4, 4, 8), bad, bad)
    resource.commit([Row(A, 4)])
    resource.close(A)
    driver(resource, B).step([Row(B, 1)])

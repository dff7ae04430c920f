"""Recurrent state: staged writes, slots, sessions, sizing."""

from __future__ import annotations

import pytest
import torch

from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row
from mstar.resources.recurrent import RecurrentStateResource
from mstar.resources.staging import Lane, Stage
from mstar.spec.errors import SetupError
from mstar.spec.request import EngineRequest
from mstar.spec.resources import RecurrentState

SPEC = RecurrentState(tensors={"conv": ((2, 3), "model"), "ssm": ((4,), "float32")})


def state(owners: int = 4, spec: RecurrentState = SPEC, memory: int | None = None) -> RecurrentStateResource:
    context = ResourceContext(torch.device("cpu"), torch.bfloat16, owners, memory, stage=Stage("cpu"))
    return RecurrentStateResource("state", spec, context)


def start(resource: RecurrentStateResource, name: str) -> Owner:
    owner = Owner(name)
    assert resource.reserve(owner, 1)
    resource.open(owner, EngineRequest(id=name))
    return owner


def add(resource: RecurrentStateResource, owners: list[Owner], amounts: list[float], frozen: bool = False) -> None:
    rows = [Row(o) for o in owners]
    view = resource.plan(rows, frozen)
    view.write("ssm", view.read("ssm") + torch.tensor(amounts).unsqueeze(1))
    resource.commit(rows, frozen)


def values(resource: RecurrentStateResource, owners: list[Owner]) -> list[float]:
    rows = [Row(o) for o in owners]
    read = resource.plan(rows).read("ssm")[:, 0].tolist()
    resource.rollback(rows)
    return [float(v) for v in read]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1], [0, 2]])
def test_each_row_reads_and_writes_its_own_state(order: list[int]) -> None:
    resource = state()
    owners = [start(resource, str(i)) for i in range(3)]
    add(resource, owners, [1.0, 2.0, 3.0])
    add(resource, [owners[i] for i in order], [10.0 * (i + 1) for i in order])
    assert values(resource, owners) == [(i + 1) * (11.0 if i in order else 1.0) for i in range(3)]
    assert not resource.pool("ssm")[0].any()  # the sink
    assert not resource.pool("conv").any()


def test_writes_are_staged() -> None:
    resource = state()
    owner = start(resource, "a")
    rows = [Row(owner, complete=False)]
    view = resource.plan(rows)
    view.write("ssm", torch.ones(1, 4))
    assert view.read("ssm").eq(1).all()
    resource.rollback(rows)
    assert values(resource, [owner]) == [0.0]
    add(resource, [owner], [5.0], frozen=True)
    assert values(resource, [owner]) == [0.0]
    view = resource.plan(rows)
    view.write("ssm", torch.ones(1, 4))
    resource.commit(rows)  # a chunk of an incomplete call advances the state
    assert values(resource, [owner]) == [1.0]


def test_a_failed_step_in_halves_reads_the_old_state() -> None:
    resource = state()
    owners = [start(resource, n) for n in "ab"]
    add(resource, owners, [1.0, 2.0])
    rows = [Row(o) for o in owners]
    view = resource.plan(rows)
    view.write("ssm", torch.full((2, 4), 99.0))
    resource.rollback(rows)
    add(resource, owners[1:], [10.0])
    assert values(resource, owners) == [1.0, 12.0]
    add(resource, owners[:1], [10.0])
    assert values(resource, owners) == [11.0, 12.0]


def test_a_retracted_step_leaves_the_committed_state() -> None:
    resource = state()
    owners = [start(resource, n) for n in "abc"]
    add(resource, owners, [1.0, 2.0, 3.0])
    add(resource, owners, [10.0, 20.0, 30.0])
    resource.retract(Row(owners[1]))
    assert values(resource, owners) == [11.0, 2.0, 33.0]
    add(resource, owners, [100.0, 200.0, 300.0])  # the rows lie on different sides now
    assert values(resource, owners) == [111.0, 202.0, 333.0]
    rows = [Row(owners[0])]
    resource.plan(rows)
    resource.commit(rows)  # a step that wrote nothing
    resource.retract(rows[0])
    assert values(resource, owners) == [111.0, 202.0, 333.0]


def test_what_a_step_does_not_write_stays() -> None:
    resource = state()
    owner = start(resource, "a")
    rows = [Row(owner)]
    view = resource.plan(rows)
    view.write("conv", torch.full((1, 2, 3), 7.0))
    view.write("ssm", torch.ones(1, 4))
    resource.commit(rows)
    for _ in range(3):
        add(resource, [owner], [1.0])
    assert resource.plan(rows).read("conv").eq(7).all()
    assert resource.plan(rows).read("ssm").eq(4).all()


def test_a_lane_reads_and_writes_where_its_rows_are_now() -> None:
    """What a capture has seen once is repeated for other rows, with padding, by the tensors alone."""
    resource = state(owners=5)
    stage = resource.context.stage
    owners = [start(resource, str(i)) for i in range(5)]
    add(resource, owners, [1.0, 2.0, 3.0, 4.0, 5.0])
    lane = Lane(4, torch.device("cpu"))
    stage.begin(lane)
    view = resource.plan([Row(owners[0])])
    stage.send()
    read, write = (lane.tensors["state.places"][2][side, resource.numbers["ssm"]] for side in (0, 1))
    lane.graph = object()

    def replay(rows: list[Row]) -> None:
        stage.begin(lane)
        assert resource.plan(rows) is view
        stage.send()
        pool = resource.pool("ssm")
        pool.index_copy_(0, write, pool.index_select(0, read) * 10)

    view.write("ssm", view.read("ssm") * 10)
    resource.rollback([])
    for rows in ([Row(owners[3]), Row(owners[1])], [Row(owners[1])], [Row(o) for o in owners[:4]]):
        replay(rows)
        resource.commit(rows)
    stage.begin()
    assert values(resource, owners) == [10.0, 2000.0, 30.0, 400.0, 5.0]
    replay([Row(owners[1]), Row(owners[4])])
    resource.commit([Row(owners[1]), Row(owners[4])])
    resource.retract(Row(owners[1]))
    stage.begin()
    assert values(resource, owners) == [10.0, 2000.0, 30.0, 400.0, 50.0]


def test_the_pool_keeps_its_dtype() -> None:
    resource = state()
    owners = [start(resource, n) for n in "ab"]
    assert resource.pool("conv").dtype == torch.bfloat16
    assert resource.pool("ssm").dtype == torch.float32
    for order in (owners, owners[::-1]):
        rows = [Row(o) for o in order]
        view = resource.plan(rows)
        view.write("conv", torch.full((2, 2, 3), 1.5))
        resource.commit(rows)
        assert resource.plan(rows).read("conv").dtype == torch.bfloat16
        assert resource.plan(rows).read("conv").eq(1.5).all()


def test_contiguous_rows_are_read_without_a_copy() -> None:
    resource = state()
    owners = [start(resource, str(i)) for i in range(3)]
    shared = resource.plan([Row(o) for o in owners[1:]]).read("ssm")
    assert shared.data_ptr() == resource.pool("ssm")[2].data_ptr()


def test_a_new_owner_starts_from_zeros_and_a_session_goes_on() -> None:
    resource = state(owners=1)
    owner = start(resource, "a")
    add(resource, [owner], [7.0])
    resource.open(owner, EngineRequest(id="next"))
    assert values(resource, [owner]) == [7.0]
    resource.close(owner)
    assert values(resource, [start(resource, "b")]) == [0.0]


def test_sizes_that_cannot_hold_are_refused_with_the_numbers() -> None:
    with pytest.raises(SetupError, match=r"slots=3, but 4 contexts"):
        state(owners=4, spec=RecurrentState(tensors=SPEC.tensors, slots=3))
    one = 2 * 3 * 2 + 4 * 4
    with pytest.raises(SetupError, match=rf"5 slots of 2 × {one} bytes need .* B, more than the memory budget"):
        state(owners=4, memory=9 * one)
    assert state(owners=4, memory=10 * one).capacity() == 4
    with pytest.raises(SetupError, match="float33"):
        state(spec=RecurrentState(tensors={"x": ((1,), "float33")}))


def test_books_and_faults() -> None:
    resource = state(owners=2)
    owners = [start(resource, n) for n in "ab"]
    assert not resource.reserve(Owner("c"), 1)
    resource.check(owners)
    assert resource.usage() == (2, 2, 0)
    assert resource.match(owners[0], [1, 2]) == 0
    resource.close(owners[0])
    with pytest.raises(IntegrityError):
        resource.check(owners)
    rows = [Row(owners[1])]
    view = resource.plan(rows)
    with pytest.raises(ValueError, match="expected"):
        view.write("ssm", torch.zeros(2, 4))
    with pytest.raises(KeyError, match="did you mean 'conv'"):
        view.read("convs")
    resource.rollback(rows)
    with pytest.raises(IntegrityError, match="without a plan"):
        resource.commit(rows)

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


KEEPING = RecurrentState(tensors={"ssm": ((4,), "float32")}, page=2, checkpoints=4)


def told(resource: RecurrentStateResource, owner: Owner, amount: float, ids: list[int] | None, length: int = 1) -> None:
    """A step that adds *amount*."""
    rows = [Row(owner, length, True, ids)]
    view = resource.plan(rows)
    view.write("ssm", view.read("ssm") + amount)
    resource.commit(rows)


def test_a_retracted_step_leaves_no_checkpoint() -> None:
    resource = state(spec=KEEPING)
    owner = start(resource, "a")
    told(resource, owner, 1.0, [5])
    told(resource, owner, 99.0, None)  # a step ahead, to the end of the page
    resource.retract(Row(owner))
    resource.check([owner])
    told(resource, owner, 2.0, None)
    resource.learn(owner, [6])
    heir = start(resource, "b")
    assert resource.match(heir, [5, 6, 7]) == 2
    resource.skip(heir, [5, 6])
    told(resource, heir, 10.0, [7])
    told(resource, owner, 20.0, [8])
    assert values(resource, [owner, heir]) == [23.0, 13.0]
    resource.check([owner, heir])


def test_prompts_are_cut_where_a_checkpoint_is_wanted() -> None:
    resource = state(spec=RecurrentState(tensors=SPEC.tensors, page=2, checkpoints=4, checkpoint_tokens=17))
    owner = start(resource, "a")
    cuts, left = [], 45
    while left:
        cuts.append(resource.cut(owner, left))
        told(resource, owner, 1.0, [0] * cuts[-1], cuts[-1])
        left -= cuts[-1]
    assert cuts == [16, 16, 12, 1]  # every eighth page, and the last boundary before the last token
    short = start(resource, "b")
    assert resource.cut(short, 4) == 4  # what would be saved is not worth a step
    resource.missed(short, 3)
    assert resource.cut(short, 4) == 2


def test_a_step_writes_a_tensor_in_all_layers_or_in_none() -> None:
    resource = state(spec=RecurrentState(tensors={"ssm": ((4,), "float32")}, layers=3))
    owner = start(resource, "a")
    rows = [Row(owner)]
    view = resource.plan(rows)
    for layer in range(2):
        view.write("ssm", torch.full((1, 4), layer + 1.0), layer)
    with pytest.raises(RuntimeError, match=r"not in \[2\]"):
        resource.commit(rows)
    view = resource.plan(rows)
    for layer in range(3):
        view.write("ssm", torch.full((1, 4), layer + 1.0), layer)
    resource.commit(rows)
    view = resource.plan(rows)
    assert [view.read("ssm", layer)[0, 0].item() for layer in range(3)] == [1, 2, 3]
    with pytest.raises(IndexError, match="there are 3"):
        view.read("ssm", 3)


def test_checkpoints_are_part_of_the_memory_plan() -> None:
    one = 4 * 4
    kept = {n: RecurrentState(tensors=KEEPING.tensors, checkpoints=n) for n in (None, 3, 0)}
    assert state(owners=4, spec=kept[3], memory=13 * one).device_bytes() == 13 * one
    with pytest.raises(SetupError, match=rf"3 checkpoints of {one} need 208 B.*resources\.state\.checkpoints: 2"):
        state(owners=4, spec=kept[3], memory=12 * one)
    assert state(owners=4, spec=kept[None]).checkpoints.most == 8
    assert state(owners=4, spec=kept[None], memory=(10 + 16) * one).checkpoints.most == 2
    assert state(owners=4, spec=kept[None], memory=10 * one).checkpoints.most == 0


def test_ids_behind_some_that_are_never_told_name_no_checkpoint() -> None:
    """A request of a session was cancelled while its last step was under way; the next one goes on behind it."""
    resource = state(spec=KEEPING)
    owner = start(resource, "session")
    told(resource, owner, 1.0, [5])
    told(resource, owner, 2.0, None)  # its id is 6, which nobody will tell
    told(resource, owner, 4.0, [7, 8], 2)
    told(resource, owner, 8.0, None)
    resource.learn(owner, [9])
    told(resource, owner, 16.0, None)
    resource.learn(owner, [9])
    resource.check([owner])
    heir = start(resource, "b")
    for ids in ([5, 9, 1], [5, 7, 8, 9, 1], [5, 6, 7, 8, 1], [5, 9, 9, 1, 1]):
        assert resource.match(heir, ids) == 0
    assert resource.usage().cached == 0

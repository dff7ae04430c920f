"""What ranks tell each other, in real processes."""

from __future__ import annotations

import pytest
import torch

from mstar.nn import symmetric
from mstar.nn.linear import LMHead, RowLinear
from mstar.nn.mesh import SINGLE, Group, Mesh, World
from mstar.spec.errors import SetupError
from mstar.testing.ranks import RankFailure, Ranks


def drawn(rank: int, rows: int = 3, width: int = 5) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))


def add(world: World, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = world.mesh([0, 1, 2, 3], tp=4)
    assert mesh is not None
    tp = mesh.tp
    x = drawn(world.rank).to(getattr(torch, dtype))
    return tp.all_reduce(x.clone()), tp.all_reduce(x[:1].clone())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sum_is_the_ranks_in_their_order_whatever_the_size(ranks: Ranks, dtype: str) -> None:
    found = ranks.run(4, add, dtype)
    expected = torch.zeros(3, 5)
    for rank in range(4):
        expected = expected + drawn(rank).to(getattr(torch, dtype)).float()
    for whole, first in found:
        assert torch.equal(whole, expected.to(getattr(torch, dtype)))
        assert torch.equal(first, whole[:1])


class Gathering:
    """A reducer that is there on CPUs too: it takes messages of up to 12 numbers."""

    def __init__(self, tp: Group):
        self.tp, self.made = tp, []  # type: ignore[var-annotated]

    def takes(self, x: torch.Tensor) -> bool:
        return x.numel() <= 12

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.made.append("reduce")
        return self.tp.all_gather(x[None], 0).sum(0)

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        self.made.append("add")
        residual += self.tp.all_gather(x[None], 0).sum(0)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.made.append("gather")
        return self.tp.all_gather(x, -1)


def beside(world: World, ordered: bool) -> tuple[list[str], list[bool], list[torch.Tensor]]:
    """A row-parallel layer's sums and a head's rows: what the reducer did, what was left to add, streams and logits."""
    mesh = world.mesh([0, 1], tp=2)
    assert mesh is not None
    own = mesh.tp
    reducer = Gathering(own)
    tp = Group(own.rank, own.size, own.handle, ordered, reducer)
    layer, head = RowLinear(8, 4, bias=True, tp=tp), LMHead(4, 16, tp=tp)
    assert layer.bias is not None
    layer.weight.copy_(drawn(7, 4, 8)[:, 4 * own.rank :][:, :4])
    layer.bias.copy_(torch.arange(4.0))
    head.weight.copy_(drawn(8, 16, 4)[8 * own.rank :][:8])
    lefts, found = [], []
    for rows in (3, 4):
        x, stream = drawn(9, rows, 8)[:, 4 * own.rank :][:, :4], torch.ones(rows, 4)
        left = layer.add_to(stream, x)
        lefts.append(left is not None)
        found.append(stream if left is None else stream + left)
    found += [head(torch.ones(1, 4)), layer(drawn(9, 3, 8)[:, 4 * own.rank :][:, :4])]
    return reducer.made, lefts, found


@pytest.mark.parametrize(("ordered", "made", "lefts"), [(False, "add", [False, True]), (True, "reduce", [True] * 2)])
def test_short_messages_go_through_a_reducer(ranks: Ranks, ordered: bool, made: str, lefts: list[bool]) -> None:
    """A sum is added to the stream at once, but where it must not matter how long the message is."""
    for said, left, found in ranks.run(2, beside, ordered):
        assert (said, left) == ([made, "gather", "reduce"], lefts)
        for rows, stream in zip((3, 4), found[:2], strict=True):
            exact = 1 + drawn(9, rows, 8) @ drawn(7, 4, 8).T + torch.arange(4.0)
            torch.testing.assert_close(stream, exact)
        torch.testing.assert_close(found[2], torch.ones(1, 4) @ drawn(8, 16, 4).T)
        torch.testing.assert_close(found[3], found[0] - 1)


def places(world: World) -> tuple[list[int], list[int], list[int], int, int]:
    mesh = world.mesh([2, 0, 3, 1], tp=2, sp=2)
    assert mesh is not None
    tp = mesh.tp.all_gather(torch.tensor([world.rank]), 0).tolist()
    sp = mesh.sp.all_gather(torch.tensor([world.rank]), 0).tolist()
    given = mesh.tp.exchange(torch.tensor([[10 * world.rank], [10 * world.rank + 1]])).flatten().tolist()
    return tp, sp, given, mesh.rank, mesh.least(world.rank + 5)


def test_the_two_axes_of_a_mesh(ranks: Ranks) -> None:
    found = ranks.run(4, places)
    assert [one[0] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [one[1] for one in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [one[2] for one in found] == [[0, 10], [1, 11], [20, 30], [21, 31]]
    assert [one[3] for one in found] == [0, 1, 2, 3]
    assert {one[4] for one in found} == {5}


def some(world: World) -> list[int] | None:
    mesh = world.mesh([0, 2], tp=2)
    return None if mesh is None else mesh.tp.all_gather(torch.tensor([world.rank]), 0).tolist()


def test_ranks_that_are_not_of_a_mesh_have_none(ranks: Ranks) -> None:
    assert ranks.run(4, some) == [[0, 2], None, [0, 2], None]


def refused(world: World) -> str:
    with pytest.raises(SetupError) as error:
        world.mesh([0, 1, 2], tp=2)
    return str(error.value)


def test_ranks_that_are_no_rectangle_are_refused(ranks: Ranks) -> None:
    assert ranks.run(4, refused)[:1] == ["ranks [0, 1, 2] are no mesh of tp=2 × sp=1: it takes 2 different ones"]


def fails(world: World) -> None:
    if world.rank == 1:
        raise ValueError("on purpose")
    world.mesh([0, 1], tp=2)


def number(world: World) -> int:
    return world.rank


def test_a_failure_on_one_rank_is_told_and_the_next_run_is_fresh(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 2[\s\S]*on purpose"):
        ranks.run(2, fails)
    assert ranks.run(2, number) == [0, 1]


def test_one_rank_costs_nothing_and_a_sketch_cannot_talk() -> None:
    x = torch.ones(2)
    assert SINGLE.tp.all_reduce(x) is x
    assert SINGLE.size == 1
    sketch = Mesh.sketch(tp=2, sp=3, rank=5)
    assert (sketch.tp.rank, sketch.sp.rank, sketch.rank, sketch.size) == (1, 2, 5, 6)
    with pytest.raises(RuntimeError, match="no process group"):
        sketch.tp.all_reduce(torch.ones(1))


def test_a_world_needs_processes() -> None:
    with pytest.raises(RuntimeError, match="not been initialised"):
        World(torch.device("cpu"))


class Tried(Gathering):
    """A reducer to be opened, of up to 16 numbers in float32. *fault*: what is wrong with it on rank 1."""

    most = 64

    def __init__(self, tp: Group, fault: str, alone: bool = False):
        super().__init__(tp)
        self.fault, self.alone = fault if tp.rank == 1 else "", alone

    def echo(self) -> Tried:
        return Tried(self.tp, self.fault, True)

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        self.made.append("alone" if self.alone else "together")
        found = torch.stack([x] * self.tp.size) if self.alone else self.tp.all_gather(x[None], 0)
        if self.fault == ("echo" if self.alone else "peers"):
            found[-1, ..., -1] += 1
        return found

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._all(x).sum(0)

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        residual += self._all(x).sum(0)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self._all(x)), -1)


def opened(world: World, fault: str) -> tuple[bool, str | None, set[str]]:
    mesh = world.mesh([0, 1], tp=2)
    assert mesh is not None
    tp, made = mesh.tp, []

    def make(handle: object, device: torch.device, most: int) -> Tried:
        if fault == "make" and tp.rank == 1:
            raise RuntimeError("no way there")
        made.append(Tried(tp, fault))
        return made[0]

    settled = symmetric._settled
    if fault == "late" and tp.rank == 1:
        symmetric._settled = lambda device: False
    try:
        reducer, why = symmetric.open_reducer(tp.handle, torch.device("cpu"), 64, tp.least, make)
    except SetupError as error:
        return False, f"SetupError: {error}", set()
    finally:
        symmetric._settled = settled
    return reducer is not None, why, set(made[0].made) if made else set()


@pytest.mark.parametrize(
    ("fault", "there", "whys"),
    [
        ("", True, [None, None]),
        ("make", False, ["another rank has none", "no way there"]),
        ("echo", False, ["another rank has none", "its kernels give wrong numbers on this GPU"]),
        ("peers", False, ["numbers arrive wrong on one of the GPUs"] * 2),
    ],
)
def test_a_reducer_is_tried_before_it_is_used(ranks: Ranks, fault: str, there: bool, whys: list[str | None]) -> None:
    found = ranks.run(2, opened, fault)
    assert [one[0] for one in found] == [there] * 2
    assert [one[1] for one in found] == whys
    asked = {"together"} if fault in ("", "peers") else set()
    assert all(one[2] <= asked for one in found), "a rank that has none is waited for"


def test_words_that_never_come_end_the_start_on_all_ranks(ranks: Ranks) -> None:
    first, second = (one[1] for one in ranks.run(2, opened, "late"))
    assert first == (
        "SetupError: another GPU of this mesh has waited 10 s for what the others wrote into its memory; with "
        "engine.symmetric_bytes: 0 sums go through NCCL"
    )
    assert second is not None
    assert second.startswith("SetupError: a GPU of this mesh has waited")

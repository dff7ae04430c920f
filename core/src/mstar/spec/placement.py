"""Which processes run which node: the deployment's ``placement``, checked and resolved. No torch.

A *rank* is one worker process with a device of its own. A *seat* is one loaded copy of a node: one rank, or a tp × sp
mesh of them. A node with several seats has *replicas*; each request uses one of them for all of its calls.

A node may have a place for each *part* of its work: a walk, or what stands in loops (``decode``) and what does not
(``prefill``). A request then goes from place to place, in the order in which they are given, and its state with it; it
never goes back: a call of an earlier part runs where the request's state is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mstar.spec.errors import counted, nearest
from mstar.spec.graph import Call, Graph, Loop, Par, Seq, Walk

__all__ = [
    "DECODE",
    "MOST_RANKS",
    "PREFILL",
    "Layout",
    "NodePlacement",
    "Placed",
    "Seat",
    "apart",
    "companions",
    "layout_of",
    "placement_faults",
    "ranks_of",
    "same_form",
    "users_of",
]

PREFILL, DECODE = "prefill", "decode"
MOST_RANKS = 1024
"""Of one copy. Each is a process, and what is checked is checked for each."""


class NodePlacement(BaseModel):
    """Where one node runs. ``lm: 1`` and ``lm: [0, 1]`` are short for ``lm: {ranks: …}``, and
    ``lm: {prefill: 1, decode: 0}`` for ``lm: {walks: …}``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    walks: dict[str, Placed] = Field(
        default_factory=dict,
        description="Instead of all else: a place for each walk, or for `prefill` (what is in no loop) and `decode`, "
        "in the order in which a request comes to them. Its state moves along.",
    )
    ranks: tuple[Annotated[int, Field(ge=0, lt=MOST_RANKS)], ...] = Field(
        (0,), description="The processes that run it, tensor-parallel neighbours side by side."
    )
    tp: int = Field(1, ge=1, description="Ranks that share each layer's weights (tensor parallelism).")
    sp: int = Field(1, ge=1, description="Ranks that share a sequence (sequence parallelism).")

    split: Literal["requests", "contexts"] = Field(
        "requests",
        description="What several copies of the node share out: `requests`, or the `contexts` of each (guidance "
        "branches apart).",
    )

    @model_validator(mode="after")
    def _adds_up(self) -> NodePlacement:
        if self.walks:
            self._parts_add_up()
            return self
        ranks, mesh = self.ranks, self.tp * self.sp
        if not ranks:
            raise ValueError("no rank is named; leave the node out, and it runs on rank 0")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks {list(ranks)} name a rank twice")
        if len(ranks) % mesh:
            raise ValueError(
                f"{counted(len(ranks), 'rank')} for tp × sp = {self.tp} × {self.sp}: give {mesh} ranks, or a multiple "
                "of it for replicas"
            )
        return self

    def _parts_add_up(self) -> None:
        fields = {name: field.default for name, field in type(self).model_fields.items() if name != "walks"}
        beside = [name for name, default in fields.items() if getattr(self, name) != default]
        if beside:
            raise ValueError(f"{', '.join(beside)} beside walks: each walk's place has its own")
        for part, place in self.walks.items():
            if place.walks or place.split != "requests":
                raise ValueError(f"{part}: a walk's place has ranks, tp and sp only")
        kinds = {part: (place.tp, place.sp) for part, place in self.walks.items()}
        if len(set(kinds.values())) > 1:
            told = ", ".join(f"{part} tp {tp} × sp {sp}" for part, (tp, sp) in kinds.items())
            raise ValueError(f"{told}: state moves only between places that divide the node alike")
        places = [place.seats for place in self.walks.values()]
        for number, seats in enumerate(places):
            again = next((seat for later in places[number + 2 :] for seat in seats if seat in later), None)
            if again is not None:
                raise ValueError(f"{again} comes twice, with another place between: a request never goes back")

    @property
    def seats(self) -> tuple[Seat, ...]:
        if self.walks:
            return tuple(dict.fromkeys(seat for place in self.walks.values() for seat in place.seats))
        mesh = self.tp * self.sp
        return tuple(
            Seat(self.ranks[start : start + mesh], self.tp, self.sp) for start in range(0, len(self.ranks), mesh)
        )


def _spelled_out(value: Any) -> Any:
    """The short forms as a mapping."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"ranks": [value]}
    if isinstance(value, list | tuple):
        return {"ranks": value}
    if not isinstance(value, Mapping | NodePlacement):
        raise ValueError(f"give a rank, a list of ranks, or {{ranks: [0, 1], tp: 2}} (got {value!r})")
    if isinstance(value, Mapping) and value and not NodePlacement.model_fields.keys() & value.keys():
        return {"walks": value}
    return value


def same_form(one: Any, other: Any) -> bool:
    """Whether two places of a node, as they are written, can be merged key by key: both by walk, or neither."""
    return _by_walk(one) == _by_walk(other)


def _by_walk(place: Any) -> bool:
    return (
        isinstance(place, Mapping)
        and bool(place)
        and not place.keys() & (NodePlacement.model_fields.keys() - {"walks"})
    )


Placed = Annotated[NodePlacement, BeforeValidator(_spelled_out)]
"""A :class:`NodePlacement`, or its short forms."""

NodePlacement.model_rebuild()


@dataclass(frozen=True)
class Seat:
    """One loaded copy of a node. The first of *ranks* answers for all."""

    ranks: tuple[int, ...] = (0,)
    tp: int = 1
    sp: int = 1

    def __str__(self) -> str:
        mesh = [f"{name} {size}" for name, size in (("tp", self.tp), ("sp", self.sp)) if size > 1]
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return f"{ranks} ({', '.join(mesh)})" if mesh else ranks


@dataclass(frozen=True)
class Layout:
    """A model's nodes on their ranks. Rank 0 coordinates.

    :param seats: node → its copies. :param by_context: nodes whose copies share out the contexts of a request.
    :param by_walk: node → part → the copies that run it, for nodes with a place for each part, in order.
    """

    seats: Mapping[str, tuple[Seat, ...]]
    by_context: frozenset[str] = frozenset()
    by_walk: Mapping[str, Mapping[str, tuple[Seat, ...]]] = field(default_factory=dict)

    def stages(self, node: str) -> tuple[tuple[Seat, ...], ...]:
        """The copies of *node* among which a request has one, one after the other."""
        parts = self.by_walk.get(node)
        return (self.seats[node],) if parts is None else tuple(parts.values())

    def stage(self, node: str, walk: str, looped: bool) -> int | None:
        """Which of :meth:`stages` the calls of *node* in *walk* belong to, in its loops or not; ``None``: to whichever
        the request has come to."""
        for part in (walk, DECODE if looped else PREFILL):
            if part in self.by_walk.get(node, ()):
                return list(self.by_walk[node]).index(part)
        return None

    def placed_alike(self, one: str, other: str) -> bool:
        """Whether the nodes *one* and *other* are always at the same places."""
        return self._place(one) == self._place(other)

    def _place(self, node: str) -> tuple[object, ...]:
        return self.seats[node], node in self.by_context, [*self.by_walk.get(node, {}).items()]

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return 1 + max((rank for rank, _ in self._places()), default=0)

    def nodes_of(self, rank: int) -> list[str]:
        """The nodes that *rank* loads."""
        return [node for node, seats in self.seats.items() if any(rank in seat.ranks for seat in seats)]

    def seat_of(self, node: str, rank: int) -> Seat | None:
        """The copy of *node* that *rank* takes part in."""
        return next((seat for seat in self.seats[node] if rank in seat.ranks), None)

    def gang(self, rank: int) -> tuple[int, ...]:
        """The ranks that run steps together with *rank*, itself included: they live and die together."""
        for _, seat in self._places():
            if rank in seat.ranks and len(seat.ranks) > 1:
                return seat.ranks
        return (rank,)

    def _places(self) -> Iterator[tuple[int, Seat]]:
        for seats in self.seats.values():
            for seat in seats:
                for rank in seat.ranks:
                    yield rank, seat


def ranks_of(placement: Mapping[str, NodePlacement]) -> int:
    """How many processes *placement* asks for, whatever the model's nodes are. At least one."""
    seats = (seat for place in placement.values() for seat in place.seats)
    return 1 + max((rank for seat in seats for rank in seat.ranks), default=0)


def layout_of(placement: Mapping[str, NodePlacement], nodes: Iterable[str]) -> Layout:
    """*placement* for a model with *nodes*; those that it does not name run on rank 0."""
    places = {node: placement.get(node, NodePlacement()) for node in nodes}
    by_context = frozenset(node for node, place in places.items() if place.split == "contexts")
    by_walk = {
        node: {part: where.seats for part, where in place.walks.items()}
        for node, place in places.items()
        if place.walks
    }
    return Layout({node: place.seats for node, place in places.items()}, by_context, by_walk)


def users_of(graph: Graph) -> dict[str, list[str]]:
    """Resource → the nodes of *graph* that use it."""
    users: dict[str, list[str]] = {}
    for node in graph.nodes:
        for name in dict.fromkeys(name for entry in node.entries for name in entry.resources):
            users.setdefault(name, []).append(node.name)
    return users


def placement_faults(placement: Mapping[str, NodePlacement], graph: Graph) -> Iterator[tuple[str, str]]:
    """What cannot be of *placement* for a model with *graph*: (key's path, what is wrong with it)."""
    nodes = [node.name for node in graph.nodes]
    for node in placement:
        if node not in nodes:
            yield f"placement.{node}", f"unknown node{nearest(node, nodes)}"
    layout = layout_of(placement, nodes)
    used = {rank for node in nodes for seat in layout.seats[node] for rank in seat.ranks}
    if all(name in nodes for name in placement) and (idle := _idle(used)):
        each, told = "runs" if len(idle) == 1 and idle[0].isdigit() else "run", ", ".join(idle)
        yield (
            "placement",
            f"rank{'' if each == 'runs' else 's'} {told} {each} no node: ranks count from 0, without gaps; rank 0 "
            "coordinates",
        )
    yield from _mesh_faults(layout)
    yield from _split_faults(layout, graph)
    for group in dict.fromkeys(companions(graph).values()):
        moving = [node for node in group if node in layout.by_walk]
        for node in moving:
            yield from _part_faults(node, group, layout.by_walk[node], graph)
        if moving:
            yield from _order_faults(moving[0], group, graph)
    for resource, names in users_of(graph).items():
        if not all(layout.placed_alike(names[0], name) for name in names):
            where = "; ".join(f"{name!r} on {_where(layout, name)}" for name in names)
            moved = next((name for name in names if name in placement), names[0])
            yield f"placement.{moved}", f"the nodes that share resource {resource!r} must be placed alike: {where}"


def _idle(used: Collection[int]) -> list[str]:
    """The ranks below the last one that are not in *used*, as numbers and spans of numbers."""
    spans, before = [], -1
    for rank in sorted(used):
        if rank - before > 1:
            spans.append(f"{before + 1}" if rank - before == 2 else f"{before + 1} to {rank - 1}")
        before = rank
    return spans


def apart(graph: Graph, nodes: Collection[str]) -> tuple[str, ...]:
    """The contexts in which *graph* has several calls of *nodes* at a time, in alphabetical order: guidance branches,
    say. Copies can share them out. *nodes*: those whose state is in one place, see :func:`companions`."""
    found = {name: list(_in_contexts(walk, nodes, False)) for name, walk in graph.walks.items()}
    callers = [part for part in graph.partitions if any(found[walk] for walk in part.walks)]
    several = len(callers) > 1
    return tuple(sorted({context for calls in found.values() for context, beside in calls if beside or several}))


def _in_contexts(walk: Walk, nodes: Collection[str], beside: bool) -> Iterator[tuple[str, bool]]:
    """For each call of *nodes* in *walk*: its context, and whether another call may run at the same time."""
    if isinstance(walk, Call):
        if walk.node in nodes:
            yield walk.context, beside
    elif isinstance(walk, Seq | Par):
        parts = [list(_in_contexts(part, nodes, beside)) for part in walk.parts]
        several = isinstance(walk, Par) and sum(map(bool, parts)) > 1
        for calls in parts:
            for context, before in calls:
                yield context, before or several
    else:
        yield from _in_contexts(walk.body, nodes, beside)


def _split_faults(layout: Layout, graph: Graph) -> Iterator[tuple[str, str]]:
    """Copies that would never have a context to compute."""
    together = companions(graph)
    for node in sorted(layout.by_context):
        contexts, copies = apart(graph, together[node]), len(layout.seats[node])
        if copies <= max(1, len(contexts)):
            continue
        if len(contexts) < 2:
            found = f"no calls of node {node!r} at once are in contexts of their own"
            advice = "leave `split` out, and the copies share requests"
        else:
            found = f"the calls of node {node!r} at once are in {len(contexts)} contexts, {_listed(contexts)}"
            advice = f"{len(contexts)} copies would do"
        yield f"placement.{node}.split", f"nothing for each of {copies} copies to do: {found}; {advice}"


def _mesh_faults(layout: Layout) -> Iterator[tuple[str, str]]:
    """Meshes that overlap without being the same: a process can be in one group of processes."""
    meshes = [(node, seat) for node, seats in layout.seats.items() for seat in seats if len(seat.ranks) > 1]
    for number, (node, seat) in enumerate(meshes):
        for other, before in meshes[:number]:
            shared = set(seat.ranks) & set(before.ranks)
            if shared and seat.ranks != before.ranks:
                yield (
                    f"placement.{node}",
                    f"its mesh, {seat}, shares rank {min(shared)} with that of {other!r}, {before}: "
                    "meshes must have the same ranks in the same order, or none in common",
                )
                break


def companions(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Node → the nodes, itself included, that share resources with it, directly or by way of others: their state moves
    together."""
    groups: list[set[str]] = [{node.name} for node in graph.nodes]
    for users in users_of(graph).values():
        joined = [group for group in groups if group & {*users}]
        groups = [group for group in groups if group not in joined] + [set().union(*joined)]
    return {node: tuple(sorted(group)) for group in groups for node in sorted(group)}


def _part_faults(node: str, group: Sequence[str], parts: Collection[str], graph: Graph) -> Iterator[tuple[str, str]]:
    """Parts of *node* that there are not. It may have nothing to do in one that others of its *group* have calls in:
    where their state goes it goes, too."""
    found = [(walk, looped) for walk in graph.walks for looped, _ in _uses(graph.walks[walk], group)]
    walks = {walk for walk, _ in found}
    for part in parts:
        key = f"placement.{node}.{part}"
        if part not in (*graph.walks, PREFILL, DECODE):
            yield key, f"unknown walk{nearest(part, [*walks, PREFILL, DECODE, *NodePlacement.model_fields])}"
        elif part in walks:
            continue
        elif part not in (PREFILL, DECODE):
            yield key, f"walk {part!r} does not call node {node!r}; {_listed(walks)} does"
        elif all(looped != (part == DECODE) or walk in parts for walk, looped in found):
            where = "in a loop" if part == DECODE else "outside of loops"
            yield key, f"no call of node {node!r} is left for it: none is {where}"
    if len(parts) < 2:
        yield f"placement.{node}", "a place for one walk only: name two walks, or give the ranks alone"


def _order_faults(node: str, nodes: tuple[str, ...], graph: Graph) -> Iterator[tuple[str, str]]:
    """Where a request may have several calls at once of *nodes*, whose state is in one place at a time."""
    found = {walk: [beside for _, beside in _uses(graph.walks[walk], nodes)] for walk in graph.walks}
    partitions = [p.name for p in graph.partitions if any(found[walk] for walk in p.walks)]
    wanted = "a place for each walk needs one call at a time"
    if len(partitions) > 1:
        yield f"placement.{node}", f"the partitions {_listed(partitions)} call {_listed(nodes)} at once: {wanted}"
    for walk, besides in found.items():
        if any(besides):
            yield f"placement.{node}", f"walk {walk!r} calls {_listed(nodes)} in several branches at once: {wanted}"


def _uses(walk: Walk, nodes: Sequence[str], looped: bool = False, beside: bool = False) -> Iterator[tuple[bool, bool]]:
    """For each call of *nodes* in *walk*: whether it is in a loop, and whether another may run at the same time."""
    if isinstance(walk, Call):
        if walk.node in nodes:
            yield looped, beside
    elif isinstance(walk, Seq | Par):
        several = isinstance(walk, Par) and sum(any(True for _ in _uses(part, nodes)) for part in walk.parts) > 1
        for part in walk.parts:
            yield from _uses(part, nodes, looped, beside or several)
    else:
        yield from _uses(walk.body, nodes, looped or isinstance(walk, Loop), beside)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _where(layout: Layout, node: str) -> str:
    if node in layout.by_walk:
        return ", ".join(f"{_all(seats)} for {part}" for part, seats in layout.by_walk[node].items())
    return _all(layout.seats[node])


def _all(seats: Sequence[Seat]) -> str:
    return " and ".join(map(str, seats))

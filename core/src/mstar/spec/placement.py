"""Which processes run which node: the deployment's ``placement``, checked and resolved. No torch.

A *rank* is one worker process with a device of its own. A *seat* is one loaded copy of a node: one rank, or a tp × sp
mesh of them. A node with several seats has *replicas*; each request uses one of them for all of its calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mstar.spec.errors import counted, nearest
from mstar.spec.graph import Graph

__all__ = ["Layout", "NodePlacement", "Placed", "Seat", "layout_of", "placement_faults", "ranks_of", "users_of"]


class NodePlacement(BaseModel):
    """Where one node runs. ``lm: 1`` and ``lm: [0, 1]`` are short for ``lm: {ranks: …}``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0,), min_length=1, description="The processes that run it, tensor-parallel neighbours side by side."
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
        ranks, mesh = self.ranks, self.tp * self.sp
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks {list(ranks)} name a rank twice")
        if len(ranks) % mesh:
            raise ValueError(
                f"{counted(len(ranks), 'rank')} for tp × sp = {self.tp} × {self.sp}: give {mesh} ranks, or a multiple "
                "of it for replicas"
            )
        return self

    @property
    def seats(self) -> tuple[Seat, ...]:
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
    return value


Placed = Annotated[NodePlacement, BeforeValidator(_spelled_out)]
"""A :class:`NodePlacement`, or its short forms."""


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
    """

    seats: Mapping[str, tuple[Seat, ...]]
    by_context: frozenset[str] = frozenset()

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
    return 1 + max((rank for place in placement.values() for rank in place.ranks), default=0)


def layout_of(placement: Mapping[str, NodePlacement], nodes: Iterable[str]) -> Layout:
    """*placement* for a model with *nodes*; those that it does not name run on rank 0."""
    places = {node: placement.get(node, NodePlacement()) for node in nodes}
    by_context = frozenset(node for node, place in places.items() if place.split == "contexts")
    return Layout({node: place.seats for node, place in places.items()}, by_context)


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
    for rank in range(ranks_of(placement)):
        if rank not in used and all(name in nodes for name in placement):
            yield "placement", f"rank {rank} runs no node: ranks count from 0, without gaps; rank 0 coordinates"
    yield from _mesh_faults(layout)
    for resource, names in users_of(graph).items():
        places = {(layout.seats[name], name in layout.by_context) for name in names}
        if len(places) > 1:
            where = "; ".join(f"{name!r} on {_all(layout.seats[name])}" for name in names)
            moved = next((name for name in names if name in placement), names[0])
            yield f"placement.{moved}", f"the nodes that share resource {resource!r} must be placed alike: {where}"


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
                    "meshes must have the same ranks, or none in common",
                )
                break


def _all(seats: Sequence[Seat]) -> str:
    return " and ".join(map(str, seats))

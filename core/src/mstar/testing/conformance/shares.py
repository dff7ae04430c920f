"""Checks of nodes that several ranks can compute together: their shares are the whole."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from mstar.nn.mesh import Mesh, building
from mstar.nn.model import Model
from mstar.nn.node import Node, says
from mstar.nn.shards import layout_faults
from mstar.testing.conformance.subject import Subject, fail
from mstar.weights.loader import mismatches
from mstar.weights.names import WeightMap

__all__ = ["ShareChecks"]

_MOST = 16
"""Ranks that are tried."""


class ShareChecks:
    """A node that says that it can be divided can be, and its ranks have all of the weights between them."""

    def test_shares_of_tensors_make_up_the_whole(self, mstar_model: Subject) -> None:
        """For each node that says ``tensor_parallel``: built for as few ranks as it can be divided among, every rank's
        share fits the checkpoint, and between them they have each published tensor. Skipped where no number up to 16
        will do: sizes of a tiny checkpoint that have no common divisor."""
        model: Model = mstar_model.driver().worker._model
        names = [node.name for node in mstar_model.driver().worker.plan.graph.nodes]
        found = [name for name in names if says(type(_built(model, name, Mesh.sketch())[0]), "tensor_parallel")]
        if not found:
            pytest.skip(f"no node of {mstar_model.spec.key!r} says that it can be divided among ranks")
        undivided = []
        for name in found:
            node, _ = _built(model, name, Mesh.sketch())
            if not any(getattr(module, "divisions", ()) for module in node.modules()):
                fail(f"node {name!r} says that it can be divided among ranks, and it has no layer that is divided")
            tp = next((tp for tp in range(2, _MOST + 1) if not _faults(model, name, tp)), None)
            if tp is None:
                undivided.append(name)
            else:
                _check(mstar_model, model, name, tp)
        if undivided:
            first = _faults(model, undivided[0], 2)[0]
            pytest.skip(f"the tiny checkpoint's sizes allow no division of {', '.join(undivided)}: {first}")


def _check(subject: Subject, model: Model, name: str, tp: int) -> None:
    held: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    sizes: dict[tuple[str, int], int] = {}
    whole: set[str] = set()
    for rank in range(tp):
        node, weights = _built(model, name, Mesh.sketch(tp=tp, rank=rank))
        if weights is None:
            continue
        assert subject.weights is not None
        if faults := mismatches(node, weights, subject.weights):
            fail(f"node {name!r}, rank {rank} of tp={tp}: its share does not fit the checkpoint:\n" + "\n".join(faults))
        for place in weights.placements:
            if place.cut is None:
                whole.add(place.published)
                continue
            sizes[place.published, place.cut.dim] = place.cut.size
            for run in place.cut.runs:
                held[place.published][place.cut.dim].update(range(run.first, run.first + run.length))
    for (published, dim), size in sizes.items():
        missing = sorted(set(range(size)) - held[published][dim])
        if published not in whole and missing:
            fail(
                f"node {name!r} on tp={tp}: no rank has items {missing[0]} to {missing[-1]} along dimension {dim} of "
                f"{published!r}"
            )


def _faults(model: Model, name: str, tp: int) -> list[str]:
    node, _ = _built(model, name, Mesh.sketch(tp=tp))
    return list(layout_faults(name, node, tp))


def _built(model: Model, name: str, mesh: Mesh) -> tuple[Node, WeightMap | None]:
    with building(mesh):
        weights: Any = model.weights(name)
        with torch.device("meta") if weights is not None else nullcontext():
            return model.build(name), weights

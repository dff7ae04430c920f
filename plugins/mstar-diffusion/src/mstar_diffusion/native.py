"""Names that a model's authors use, beside those of the published diffusers layout.

The authors' code holds queries, keys and values in one layer, and some halves the other way round. Adapters and single
files come in either spelling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mstar.nn.shards import Cut, Share
from mstar.spec.errors import WeightsError
from mstar.weights.names import Placement, WeightMap

__all__ = ["Native", "NativeNames", "native_weights"]


@dataclass(frozen=True)
class Native:
    """What one of the authors' layers is called in the published layout.

    :param published: the layers that its rows are divided among, in their order and in equal parts. :param swapped:
        the halves of its rows stand the other way round.
    """

    published: tuple[str, ...]
    swapped: bool = False


NativeNames = Mapping[str, Native]
"""The authors' name of each layer, without the word for its tensor (``weight``)."""


def native_weights(weightmap: WeightMap, names: NativeNames) -> WeightMap:
    """*weightmap* for a checkpoint in the authors' names, in the weights' folder itself.

    The scale of a norm is called ``scale`` there. Swapped halves are left as they come: swap them back when they have
    been loaded. Raises :class:`WeightsError` if the two layouts do not divide the same parameters.
    """
    by_name = {place.published: place for place in weightmap.placements}
    placements = []
    for name, native in names.items():
        parts = [by_name.pop(f"{part}.weight") for part in native.published]
        first = parts[0]
        rows = None if first.rows is None else sum(part.rows or 0 for part in parts)
        if any(part.target != first.target for part in parts):
            raise WeightsError(f"{name}: its parts {', '.join(native.published)} are not one parameter here")
        word = "scale" if name.endswith("norm") else "weight"
        placements.append(Placement(f"{name}.{word}", first.target, first.start, rows, _joined(parts)))
    if by_name:
        raise WeightsError(f"the authors' layout has no name for {', '.join(sorted(by_name)[:4])}")
    return WeightMap(tuple(placements), float32=weightmap.float32)


def _joined(parts: Sequence[Placement]) -> Cut | None:
    """What a rank has of the tensor in which those of *parts* stand one after the other."""
    cuts = [part.cut for part in parts if part.cut is not None]
    if len(cuts) != len(parts) or len(cuts) == 1:
        return cuts[0] if cuts else None
    runs, size = [], 0
    for cut in cuts:
        runs += [Share(size + run.first, run.length) for run in cut.runs]
        size += cut.size
    return Cut(cuts[0].dim, size, tuple(runs))

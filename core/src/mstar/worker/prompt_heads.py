"""Skips the head of a prompt that all resources of a call hold already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mstar.resources.base import Owner, Resource

__all__ = ["Share", "Skipped", "skip_known"]

Share = tuple[Resource, Owner, Owner | None]
"""A resource, whose state in it begins with the prompt, and the sibling whose prompt it is, too."""


class Skipped(NamedTuple):
    """*asked*: whether any resource could have known something. *tokens* of the prompt need not be computed."""

    asked: bool
    tokens: int


class _Told(Protocol):
    """The other ranks of a mesh, which do what this one does."""

    def matched(self, resource: str, owner: Owner, ids: Sequence[int], sibling: Owner | None) -> None: ...
    def missed(self, resource: str, owner: Owner, tokens: int) -> None: ...
    def skipped(self, resource: str, owner: Owner, ids: Sequence[int], sibling: Owner | None) -> None: ...


def skip_known(shares: Sequence[Share], ids: Sequence[int], told: _Told | None = None) -> Skipped:
    """Have all of *shares* begin behind as many of *ids* as all of them know."""
    hits = _matches(shares, ids, told)
    skipped = min(hits, default=0)
    deepest = max(hits, default=0)
    while skipped > 0 and max(hits) > skipped:  # where all can begin: what one knows may end within another's
        hits = _matches(shares, ids[: skipped + 1], told)
        skipped = min(hits)
    if deepest > skipped:
        for resource, owner, _ in shares:
            resource.missed(owner, deepest)
            if told is not None:
                told.missed(resource.name, owner, deepest)
    if skipped > 0:
        for resource, owner, sibling in shares:
            resource.skip(owner, ids[:skipped], sibling)
            if told is not None:
                told.skipped(resource.name, owner, ids[:skipped], sibling)
    return Skipped(bool(hits), max(skipped, 0))


def _matches(shares: Sequence[Share], ids: Sequence[int], told: _Told | None) -> list[int]:
    """What each resource that has an opinion holds of *ids* already."""
    hits = []
    for resource, owner, sibling in shares:
        hit = resource.match(owner, ids, sibling)
        if hit is not None:
            hits.append(hit)
        if told is not None:  # what was looked at last is dropped last, on all ranks of a mesh
            told.matched(resource.name, owner, ids, sibling)
    return hits

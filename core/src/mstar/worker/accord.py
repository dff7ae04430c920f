"""Whether a step that failed here has failed on all ranks of its mesh.

The ranks of a mesh exchange numbers within a step. One that fails alone leaves the others in an exchange that never
comes; and if it went on, its next exchange would meet theirs. So before a failed step is repeated or given up, its
ranks tell each other, by the store that they met over. A rank that hears nothing from another ends itself, and whoever
watches the processes ends the others: whatever they wait for.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from torch import distributed

from mstar.nn.mesh import Mesh
from mstar.resources.base import IntegrityError

__all__ = ["ALONE_S", "Accord"]

ALONE_S = 1.0
"""How long a rank that failed waits to hear that the others did, too: they are in the same step."""


class Accord:
    """One rank's part in it.

    :param meshes: of the nodes that this rank runs with others, all of the same ranks.
    """

    def __init__(self, meshes: Mapping[str, Mesh], store: Any, rank: int, size: int):
        self._meshes, self._rank, self._size = meshes, rank, size
        self._store = distributed.PrefixStore("failed", store)  # type: ignore[attr-defined]
        self._failures = 0

    def agree(self, node: str, failure: Exception) -> None:
        """A step of *node* has failed here with *failure*. Returns when it has failed on all ranks.

        :raises IntegrityError: on some it has not; its cause is *failure*, of which nobody else would tell.
        """
        if node not in self._meshes:
            return
        self._failures += 1
        number = self._failures
        self._store.set(f"{number}-{self._rank}", node)
        others = [f"{number}-{rank}" for rank in range(self._size) if rank != self._rank]
        try:
            self._store.wait(others, datetime.timedelta(seconds=ALONE_S))
        except RuntimeError:  # what it says is that they have not come
            raise IntegrityError(
                f"a step of node {node!r} failed on some ranks of its mesh and not on others within {ALONE_S:g} s: "
                f"{type(failure).__name__}: {failure}"
            ) from failure

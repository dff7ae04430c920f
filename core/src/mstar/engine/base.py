"""The seam between a step and the way it is executed."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from mstar.engine.step import Work
from mstar.nn.node import Node, Step
from mstar.resources.staging import Lane
from mstar.spec.deployment import EngineOptions
from mstar.spec.graph import Entry

__all__ = ["Runner"]


class Runner(abc.ABC):
    """Executes one entry of one node on gathered inputs. Registered through ``mstar_engines``.

    A runner may compile or capture; it must not change what an entry computes. One instance per worker.
    """

    def __init__(self, options: EngineOptions):
        self.options = options

    def prepare(self, nodes: Mapping[str, Node]) -> None:
        """Called once, when all nodes are loaded and before the first request: compile."""

    def fill_to(self, node: str, rows: Sequence[int], fill: bool = True) -> None:
        """Captured steps of *node* with one item a row are filled up to one of these numbers of *rows*; without *fill*
        they have one of these."""

    def items_to(self, node: str, items: int) -> None:
        """Steps of *node* whose rows have several items are captured up to so many *items*."""

    def sizes(self, rows: int, tokens: int) -> Sequence[tuple[int, int]]:
        """For which rows and tokens steps are to be captured before the first request. No step will have more than
        *rows* rows, nor, if some row has several, more than *tokens* tokens."""
        return ()

    def lane(self, work: Sequence[Work], variants: Mapping[str, Hashable]) -> Lane | None:
        """Where to plan a step of *work* if a captured graph is to run it, else ``None``. *variants*: what the entry's
        resources answered to :meth:`mstar.resources.base.Resource.variant`, by name."""
        return None

    def prepared(
        self, node: str, entry: Entry, rows: int, tokens: int, variants: Mapping[str, Hashable]
    ) -> Lane | None:
        """The lane of a step that is to be captured before it is asked for; ``None`` if its shapes are not known."""
        return None

    def give_up(self, lane: Lane, reason: str) -> None:
        """*lane*'s step could not be captured."""

    def status(self) -> dict[str, Any]:
        """Figures for the operator."""
        return {}

    @abc.abstractmethod
    def run(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The entry's outputs by port name."""

"""A request's calls and the routes that they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mstar.graph.program import CallOp, DraftOp, ForkOp, LoopOp, Op
from mstar.graph.streams import Chunk, Heard, OutStream
from mstar.graph.values import Ref
from mstar.nn.model import Outcome, Run

if TYPE_CHECKING:
    from mstar.graph.again import Again
    from mstar.graph.run import RequestRun

__all__ = ["CallRun", "Drafted", "Partition", "Route"]

Route = Generator[Run, Outcome, None]


class CallRun:
    """One call of one request that is ready to run, or partly run.

    :param inputs: port → value or scalar. :param length: items along the primary packed input. :param done: items that
        earlier chunks (or a prefix cache) have run; :attr:`chunks` counts them.
    :ivar item: a weak reference to the scheduler's, once it has been told. :ivar flight: the step that runs it, as its
        row :attr:`index`.
    :ivar again: the loop whose rounds are such calls, of one that was foreseen in it.
    :ivar dropped: it was foreseen and is not to be. :ivar heard: what its inputs were computed from. :ivar pulled: the
        chunks among its inputs, by stream.
    """

    __slots__ = (
        *("again", "chunks", "done", "dropped", "flight", "heard", "index", "inputs", "item"),
        *("length", "op", "partial", "partition", "pulled", "run"),
    )

    def __init__(self, run: RequestRun, partition: Partition, op: CallOp, inputs: dict[str, Any], length: int):
        self.run, self.partition, self.op, self.inputs, self.length = run, partition, op, inputs, length
        self.done = self.chunks = 0
        self.partial: dict[str, list[Tensor]] | None = None
        self.item: Any = None
        self.flight: Any = None
        self.again: Again | None = None
        self.index, self.dropped = 0, False
        self.pulled: Mapping[str, Chunk] = {}
        self.heard = partition.heard

    @property
    def remaining(self) -> int:
        return self.length - self.done

    @property
    def decode(self) -> bool:
        """Whether the call belongs to a loop that is under way: its request waits for little and holds much."""
        return bool(self.op.loops)

    @property
    def group(self) -> tuple[Any, ...]:
        """Calls of one group may share a step."""
        op = self.op
        if not op.varying:
            return op.group
        shapes = tuple(tuple(v.tensor().shape) for v in map(self.inputs.get, op.shaped) if isinstance(v, Ref))
        return (*op.group, shapes, tuple(p for p in op.optional if self.inputs.get(p) is not None))


@dataclass(slots=True)
class Drafted:
    """A draft under way. *tokens*: (resource, context) → what its calls have added. *before*: sampler → tokens judged
    before it."""

    before: dict[str, int]
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)


class Partition:
    """A route in progress: the current walk's program, its loop counters, joins, drafts. *ahead*: a foreseen call.
    *feeds*: streams that somebody plays what it makes from.
    *reason*: why the walk's outermost loop ended; *ended*: likewise of the last walk before it that had one."""

    __slots__ = (
        "ahead",
        "drafts",
        "ended",
        "feeds",
        "heard",
        "joins",
        "loops",
        "name",
        "program",
        "reason",
        "route",
        "said",
        "signals",
        "walk",
        "walks",
    )

    def __init__(self, name: str, walks: tuple[str, ...], route: Route, feeds: tuple[OutStream, ...] = ()):
        self.name, self.walks, self.route, self.feeds = name, walks, route, feeds
        self.walk = ""
        self.program: list[Op] = []
        self.loops: dict[LoopOp, int] = {}
        self.joins: dict[ForkOp, int] = {}
        self.drafts: dict[DraftOp, Drafted] = {}
        self.signals: tuple[str, ...] = ()
        self.said: dict[str, list[int]] = {}  # sampler → tokens of this walk that its route wants to see
        self.reason = self.ended = "done"
        self.ahead: CallRun | None = None
        self.heard: Heard = {}

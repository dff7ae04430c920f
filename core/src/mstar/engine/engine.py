"""One step: plan → forward → commit, then, when the device is done, land; and what happens when it fails.

Which calls a step has is the scheduler's choice; this is the rest. A step either commits for all of its rows or is
rolled back for all of them. A step of several rows whose launch fails is run again in halves until the rows that fail
are alone (promise P7): resources are pure until commit, so the others get exactly the result that they would have had.

*Launch and land.* :meth:`Engine.launch` returns when the device has been told what to do: the step is committed, its
outputs are tensors that later steps may use, and the host knows none of their values. :meth:`Engine.land` waits for
them. The worker may launch the next step in between (look-ahead).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from mstar.engine.base import Runner
from mstar.engine.device import raise_if_lost
from mstar.engine.step import NodeFault, Outcome, RowResult, Work, blank_inputs, gather, make_step, split
from mstar.engine.trace import Trace
from mstar.graph.program import CallOp, Plan
from mstar.nn.node import Node
from mstar.resources.base import Owner, Resource, Row
from mstar.resources.staging import Lane, Stage
from mstar.spec.errors import RequestError, SetupError, not_finite
from mstar.spec.graph import Entry, NodeSpec

__all__ = ["Engine", "Flight"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Flight:
    """A step that was launched, and has landed once its results were asked for.

    :param rows: for each of the resources in *used*, the rows of the step. :param began: monotonic seconds.
    :param failure: what its launch raised; it then has one call and nothing else.
    :param learners: those of *used* that want to know ids which were not known at the launch.
    :param unknown: the rows of which they want that.
    :param number: of the step, from 1; 0 for one that failed.
    :param step: what other ranks know the step by, if they run it too; *first* of its calls is the flight's first.
    """

    work: Sequence[Work]
    used: Sequence[Resource]
    rows: Sequence[Sequence[Row]]
    began: float
    outcome: Outcome | None = None
    failure: Exception | None = None
    learners: Sequence[Resource] = ()
    unknown: Sequence[int] = ()
    number: int = 0
    step: int = 0
    first: int = 0


class Engine:
    """Runs steps of one model's nodes on one device.

    :param owner: gives the owner of a call's state in one resource: ``(request id, context)`` or a session's.
    :param stage: the one that *resources* were built with.
    :param on_step: told of each step that ran: node, entry, rows, items, seconds.
    :param viewed: makes of a resource's view what the node gets.
    :ivar trace: told where the time of a step goes; may be replaced between steps.
    """

    def __init__(
        self,
        nodes: Mapping[str, Node],
        resources: Mapping[str, Resource],
        runner: Runner,
        owner: Callable[[Work, str], Owner],
        stage: Stage,
        device: torch.device,
        dtype: torch.dtype,
        on_step: Callable[[str, str, int, int, float], None] | None = None,
        viewed: Callable[[Any], Any] | None = None,
    ):
        self.nodes, self.resources, self.runner, self.stage = nodes, resources, runner, stage
        self.device, self.dtype = device, dtype
        self._owner, self._on_step, self._viewed = owner, on_step, viewed
        self.trace = Trace()
        self.steps = 0
        self.agree: Callable[[str, Exception], None] = lambda node, failure: None
        """Called when a step of a node has failed, and why, before anything is repeated: where several ranks run it, it
        returns once it has failed on all of them, and raises if it has not."""

    # --- launch -------------------------------------------------------------------------------------------------------
    def launch(self, work: Sequence[Work]) -> list[Flight]:
        """Start a step; several if a failure made it be repeated in parts. Every call is in one of them.

        :raises DeviceLost: nothing more can be computed here.
        """
        try:
            return [self._launch(work)]
        except Exception as error:
            raise_if_lost(error)
            failure = error
        self.agree(work[0].call.op.call.node, failure)
        self.trace.failed(work, failure)
        if len(work) == 1:
            cause = None if isinstance(failure, RequestError) else failure
            log.error("a step of node %r failed for request %r: %s", *_names(work[0]), failure, exc_info=cause)
            return [Flight(work, (), (), time.perf_counter(), failure=failure)]
        log.warning("a step of %d requests failed (%s); running it in halves", len(work), failure)
        middle = len(work) // 2
        return [*self.launch(work[:middle]), *self.launch(work[middle:])]

    def _launch(self, work: Sequence[Work]) -> Flight:
        began = time.perf_counter()
        op = work[0].call.op
        entry, node = op.entry, op.call.node
        used = [self.resources[name] for name in entry.resources]
        rows = list(zip(*[self._rows(w, used) for w in work], strict=True)) if used else []
        lane = self._lane(work, used, rows)
        try:
            with torch.inference_mode():
                outputs = self._captured(node, entry, op, work, used, rows, lane) if lane is not None else None
                captured = outputs is not None
                if outputs is None:
                    outputs = self._forward(node, entry, op, work, used, rows, None)
                try:
                    outcome = split(entry, work, outputs)
                except NodeFault as fault:
                    raise NodeFault(f"{type(self.nodes[node]).__name__}.{entry.name} {fault}") from None
                for resource, mine in zip(used, rows, strict=True):
                    resource.commit(mine, resource.name in entry.frozen)
        except Exception:
            _rollback(entry, used, rows)
            for w in work:
                _trim_partial(w)
            raise
        self.steps += 1
        learners = [resource for resource in used if type(resource).learn is not Resource.learn]
        unknown = [i for i, w in enumerate(work) if not w.known] if learners else []
        flight = Flight(work, used, rows, began, outcome, learners=learners, number=self.steps, unknown=unknown)
        self.trace.launched(flight, captured)
        return flight

    def _forward(
        self,
        node: str,
        entry: Entry,
        op: CallOp | None,
        work: Sequence[Work],
        used: Sequence[Resource],
        rows: Sequence[Sequence[Row]],
        lane: Lane | None,
    ) -> Mapping[str, Any]:
        """Plan a step and run its node."""
        stage = self.stage
        stage.begin(lane)
        views = {}
        for resource, mine in zip(used, rows, strict=True):
            view = resource.plan(mine, resource.name in entry.frozen)
            views[resource.name] = view if self._viewed is None else self._viewed(view)
        step = make_step(entry.name, work, views, stage, self.device, self.dtype)
        stage.send()
        if op is None:
            assert lane is not None
            inputs: Mapping[str, Any] = blank_inputs(entry, lane, self.device, self.dtype)
        else:
            inputs = gather(entry, op, work, self.device, self.dtype)
        self.trace.planned()
        outputs = self.runner.run(self.nodes[node], entry.name, step, inputs)
        self.trace.ran()
        return outputs

    def _captured(
        self,
        node: str,
        entry: Entry,
        op: CallOp | None,
        work: Sequence[Work],
        used: Sequence[Resource],
        rows: Sequence[Sequence[Row]],
        lane: Lane,
    ) -> Mapping[str, Any] | None:
        """Run a step on *lane*, whose graph is captured first if it is new; ``None`` if that cannot be done."""
        if lane.graph is not None:
            return self._forward(node, entry, op, work, used, rows, lane)
        try:
            lane.trial = True
            self._forward(node, entry, op, work, used, rows, lane)
            lane.trial = False
            _rollback(entry, used, rows)
            return self._forward(node, entry, op, work, used, rows, lane)
        except SetupError:
            raise  # nothing that plain calls would do better
        except Exception as error:
            log.debug("capturing a step of %s.%s failed", node, entry.name, exc_info=error)
            self.runner.give_up(lane, f"{type(error).__name__}: {error}".splitlines()[0])
            _rollback(entry, used, rows)
            return None

    def _lane(self, work: Sequence[Work], used: Sequence[Resource], rows: Sequence[Sequence[Row]]) -> Lane | None:
        """Where a captured graph for this step reads, if the runner has or wants one."""
        variants: dict[str, Hashable] = {}
        frozen = work[0].call.op.entry.frozen
        single = max([w.tokens for w in work]) == 1
        for resource, mine in zip(used, rows, strict=True):
            able = single or resource.capturable_chunks
            variant = resource.variant(mine, resource.name in frozen) if able else None
            if variant is None:
                return None
            variants[resource.name] = variant
        return self.runner.lane(work, variants)

    # --- before the first request -------------------------------------------------------------------------------------
    def prepare(self, plan: Plan, rows: int, tokens: int, on_progress: Callable[[int, int], None]) -> None:
        """Capture the steps that can be foreseen: those of entries that a loop calls with one item a row, and of those
        that name sizes.

        :param rows: the most rows of a step. :param tokens: the most tokens of one that mixes rows of any length.
        :param on_progress: told how many of how many are done.
        """
        self.runner.prepare(self.nodes)
        for node in plan.graph.nodes:
            if node.graph_rows and node.name in self.nodes:
                self.runner.fill_to(node.name, node.graph_rows, node.graph_fill)
            if node.graph_items is not None and node.name in self.nodes:
                self.runner.items_to(node.name, node.graph_items)
        sizes = self.runner.sizes(rows, tokens)
        todo = [
            (node.name, entry, size, variants)
            for node, general in _foreseen(plan)
            if node.name in self.nodes
            for entry in _sized(general)
            for size in _sizes_of(node, sizes, rows)
            if node.max_rows is None or size[0] <= node.max_rows or size == sizes[-1]
            for variants in self._variants(entry, *size)
        ]
        for done, (node_name, entry, size, variants) in enumerate(todo):
            on_progress(done, len(todo))
            lane = self.runner.prepared(node_name, entry, *size, variants)
            if lane is not None:
                used = [self.resources[name] for name in entry.resources]
                with torch.inference_mode():
                    self._captured(node_name, entry, None, (), used, [()] * len(used), lane)
                    _rollback(entry, used, [()] * len(used))

    def _variants(self, entry: Entry, rows: int, tokens: int) -> Iterator[dict[str, Hashable]]:
        used = [self.resources[name] for name in entry.resources]
        chunks = tokens != rows
        if chunks and entry.chunk is None:
            return
        if all(resource.capturable and (resource.capturable_chunks or not chunks) for resource in used):
            for choice in product(*(resource.variants for resource in used)):
                yield dict(zip(entry.resources, choice, strict=True))

    def _rows(self, w: Work, used: Sequence[Resource]) -> tuple[Row, ...]:
        """The call's row for each of the resources."""
        call = w.call
        ids = _ids(w)
        w.known = ids is not None
        if w.tokens != 1 or not w.complete:
            return tuple([Row(self._owner(w, resource.name), w.tokens, w.complete, ids, w.start) for resource in used])
        op, kept = call.op, call.run.rows
        found = kept.get(op)
        if found is None:
            by_owner: dict[Owner, Row] = {}
            owners = [self._owner(w, resource.name) for resource in used]
            rows = tuple([by_owner.setdefault(owner, Row(owner)) for owner in owners])
            found = kept[op] = (rows, tuple(by_owner.values()))
        for row in found[1]:
            row.ids, row.start = ids, w.start
        mine: tuple[Row, ...] = found[0]
        return mine

    # --- land ---------------------------------------------------------------------------------------------------------
    def land(self, flight: Flight) -> list[RowResult | Exception]:
        """Wait until *flight* is done. One result per call, in order: what it computed, or why it failed.

        :raises DeviceLost: nothing more can be computed here.
        """
        if flight.failure is not None:
            return [flight.failure]
        try:
            return self._read(flight)
        except Exception as error:
            raise_if_lost(error)
            raise

    def arrived(self, flight: Flight) -> bool:
        """Whether :meth:`land` would not have to wait."""
        return flight.outcome is None or all(late.done() for late in flight.outcome.ids)

    def _read(self, flight: Flight) -> list[RowResult | Exception]:
        outcome = flight.outcome
        assert outcome is not None
        results: list[RowResult | Exception] = list(outcome.results)
        for late in outcome.ids:
            tokens = late.values()
            if tokens and min(tokens) < 0:
                for i, token in enumerate(tokens):
                    if token < 0:
                        results[i] = not_finite()
        for report in outcome.reports:
            for result, row in zip(outcome.results, report(), strict=True):
                result.logprobs = None if row is None else [row]
        if self._on_step is not None:
            call, entry = flight.work[0].call.op.call, flight.work[0].call.op.entry
            items, seconds = sum([w.tokens for w in flight.work]), time.perf_counter() - flight.began
            self._on_step(call.node, entry.name, len(flight.work), items, seconds)
        return results

    def learn(self, flight: Flight, indices: Iterable[int]) -> list[tuple[int, Sequence[int]]]:
        """Tell the resources the ids of the tokens that some calls of *flight* read, as far as the host knows them now
        and did not at the launch. Returns which calls these are and what was told."""
        work = flight.work
        found = [(i, ids) for i in indices if not work[i].known and (ids := _ids(work[i])) is not None]
        for resource, rows in zip(flight.used, flight.rows, strict=True):
            if found and resource in flight.learners:
                learn = resource.learn
                for index, ids in found:
                    learn(rows[index].owner, ids)
        return found

    def retract(self, flight: Flight, index: int) -> None:
        """Undo what the *index*-th call of *flight* committed: it should not have run."""
        frozen = flight.work[index].call.op.entry.frozen
        for resource, rows in zip(flight.used, flight.rows, strict=True):
            if resource.name not in frozen:
                resource.retract(rows[index])


def _foreseen(plan: Plan) -> list[tuple[NodeSpec, Entry]]:
    """The entries that loops call with one item a row; behind them those that are called once and name sizes."""
    looped: dict[Any, tuple[NodeSpec, Entry]] = {}
    once: dict[Any, tuple[NodeSpec, Entry]] = {}
    for program in plan.programs.values():
        for op in program:
            if isinstance(op, CallOp) and op.primary == op.entry.chunk and (op.loops or op.entry.graph_sizes):
                (looped if op.loops else once)[op.group] = (plan.graph.node(op.call.node), op.entry)
    return list((looped | {group: found for group, found in once.items() if group not in looped}).values())


def _sized(entry: Entry) -> Iterator[Entry]:
    """*entry* for each of the sizes that it names; as it is if it names none."""
    for sizes in entry.graph_sizes:
        inputs = (replace(p, shape=tuple(sizes.get(str(size), size) for size in p.shape)) for p in entry.inputs)
        yield replace(entry, inputs=tuple(inputs))
    if not entry.graph_sizes:
        yield entry


def _sizes_of(node: NodeSpec, sizes: Sequence[tuple[int, int]], rows: int) -> Sequence[tuple[int, int]]:
    """Rows and tokens of the steps of *node* that are captured: of *sizes*, which the runner names, or its own. No step
    has more than *rows* rows."""
    if not node.graph_rows or not sizes:
        return sizes
    own = sorted(node.graph_rows, reverse=True)
    largest = min((size for size in own if size >= rows), default=own[0])
    return [(size, size) for size in own if size <= largest]


def _rollback(entry: Entry, used: Sequence[Resource], rows: Sequence[Sequence[Row]]) -> None:
    for resource, mine in zip(used, rows, strict=True):
        resource.rollback(mine, resource.name in entry.frozen)


def _ids(w: Work) -> Sequence[int] | None:
    """The step's token ids, when the host knows them."""
    call = w.call
    chunk = call.op.entry.chunk
    if chunk is None or call.op.drafts:  # what is to be taken back is nobody's to share
        return None
    ref = call.inputs[chunk]
    host: Any = ref.host
    if host is None:
        return None
    if ref.row:
        return (host,)
    ids: Sequence[int] = host if w.tokens == len(host) else host[w.start : w.start + w.tokens]
    return ids


def _trim_partial(w: Work) -> None:
    """Forget what a failed chunk appended to its call's joined outputs."""
    for pieces in (w.call.partial or {}).values():
        del pieces[w.call.chunks :]


def _names(w: Work) -> tuple[str, str]:
    return w.call.op.call.node, w.call.run.request.id

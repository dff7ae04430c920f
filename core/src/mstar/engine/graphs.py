"""Steps as captured CUDA graphs: one replay instead of a thousand launches.

A graph is captured for each (node, entry, bucket of rows, variant of the resources' views, shapes of the inputs). Its
step is planned on a :class:`~mstar.resources.staging.Lane`: what varies from step to step lies in tensors whose
addresses stay, filled before each replay; rows are padded to the bucket's size. So everything from the embedding to the
sampled token is in one replay.

Steps whose shapes are known at start, one item a row (decoding), are captured then. Others (an encoder's, a denoise
step's) are captured when the same one has come often enough to be worth it. What cannot be captured runs as plain
PyTorch calls, and the log says why, once.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mstar.engine.base import Runner
from mstar.engine.eager import EagerRunner
from mstar.engine.step import Work
from mstar.nn.node import Node, Packed, Sampled, Step
from mstar.resources.staging import Lane
from mstar.spec.deployment import EngineOptions
from mstar.spec.graph import Entry

__all__ = ["Captured", "CudaRecorder", "GraphRunner", "Recorder", "row_buckets"]

log = logging.getLogger(__name__)

_KEPT = 64
"""Most graphs of such steps; the one unused longest makes room."""


def row_buckets(most: int) -> list[int]:
    """Sizes that steps of up to *most* rows are padded to: fine where a row costs much of a step, coarse beyond."""
    fine = [1, 2, 4, 8, 12, 16, *range(24, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    fine += list(range(320, most + 64, 64))
    return [size for size in fine if size < most] + [most]


class Recorder(abc.ABC):
    """Makes something that repeats what a function did, reading the same tensors."""

    @abc.abstractmethod
    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What *function* returned, and what repeats its work into the same tensors. *function* is not necessarily
        executed: only a repetition fills them."""

    def bytes(self) -> int:
        """Memory that the recordings hold."""
        return 0


class CudaRecorder(Recorder):
    """CUDA graphs that share one memory pool: what one leaves there lasts until another is replayed."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._bytes, self._recorded = 0, False

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = function()
        except Exception:
            if not self._recorded:  # a pool that no graph holds is gone
                self._pool = torch.cuda.graph_pool_handle()
            raise
        self._recorded = True
        self._bytes += max(0, torch.cuda.memory_reserved() - before)
        return result, graph.replay

    def bytes(self) -> int:
        return self._bytes


class Captured:
    """One recording: its inputs, which are filled before a replay, and its outputs, which it fills."""

    def __init__(self, inputs: Mapping[str, Tensor | None], outputs: Mapping[str, Any], replay: Callable[[], None]):
        self.inputs, self.outputs, self.replay = inputs, outputs, replay

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """*inputs* of the real rows, which come first. The outputs are copies: the next replay overwrites its own."""
        rows = 0
        for name, static in self.inputs.items():
            if static is not None:
                given: Tensor = inputs[name]
                rows = given.shape[0]
                _fill(static, given)
        self.replay()
        return {port: _taken(value, rows) for port, value in self.outputs.items()}


def _taken(value: Any, rows: int) -> Any:
    if isinstance(value, Sampled):
        return Sampled(value.ids[:rows].clone(), value.report)
    taken: Tensor = value[:rows].clone()
    return taken


class GraphRunner(Runner):
    """Runs steps in captured graphs where it can.

    :param recorder: how a graph is made; tests record without a GPU.
    :param worth: how often a step that is not captured at start must come before it is captured.
    """

    def __init__(
        self,
        options: EngineOptions,
        recorder: Recorder | None = None,
        device: torch.device | str = "cuda",
        worth: int = 6,
    ):
        super().__init__(options)
        self._device, self._worth = torch.device(device), worth
        self._eager = EagerRunner(options)
        self._recorder = recorder or CudaRecorder()
        self._buckets: list[int] = []
        self._lanes: dict[Hashable, Lane] = {}
        self._seen: dict[Hashable, int] = {}
        self._late: dict[Hashable, None] = {}  # keys captured while serving, least recently used first
        self.faults: dict[Hashable, str] = {}
        self.captured, self.seconds = 0, 0.0

    # --- which step gets a graph --------------------------------------------------------------------------------------
    def sizes(self, rows: int) -> Sequence[int]:
        """The largest first: what the smaller ones need then fits into its memory."""
        self._buckets = row_buckets(rows)
        return self._buckets[::-1]

    def lane(self, work: Sequence[Work], variants: Mapping[str, Hashable]) -> Lane | None:
        op = work[0].call.op
        if not _plain(op.entry) or not self._buckets or len(work) > self._buckets[-1]:
            return None
        if any(w.tokens != 1 or not w.complete for w in work):
            return None
        rows = next(size for size in self._buckets if size >= len(work))
        key = (op.call.node, op.entry.name, rows, tuple(sorted(variants.items())), _shapes(op.entry, work[0]))
        lane = self._lanes.get(key)
        if lane is not None:
            if key in self._late:
                self._late[key] = self._late.pop(key)
            return lane
        if key in self.faults:
            return None
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen < self._worth:
            return None
        if len(self._late) >= _KEPT:
            oldest = next(iter(self._late))
            del self._late[oldest], self._lanes[oldest], self._seen[oldest]
        self._late[key] = None
        return self._add(key, rows, variants)

    def prepared(self, node: str, entry: Entry, rows: int, variants: Mapping[str, Hashable]) -> Lane | None:
        """The lane of a step that is captured before it is asked for; ``None`` if its shapes are not known."""
        if not _plain(entry) or any(not isinstance(d, int) for p in entry.inputs for d in _inner(entry, p.name)):
            return None
        shapes = tuple((p.name, tuple(_inner(entry, p.name))) for p in entry.inputs)
        return self._add((node, entry.name, rows, tuple(sorted(variants.items())), shapes), rows, variants)

    def _add(self, key: Hashable, rows: int, variants: Mapping[str, Hashable]) -> Lane:
        lane = self._lanes[key] = Lane(rows, self._device, variants)
        lane.key = key
        return lane

    def give_up(self, lane: Lane, reason: str) -> None:
        """*lane*'s step cannot be captured: it runs as plain calls from now on."""
        self._lanes.pop(lane.key, None)
        self._late.pop(lane.key, None)
        self.faults[lane.key] = reason
        node, entry, rows = lane.key[:3]  # type: ignore[index]
        log.warning("node %r, entry %r, %d rows: runs without a CUDA graph: %s", node, entry, rows, reason)

    # --- running ------------------------------------------------------------------------------------------------------
    def run(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        lane: Lane | None = step.lane
        if lane is None or lane.trial:
            return self._eager.run(node, entry, step, inputs)
        if lane.graph is None:
            lane.graph = self._capture(node, entry, step, inputs)
        captured: Captured = lane.graph
        return captured.run(inputs)

    def _capture(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Captured:
        began = time.perf_counter()
        static = {name: _padded(value, step.rows) for name, value in inputs.items()}
        outputs, replay = self._recorder.record(lambda: self._eager.run(node, entry, step, static))
        for port, value in outputs.items():
            if isinstance(value, Packed | list | tuple):
                raise TypeError(f"output {port!r} has no fixed shape")
        self.captured += 1
        self.seconds += time.perf_counter() - began
        return Captured(static, outputs, replay)

    def status(self) -> dict[str, Any]:
        return {"graphs": self.captured, "graph_bytes": self._recorder.bytes(), "graph_seconds": self.seconds}


def _plain(entry: Entry) -> bool:
    """Whether all inputs have a row each along their first dimension when every row has one item."""
    for port in entry.inputs:
        beside = port.layout == "packed" and port.name != entry.chunk and not _aligned(entry, port.name)
        if port.layout == "list" or beside:
            return False
    return bool(entry.inputs)


def _aligned(entry: Entry, name: str) -> bool:
    chunk = next((p for p in entry.inputs if p.name == entry.chunk), None)
    port = next(p for p in entry.inputs if p.name == name)
    return chunk is not None and port.shape[0] == chunk.shape[0]


def _inner(entry: Entry, name: str) -> tuple[Any, ...]:
    """The dimensions of one row of input *name*."""
    port = next(p for p in entry.inputs if p.name == name)
    return tuple(port.shape[1:]) if port.layout == "packed" else tuple(port.shape)


def _shapes(entry: Entry, work: Work) -> Hashable:
    """The shape of one row of each input; ``None`` for one that is left out."""
    shapes: list[tuple[str, Any]] = []
    for port in entry.inputs:
        value = work.call.inputs.get(port.name)
        if value is None:
            shapes.append((port.name, None))
        elif hasattr(value, "tensor"):
            whole = value.base.shape[1:] if value.row or port.layout == "packed" else value.tensor().shape
            shapes.append((port.name, tuple(whole)))
        else:
            shapes.append((port.name, ()))
    return tuple(shapes)


def _padded(value: Any, rows: int) -> Tensor | None:
    """A tensor that stays, *rows* long, filled with *value*."""
    if value is None:
        return None
    with torch.inference_mode(False):
        static = torch.zeros((rows, *value.shape[1:]), dtype=value.dtype, device=value.device)
    _fill(static, value)
    return static


def _fill(static: Tensor, value: Tensor) -> None:
    """Put *value* into the first rows, and its first row into the others: they are like a request's, whatever the node
    expects of one."""
    rows = value.shape[0]
    static[:rows].copy_(value, non_blocking=True)
    if rows < static.shape[0]:
        static[rows:].copy_(value[:1].expand(static.shape[0] - rows, *value.shape[1:]), non_blocking=True)

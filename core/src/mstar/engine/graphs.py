"""Steps as captured CUDA graphs: one replay instead of a thousand launches.

A graph is captured for each (node, entry, bucket of rows, bucket of tokens, variant of the resources' views, shapes of
the inputs). Its step is planned on a :class:`~mstar.resources.staging.Lane`: what varies from step to step lies in
tensors whose addresses stay, filled before each replay; rows and tokens are padded to the buckets' sizes. So everything
from the embedding to the sampled token is in one replay.

Where every row has one token (decoding), the two buckets are one. Where some have more (prompts and their chunks, with
or without decoding rows among them), there is at least one row of padding, which takes the spare tokens, and there are
always more tokens than rows: that is how a node tells the two.

Steps whose shapes are known at start are captured then: decoding, and few rows with prompts. Others (an encoder's, a
denoise step's, more rows with prompts) are captured when the same one has come often enough to be worth it. What cannot
be captured runs as plain PyTorch calls, and the log says why, once.
"""

from __future__ import annotations

import abc
import contextlib
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
from mstar.spec.graph import Entry, Port

__all__ = ["Captured", "CudaRecorder", "GraphRunner", "Recorder", "chunk_row_buckets", "row_buckets", "token_buckets"]

log = logging.getLogger(__name__)

_KEPT = 64
"""Most graphs that are captured while serving; the one unused longest makes room."""
_FEW_WORTH = 2
"""How often a step must come before it is captured whose sizes are few: with prompts, since first tokens wait for it,
and of a node that names its rows."""
_TRIES = 3
"""Sizes of one entry's steps whose captures fail while serving before no other size is tried."""

_Key = tuple[Any, ...]
"""Node, entry, rows, tokens, variants, shapes."""


def row_buckets(most: int) -> list[int]:
    """Sizes that steps of up to *most* rows are padded to: fine where a row costs much of a step, coarse beyond."""
    fine = [1, 2, 4, 8, 12, 16, *range(24, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    fine += list(range(320, most + 64, 64))
    return [size for size in fine if size < most] + [most]


def chunk_row_buckets(most: int) -> list[int]:
    """The same for steps of which some rows have several tokens: few sizes, since tokens decide what such a step costs.
    There is always room for *most* rows and one of padding."""
    return [size for size in (4, 16, 64, 256) if 2 * size <= most + 1] + [most + 1]


def token_buckets(most: int) -> list[int]:
    """Sizes that the tokens of such steps are padded to, if they have no more than *most*."""
    sizes = [64, 128]
    while sizes[-1] < most:
        sizes += [sizes[-1] * 3 // 2, sizes[-1] * 2]
    return [size for size in sizes if size < most] + ([most] if most else [])


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
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = function()
        except Exception:
            self._leave(current)
            if not self._recorded:  # a pool that no graph holds is gone
                self._pool = torch.cuda.graph_pool_handle()
            raise
        self._recorded = True
        self._bytes += max(0, torch.cuda.memory_reserved() - before)
        return result, graph.replay

    def _leave(self, current: torch.cuda.Stream) -> None:
        """Go back to *current* from a capture that failed. What waits for the device invalidates a capture; torch then
        stays on its stream and goes on giving its memory out of the pool."""
        torch.cuda.set_stream(current)
        with contextlib.suppress(RuntimeError):  # a capture that was not invalidated has ended in order
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)

    def bytes(self) -> int:
        return self._bytes


class Captured:
    """One recording: its inputs, which are filled before a replay, and its outputs, which it fills."""

    def __init__(self, inputs: Mapping[str, Tensor | None], outputs: Mapping[str, Any], replay: Callable[[], None]):
        self.inputs, self.outputs, self.replay = inputs, outputs, replay

    def run(self, inputs: Mapping[str, Any], lane: Lane) -> dict[str, Any]:
        """*inputs* of the real rows, which come first. The outputs are copies: the next replay overwrites its own."""
        for name, static in self.inputs.items():
            if static is not None:
                _fill(static, inputs[name])
        self.replay()
        return {port: _taken(value, lane) for port, value in self.outputs.items()}


def _taken(value: Any, lane: Lane) -> Any:
    """Of a recorded output, what belongs to the real rows."""
    rows, tokens = lane.real
    if isinstance(value, Sampled):
        return Sampled(value.ids[:rows].clone(), value.report)
    taken: Tensor = value[: tokens if value.shape[0] == lane.tokens else rows].clone()
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
        self._own_buckets: dict[str, list[int]] = {}
        self._unfilled: set[str] = set()
        self._own_items: dict[str, list[int]] = {}
        self._chunk_rows: list[int] = []
        self._chunk_tokens: list[int] = []
        self._lanes: dict[Hashable, Lane] = {}
        self._seen: dict[Hashable, int] = {}
        self._late: dict[Hashable, None] = {}  # keys captured while serving, least recently used first
        self.faults: dict[Hashable, str] = {}
        self._failed: dict[tuple[str, str, bool], int] = {}
        self._said: set[tuple[str, str, str]] = set()
        self.captured, self.seconds = 0, 0.0

    # --- which step gets a graph --------------------------------------------------------------------------------------
    def fill_to(self, node: str, rows: Sequence[int], fill: bool = True) -> None:
        self._own_buckets[node] = sorted(rows)
        if not fill:
            self._unfilled.add(node)

    def items_to(self, node: str, items: int) -> None:
        self._own_items[node] = token_buckets(items)

    def sizes(self, rows: int, tokens: int) -> Sequence[tuple[int, int]]:
        """The largest first: what the smaller ones need then fits into its memory."""
        self._buckets = row_buckets(rows)
        self._chunk_rows = chunk_row_buckets(rows)
        self._chunk_tokens = token_buckets(min(tokens, self.options.max_graph_tokens))
        sizes = [(size, size) for size in self._buckets]
        few = self._chunk_rows[:2]  # a few prompts at once; steps with more rows are captured when they come
        sizes += [(most, size) for most in few for size in self._chunk_tokens if size > most]
        return sorted(sizes, key=lambda size: size[::-1], reverse=True)

    def lane(self, work: Sequence[Work], variants: Mapping[str, Hashable]) -> Lane | None:
        op = work[0].call.op
        counts = [w.tokens for w in work]
        tokens = sum(counts)
        size = self._size(op.call.node, op.primary, len(work), tokens) if min(counts) else None
        if size is None or not _plain(op.entry, op.primary):
            return None
        key = (op.call.node, op.entry.name, *size, tuple(sorted(variants.items())), _shapes(op.entry, work[0]))
        lane = self._known_lane(key, variants)
        if lane is not None:
            lane.real = (len(work), tokens)
        return lane

    def _size(self, node: str, primary: str | None, rows: int, tokens: int) -> tuple[int, int] | None:
        """The smallest rows and tokens of a lane for a step of *rows* rows of one token each or more. *primary*: the
        packed input whose items are the tokens."""
        if tokens == rows:
            buckets = self._own_buckets.get(node, self._buckets)
            size = next((size for size in buckets if size >= rows), None)
            if size is None or (size > rows and node in self._unfilled):
                return None
            return size, size
        if primary is None:
            return None
        padded = next((size for size in self._chunk_rows if size > rows), None)
        if padded is None:
            return None
        sizes = self._own_items.get(node, self._chunk_tokens)
        total = next((size for size in sizes if size >= tokens and size > padded), None)
        return None if total is None else (padded, total)

    def _known_lane(self, key: _Key, variants: Mapping[str, Hashable]) -> Lane | None:
        lane = self._lanes.get(key)
        if lane is not None:
            if key in self._late:
                self._late[key] = self._late.pop(key)
            return lane
        node, entry, rows, tokens, *_ = key
        if key in self.faults or self._failed.get((node, entry, rows == tokens), 0) >= _TRIES:
            return None
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        few = rows != tokens or node in self._own_buckets
        if seen < (min(self._worth, _FEW_WORTH) if few else self._worth):
            return None
        if len(self._late) >= _KEPT:
            oldest = next(iter(self._late))
            del self._late[oldest], self._lanes[oldest], self._seen[oldest]
        self._late[key] = None
        return self._add(key, variants)

    def prepared(
        self, node: str, entry: Entry, rows: int, tokens: int, variants: Mapping[str, Hashable]
    ) -> Lane | None:
        """The lane of a step that is captured before it is asked for; ``None`` if its shapes are not known."""
        shapes = tuple((p.name, _known(entry, p)) for p in entry.inputs)
        needed = [p.name for p in entry.inputs if not (p.optional and entry.graph_sizes)]
        if any(shape is None and name in needed for name, shape in shapes) or not _plain(entry, entry.chunk):
            return None
        return self._add((node, entry.name, rows, tokens, tuple(sorted(variants.items())), shapes), variants)

    def _add(self, key: _Key, variants: Mapping[str, Hashable]) -> Lane:
        _, _, rows, tokens, *_ = key
        lane = self._lanes[key] = Lane(rows, self._device, variants, tokens)
        lane.key = key
        return lane

    def give_up(self, lane: Lane, reason: str) -> None:
        """*lane*'s step cannot be captured: it runs as plain calls from now on."""
        self._lanes.pop(lane.key, None)
        self._late.pop(lane.key, None)
        self.faults[lane.key] = reason
        node, entry = lane.key[:2]  # type: ignore[index]
        kind = (node, entry, lane.rows == lane.tokens)
        self._failed[kind] = self._failed.get(kind, 0) + 1
        if (node, entry, reason) not in self._said:
            self._said.add((node, entry, reason))
            what = (node, entry, lane.rows, lane.tokens, reason)
            log.warning("node %r, entry %r, %d rows, %d tokens: runs without a CUDA graph: %s", *what)

    # --- running ------------------------------------------------------------------------------------------------------
    def run(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        lane: Lane | None = step.lane
        if lane is None:
            return self._eager.run(node, entry, step, inputs)
        if lane.trial:
            return self._eager.run(node, entry, step, {name: _padded(value, lane) for name, value in inputs.items()})
        if lane.graph is None:
            lane.graph = self._capture(node, entry, step, inputs, lane)
        captured: Captured = lane.graph
        return captured.run(inputs, lane)

    def _capture(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any], lane: Lane) -> Captured:
        began = time.perf_counter()
        static = {name: _padded(value, lane) for name, value in inputs.items()}
        outputs, replay = self._recorder.record(lambda: self._eager.run(node, entry, step, static))
        for port, value in outputs.items():
            if isinstance(value, Packed | list | tuple) or len(_tensor(value)) not in (lane.rows, lane.tokens):
                raise TypeError(f"output {port!r} has no fixed shape")
        self.captured += 1
        self.seconds += time.perf_counter() - began
        return Captured(static, outputs, replay)

    def status(self) -> dict[str, Any]:
        return {"graphs": self.captured, "graph_bytes": self._recorder.bytes(), "graph_seconds": self.seconds}


def _plain(entry: Entry, primary: str | None) -> bool:
    """Whether all inputs have a row or an item of *primary* each along their first dimension."""
    items = next((port.shape[0] for port in entry.inputs if port.name == primary), None)
    for port in entry.inputs:
        beside = port.layout == "packed" and (items is None or port.shape[0] != items)
        if port.layout == "list" or beside:
            return False
    return bool(entry.inputs)


def _inner(entry: Entry, name: str) -> tuple[Any, ...]:
    """The dimensions of one row of input *name*."""
    port = next(p for p in entry.inputs if p.name == name)
    return tuple(port.shape[1:]) if port.layout == "packed" else tuple(port.shape)


def _known(entry: Entry, port: Port) -> tuple[Any, ...] | None:
    """The dimensions of one row of an input, ``None`` if they are not known before a request comes."""
    inner = _inner(entry, port.name)
    return inner if all(isinstance(size, int) for size in inner) else None


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


def _tensor(value: Any) -> Tensor:
    tensor: Tensor = value.ids if isinstance(value, Sampled) else value
    return tensor


def _padded(value: Any, lane: Lane) -> Tensor | None:
    """A tensor that stays, as long as *lane*'s rows or tokens, filled with *value* of the real ones."""
    if value is None:
        return None
    length = lane.tokens if value.shape[0] == lane.real[1] else lane.rows
    with torch.inference_mode(False):
        static = torch.zeros((length, *value.shape[1:]), dtype=value.dtype, device=value.device)
    _fill(static, value)
    return static


def _fill(static: Tensor, value: Tensor) -> None:
    """Put *value* into the first lines, and its first line into the others: they are like a request's, whatever the
    node expects of one."""
    rows = value.shape[0]
    static[:rows].copy_(value, non_blocking=True)
    if rows < static.shape[0]:
        static[rows:].copy_(value[:1].expand(static.shape[0] - rows, *value.shape[1:]), non_blocking=True)

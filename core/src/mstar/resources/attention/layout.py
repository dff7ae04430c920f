"""Host side of the torch attention backend: which rows run together, where their keys are, and what they may see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.resources.attention.base import KVBatch

__all__ = ["Group", "Layout", "build_layout"]

_Ints = npt.NDArray[np.integer]

_SHORT = 8
"""Rows of up to this many queries share a call with rows of the same length; longer ones are work enough alone."""


@dataclass(slots=True)
class Group:
    """Rows of equally many queries that run as one call.

    :param begin, end: their packed queries, in the layout's order. :param queries: of each row.
    :param context: keys of each row that come from the memory (the longest row's; shorter ones are padded with places
        of their own context, so that nothing of another request is ever read).
    :param pairs: int64 ``[2 * rows * context]`` lines of ``KVMemory.pairs``, keys then values; ``None``: see *run*.
    :param run: the first place of a single row whose context is one run, or ``None``.
    :param beside: the step's own keys are passed in and follow those from the memory.
    :param mask: additive ``[rows, 1, queries, keys]`` or ``None``. :param square: causal over the step's own keys only.
    """

    begin: int
    end: int
    rows: int
    queries: int
    context: int
    pairs: Tensor | None
    run: int | None
    beside: bool
    mask: Tensor | None
    square: bool


@dataclass(slots=True)
class Layout:
    """The groups of one step for one (window, causal). *order* int64 ``[N]``: packed index of each query in the groups'
    order, *inverse* the way back; ``None`` when they are the same."""

    groups: list[Group]
    order: Tensor | None
    inverse: Tensor | None
    scratch: int


def build_layout(
    batch: KVBatch,
    memory_tokens: int,
    budget: int,
    window: int | None,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Layout:
    """Plan *batch*. *budget*: tokens that one gather should not exceed, so that what it gathers is still in the
    processor's cache when it is read."""
    build = _Builder(batch, memory_tokens, window, causal, dtype, device)
    offsets = np.concatenate(([0], np.cumsum(batch.lengths)))
    groups: list[Group] = []
    order: list[_Ints] = []
    begin = 0
    for rows in _split(batch.lengths, build.counts, budget):
        group = build.group(rows, begin)
        groups.append(group)
        order.extend(np.arange(offsets[row], offsets[row + 1]) for row in rows)
        begin = group.end
    packed = np.concatenate(order) if order else np.zeros(0, np.int64)
    scratch = max((2 * g.rows * g.context for g in groups if g.pairs is not None), default=0)
    if np.array_equal(packed, np.arange(begin)):
        return Layout(groups, None, None, scratch)
    inverse = np.argsort(packed)
    return Layout(groups, torch.from_numpy(packed).to(device), torch.from_numpy(inverse).to(device), scratch)


def _split(lengths: _Ints, counts: _Ints, budget: int) -> Iterator[list[int]]:
    """Rows in groups: equal query counts, similar context lengths, empty contexts apart from others."""
    short: dict[tuple[int, bool], list[int]] = {}
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        if length > _SHORT:
            yield [row]
        elif length:
            short.setdefault((length, count == 0), []).append(row)
    for rows in short.values():
        rows.sort(key=lambda row: int(counts[row]))
        chunk: list[int] = []
        for row in rows:
            if chunk and (len(chunk) + 1) * int(counts[row]) > budget:
                yield chunk
                chunk = []
            chunk.append(row)
        yield chunk


class _Builder:
    """Makes the groups of one layout. ``lows``: first context token that a row reads; ``counts``: how many it reads."""

    def __init__(
        self,
        batch: KVBatch,
        memory_tokens: int,
        window: int | None,
        causal: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.batch, self.memory_tokens, self.window, self.causal = batch, memory_tokens, window, causal
        self.dtype, self.device = dtype, device
        ends = batch.starts + batch.lengths if batch.step_kv == "written" else batch.starts
        self.lows = np.zeros_like(batch.starts)
        if window is not None and not batch.sink:
            self.lows = np.maximum(0, batch.starts - window + 1)
            self.lows = np.minimum(self.lows, ends)
        self.counts = ends - self.lows

    def group(self, rows: Sequence[int], begin: int) -> Group:
        batch = self.batch
        chosen = np.asarray(rows)
        queries, context = int(batch.lengths[rows[0]]), int(self.counts[chosen].max())
        beside = batch.step_kv == "beside"
        if batch.step_kv == "written" and len(rows) == 1 and batch.starts[rows[0]] == 0:
            # The whole context is this step: no need to read it back from the memory.
            self.counts[rows[0]], beside, context = 0, True, 0
        pairs, run = self._places(chosen, context)
        square = self._is_square(chosen, context, queries)
        return Group(
            begin=begin,
            end=begin + len(rows) * queries,
            rows=len(rows),
            queries=queries,
            context=context,
            pairs=pairs,
            run=run,
            beside=beside,
            mask=None
            if square or self._sees_all(chosen, context, queries)
            else self._mask(chosen, queries, context, beside),
            square=square and queries > 1,
        )

    def _is_square(self, rows: _Ints, context: int, queries: int) -> bool:
        """A single row that starts here and whose window is no narrower than the step: plain causal attention."""
        wide = self.window is None or self.window >= queries
        return self.causal and wide and context == 0 and len(rows) == 1 and self.batch.step_kv != "none"

    def _sees_all(self, rows: _Ints, context: int, queries: int) -> bool:
        """No padding, and every query sees every key: no mask (nor the work of making one) is needed."""
        if self.batch.gaps is not None or (self.counts[rows] != context).any():
            return False
        if queries == 1 or self.batch.step_kv == "none":
            return True  # a window has been applied by not reading what is outside
        return not self.causal and self.window is None

    def _places(self, rows: _Ints, context: int) -> tuple[Tensor | None, int | None]:
        """Where the keys of *rows* are: lines of the memory's pairs, or the start of a single run."""
        if context == 0:
            return None, None
        places = self._first_places(rows, context)
        if len(rows) == 1 and places[0, -1] - places[0, 0] == context - 1 and (np.diff(places[0]) == 1).all():
            return None, int(places[0, 0])
        pairs = np.empty((2, len(rows), context), np.int64)
        np.copyto(pairs[0], places)
        if (self.counts[rows] != context).any():
            np.copyto(pairs[0], places[:, :1], where=np.arange(context) >= self.counts[rows, None])
        np.add(pairs[0], self.memory_tokens, out=pairs[1])
        return torch.from_numpy(pairs.reshape(-1)).to(self.device), None

    def _first_places(self, rows: _Ints, context: int) -> _Ints:
        """Places of the *context* tokens from each row's low on; those past a row's count mean nothing."""
        batch, size = self.batch, self.batch.page_size
        if not self.lows[rows].any():  # whole pages from the first on: no division per token
            pages = batch.tables[rows, : -(-context // size)][:, :, None]
            first = np.add(pages * size, np.arange(size, dtype=np.int32)).reshape(len(rows), -1)
            return first[:, :context]
        tokens = self.lows[rows, None] + np.minimum(np.arange(context), self.counts[rows, None] - 1)
        places: _Ints = batch.tables[rows[:, None], tokens // size] * size + tokens % size
        return places

    def _allowed(self, rows: _Ints, queries: int, context: int, beside: bool) -> npt.NDArray[np.bool_]:
        """Which key each query sees, ``[rows, queries, keys]`` or a shape that broadcasts to it."""
        batch = self.batch
        starts = batch.starts[rows, None, None]
        columns = np.arange(context)[None, None]
        gaps = np.zeros_like(starts) if batch.gaps is None else batch.gaps[rows, None, None]
        first = starts + gaps  # position of the row's first query
        keys = self.lows[rows, None, None] + columns
        keys = keys + np.where(keys >= batch.sink, gaps, 0)
        valid = columns < self.counts[rows, None, None]
        asked = first + np.arange(queries)[None, :, None]
        if beside:
            own = np.broadcast_to(first + np.arange(queries)[None, None], (len(rows), 1, queries))
            keys = np.concatenate((np.broadcast_to(keys, (len(rows), 1, context)), own), axis=2)
            valid = np.concatenate((valid, np.ones((len(rows), 1, queries), bool)), axis=2)
        if batch.step_kv == "none":
            return valid
        seen = keys <= asked if self.causal else np.ones_like(asked, bool)
        if self.window is not None:
            near = (keys > asked - self.window) | (keys < batch.sink)
            seen = seen & (near if self.causal else near | (keys >= first))
        return np.asarray(valid & seen)

    def _mask(self, rows: _Ints, queries: int, context: int, beside: bool) -> Tensor | None:
        if queries == 1 and self.batch.gaps is None and not beside:
            allowed = (np.arange(context) < self.counts[rows, None])[:, None]  # only padding is hidden
        else:
            allowed = self._allowed(rows, queries, context, beside)
        if allowed.all():
            return None
        mask = np.where(allowed, np.float32(0), np.float32(-np.inf))[:, None]
        return torch.from_numpy(mask).to(self.device, self.dtype)

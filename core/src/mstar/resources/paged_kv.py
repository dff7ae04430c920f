"""Keys and values of self-attention in pages: the ``paged_kv`` resource."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.nn import ops
from mstar.nn.ops import HeadNorms
from mstar.nn.rotary import Rotation
from mstar.resources.attention import AttentionNeed, KVBatch, KVMemory, KVPlan, pick_backend
from mstar.resources.attention.memory import dtype_named
from mstar.resources.base import IntegrityError, Owner, Resource, ResourceContext, Row, State, Usage
from mstar.resources.budget import DoesNotFit
from mstar.resources.pages import PagePool
from mstar.resources.slots import SlotPool
from mstar.resources.staging import to_device
from mstar.spec import resources as specs
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.request import EngineRequest
from mstar.spec.sizes import bytes_in_words

__all__ = ["PagedKV", "PagedView"]


class PagedView:
    """What a node uses: attention of a step's tokens over their contexts.

    ``positions``: int64 ``[N]``, the position of each token of the step in its context.

    :param places: int64 ``[N]``, where in the memory the step's tokens are kept; ``None``: nowhere.
    """

    def __init__(
        self,
        memory: KVMemory,
        plan: KVPlan,
        windows: Sequence[int | None],
        positions: Tensor,
        places: Tensor | None,
    ):
        self._memory, self._plan, self._windows = memory, plan, windows
        self._places, self.positions = places, positions

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        causal: bool = True,
        softcap: float | None = None,
    ) -> Tensor:
        """Store *k*, *v* ``[N, kv_heads, head_dim]`` of the step's tokens (unless the step is frozen) and return the
        attention ``[N, query_heads, head_dim]`` of *q* over each token's whole context, this step included.

        :param scale: of the logits, by default ``head_dim ** -0.5``. :param softcap: see
            :meth:`mstar.resources.attention.KVPlan.attend`.
        :param causal: ``False``: the tokens of a row's step see each other fully, and all of the context before.
        """
        if self._places is not None:
            self._memory.write(layer, self._places, k, v)
        window = self._windows[layer] if self._windows else None
        return self._plan.attend(layer, q, k, v, window=window, causal=causal, scale=scale, softcap=softcap)

    def attend_heads(
        self,
        layer: int,
        heads: Tensor,
        q_heads: int,
        rotation: Rotation,
        norms: HeadNorms | None = None,
        *,
        scale: float | None = None,
        causal: bool = True,
        softcap: float | None = None,
    ) -> Tensor:
        """:meth:`attend` for what a fused projection gives, in one operation where the device has one: norm and rotate
        queries and keys first.

        :param heads: ``[N, q_heads + 2 * kv_heads, head_dim]``: queries, keys, values; may be overwritten.
        """
        window = self._windows[layer] if self._windows else None
        how: dict[str, Any] = {"window": window, "causal": causal, "scale": scale, "softcap": softcap}
        if self._places is not None:
            mixed = self._plan.attend_heads(layer, heads, q_heads, rotation, norms, self._places, **how)
            if mixed is not None:
                return mixed
        keys, values = self._memory.keys_values(layer)
        q, k, v = ops.rotate_store(heads, q_heads, rotation.cos, rotation.sin, norms, keys, values, self._places)
        return self._plan.attend(layer, q, k, v, **how)


class PagedKV(Resource):
    """Paged keys and values with prefix cache and copy-on-write. Its view is a :class:`PagedView`; units are pages."""

    kind = "paged_kv"
    moves = True
    looks_at = ()
    speculates = True
    batch_invariant = True
    spec: specs.PagedKV

    def __init__(self, name: str, spec: specs.PagedKV, context: ResourceContext):
        super().__init__(name, spec, context)
        if spec.windows and len(spec.windows) != spec.layers:
            raise SetupError(f"resource {name!r}: {len(spec.windows)} windows for {spec.layers} layers")
        dtype = dtype_named(spec.dtype, context.dtype)
        pages = _pool_pages(name, spec, context, dtype)
        self.backend = pick_backend(
            context.attention_backends,
            AttentionNeed(
                mode="kv",
                device=torch.device(context.device),
                dtype=context.dtype,
                query_heads=spec.query_heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                page_size=spec.page_size,
                windows=frozenset(window for window in spec.windows if window is not None),
                kv_dtype=dtype,
                deterministic=context.deterministic,
            ),
            spec.backend,
        )
        self.pool = PagePool(pages, spec.page_size, spec.prefix_cache)
        tokens = (pages + 1) * spec.page_size
        self.memory = KVMemory(spec.layers, tokens, spec.kv_heads, spec.head_dim, dtype, context.device)
        # The pool's tables again, as one array: a step's tables are one indexing operation. The last line is that of
        # the rows which pad a captured step: their page lies beyond the pool's, and nothing else reads it.
        self._lines = SlotPool(context.max_owners)
        self._tables = np.zeros((context.max_owners + 1, self.pool.units(spec.max_tokens)), np.int32)
        self._tables[-1] = pages
        # Of each line: committed tokens, and up to how many its pages can be written without asking the pool.
        self._held = np.zeros(context.max_owners + 1, np.int64)
        self._room = np.zeros(context.max_owners + 1, np.int64)
        self._planned: tuple[tuple[Any, ...], npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
        self._single = False  # of the rows in _planned: each has one token
        self.capturable, self.capturable_chunks = self.backend.capturable, self.backend.capturable_chunks

    # --- admission --------------------------------------------------------------------------------------------------
    def units(self, tokens: int) -> int:
        return self.pool.units(tokens)

    def capacity(self) -> int:
        return self.pool.pages

    def reserve(self, owner: Owner, units: int) -> bool:
        held, most = self.pool.held(owner), self._tables.shape[1]
        if units > most:
            raise IntegrityError(f"{units} pages asked for {owner} but a context may hold {most}")
        if self.pool.units(held) + units > most:
            raise RequestError(
                f"the session holds {held} tokens of {self.name!r}; with this request it could grow past the "
                f"{self.spec.max_tokens} that one context may hold; begin a new session or ask for less",
                param="session",
                code="context_length_exceeded",
            )
        known = owner in self._lines
        if not self._lines.reserve(owner):
            return False
        if self.pool.reserve(owner, units):
            return True
        if not known:
            self._lines.release(owner)
        return False

    def open(self, owner: Owner, request: EngineRequest) -> None:
        self.pool.open(owner, request.cache_salt)
        line = self._lines[owner]
        self._held[line], self._room[line] = self.pool.length(owner), 0

    def close(self, owner: Owner) -> None:
        self.pool.close(owner)
        line = self._lines.release(owner)
        self._held[line] = self._room[line] = 0  # the next owner's, until it is opened
        self._planned = None

    def taken(self, owner: Owner) -> int:
        return self.pool.units(self.pool.held(owner))

    def follow(self, owner: Owner, tokens: int) -> None:
        self.pool.follow(owner, tokens)
        self._held[self._lines[owner]] += tokens

    # --- from one rank to another -------------------------------------------------------------------------------------
    def export(self, owner: Owner) -> State:
        """``kv``: ``[layers, 2, tokens, kv_heads, head_dim]``, gathered from the pages in one operation."""
        ids, learns = self.pool.known(owner)
        tokens = self.pool.length(owner)
        data = self.memory.data
        return State(
            {"tokens": tokens, "ids": ids, "learns": learns},
            {"kv": data.index_select(2, to_device(self._places_of(owner, tokens), data.device))},
        )

    def adopt(self, owner: Owner, request: EngineRequest, state: State) -> None:
        self.open(owner, request)
        tokens, data = int(state.facts["tokens"]), self.memory.data
        self.pool.fill(owner, tokens, state.facts["ids"], state.facts["learns"])
        self._mirror(owner, 0)
        self._held[self._lines[owner]] = tokens
        data.index_copy_(2, to_device(self._places_of(owner, tokens), data.device), state.tensors["kv"])

    def _places_of(self, owner: Owner, tokens: int) -> npt.NDArray[np.int64]:
        """Where *owner*'s first *tokens* tokens are kept, ``[tokens]``."""
        size, table = self.pool.page_size, np.asarray(self.pool.table(owner), np.int64)
        return (table[:, None] * size + np.arange(size)).reshape(-1)[:tokens]

    # --- prefix reuse -----------------------------------------------------------------------------------------------
    def match(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> int | None:
        if sibling is not None and len(ids) > 1 and self.pool.shares(owner, sibling, ids[:-1]):
            return len(ids) - 1
        return self.pool.match(owner, ids)

    def skip(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> None:
        if not len(ids):
            return
        if sibling is not None and self.pool.shares(owner, sibling, ids):
            self.pool.fork(owner, sibling, len(ids))
            self._room[self._lines[sibling]] = 0  # its last page is shared now
        else:
            self.pool.attach(owner, ids)
        self._mirror(owner, 0)
        self._held[self._lines[owner]] = len(ids)

    # --- a step -------------------------------------------------------------------------------------------------------
    def variant(self, rows: Sequence[Row], frozen: bool = False) -> Hashable | None:
        return () if self.capturable and (not frozen or self.backend.capturable_beside) else None

    def plan(self, rows: Sequence[Row], frozen: bool = False) -> PagedView:
        stage, size = self.context.stage, self.pool.page_size
        lines, lengths = self._lines_of(rows)
        starts = self._held[lines]
        if not frozen:
            self._grow(rows, np.flatnonzero(starts + lengths > self._room[lines]))
        longest = int((starts + (0 if frozen else lengths)).max()) if len(lines) else 0
        pages, most = self.pool.units(longest), self._tables.shape[1]
        tables = self._tables[lines, :pages]
        row_of, positions = (np.arange(len(lines)), starts) if self._single else flat_positions(starts, lengths)
        if stage.lane is not None:
            if not self._single:  # single padding stands at 0
                positions[int(lengths[: len(rows)].sum()) :] %= (
                    size  # within its page, where all contexts have positions
                )
            if pages > most:  # only padding can be longer than a context may be: its page is there again and again
                tables = np.pad(tables, ((0, 0), (0, pages - most)), mode="edge")
            most = max(most, self.pool.units(stage.lane.tokens))
        kept: Literal["written", "beside"] = "beside" if frozen else "written"
        batch = KVBatch(lengths, starts, tables, size, kept, most_pages=most, query_heads=self.spec.query_heads)
        plan = self.backend.plan_kv(self.memory, batch, stage, self.name)
        where = stage.put(f"{self.name}.positions", positions)
        places = None
        if not frozen:
            offsets = tables[row_of, positions // size].astype(np.int64) * size + positions % size
            places = stage.put(f"{self.name}.places", offsets)
        view: PagedView = stage.keep(
            f"{self.name}.view", lambda: PagedView(self.memory, plan, self.spec.windows, where, places)
        )
        return view

    def _lines_of(self, rows: Sequence[Row]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Line and length of each row, padding included. Those of the step before if the rows are the same."""
        stage, lane = self.context.stage, self.context.stage.lane
        same = (*rows, None if lane is None else (lane.rows, lane.tokens))
        if self._planned is None or self._planned[0] != same:
            lines = np.full(stage.rows(len(rows)), len(self._tables) - 1, np.int64)
            lines[: len(rows)] = [self._lines[row.owner] for row in rows]
            lengths = stage.lengths(np.array([row.length for row in rows], np.int64))
            self._planned, self._single = (same, lines, lengths), bool((lengths == 1).all())
        return self._planned[1:]

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        if frozen or not rows:
            return
        self.pool.commit_rows(rows)
        lines, lengths = self._lines_of(rows)
        self._held[lines[: len(rows)]] += lengths[: len(rows)]

    def retract(self, row: Row) -> None:
        self.pool.retract(row.owner, row.length)
        self._held[self._lines[row.owner]] -= row.length

    def learn(self, owner: Owner, ids: Sequence[int]) -> None:
        self.pool.learn(owner, ids)

    def rollback(self, rows: Sequence[Row], frozen: bool = False) -> None:
        """Nothing to undo: what was written lies past the committed length, in pages that the owner keeps for later."""

    def _grow(self, rows: Sequence[Row], full: npt.NDArray[np.int64]) -> None:
        """Get pages for those of *rows* whose indices are in *full*."""
        growing = [rows[i] for i in full if i < len(rows)]
        for row in growing:  # all are checked before any changes: a refused step leaves no copy half-done
            if not self.pool.fits(row.owner, row.length):
                raise IntegrityError(f"{row.owner} grows past the {self.name!r} pages that were reserved for it")
        copies: list[tuple[int, int]] = []
        for row in growing:
            first, copied = self.pool.grow(row.owner, row.length)
            copies.extend(copied)
            table = self.pool.table(row.owner)
            if first < len(table):
                self._mirror(row.owner, first)
            self._room[self._lines[row.owner]] = len(table) * self.pool.page_size
        if copies:
            size = self.pool.page_size
            places = np.asarray(copies, np.int64)[:, :, None] * size + np.arange(size)
            both = to_device(places.transpose(1, 0, 2).reshape(2, -1), self.memory.data.device)
            self.memory.copy(both[0], both[1])

    def _mirror(self, owner: Owner, first: int) -> None:
        table = self.pool.table(owner)
        self._tables[self._lines[owner], first : len(table)] = table[first:]

    # --- books ------------------------------------------------------------------------------------------------------
    def device_bytes(self) -> int:
        return self.memory.data.nbytes

    def usage(self) -> Usage:
        return self.pool.usage()

    def check(self, owners: Sequence[Owner]) -> None:
        self._lines.check(owners)
        self.pool.check(owners)
        for owner in owners:
            table, line = self.pool.table(owner), self._lines[owner]
            if self._tables[line, : len(table)].tolist() != list(table):
                raise IntegrityError(f"the page table of {owner} in {self.name!r} is not the pool's")
            held, room, length = int(self._held[line]), int(self._room[line]), self.pool.length(owner)
            if held != length:
                raise IntegrityError(f"{owner} holds {held} tokens of {self.name!r}, but {length} by the pool's books")
            if room > len(table) * self.pool.page_size:
                raise IntegrityError(f"{owner} writes up to {room} tokens of {self.name!r} into {len(table)} pages")


def flat_positions(
    starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and position of each packed token of a step, int64 ``[sum(lengths)]`` each."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return rows, starts[rows] + within


def _pool_pages(name: str, spec: specs.PagedKV, context: ResourceContext, dtype: torch.dtype) -> int:
    """Pages that the pool gets, or a :class:`DoesNotFit` with the numbers (promise P3)."""
    size = spec.page_size
    page_bytes = size * KVMemory.token_bytes(spec.layers, spec.kv_heads, spec.head_dim, dtype)
    context_pages = -(-spec.max_tokens // size)
    memory = context.memory
    affordable = None if memory is None else max(memory // page_bytes - 1, 0)  # one is for padding rows
    pages = context.max_owners * context_pages if spec.tokens is None else spec.tokens // size
    if affordable is not None and memory is not None and pages > affordable:
        if spec.tokens is not None:
            settings = [f"resources.{name}.tokens: {affordable * size}"] if affordable else []
            if affordable < context_pages:
                settings = [f"{setting} and resources.{name}.max_tokens: {affordable * size}" for setting in settings]
            raise DoesNotFit(
                f"resource {name!r}: tokens={spec.tokens} need {bytes_in_words((pages + 1) * page_bytes)} "
                f"({page_bytes // size} bytes a token), more than the memory budget of {bytes_in_words(memory)}",
                (pages + 1) * page_bytes,
                memory,
                settings,
            )
        pages = affordable
    if pages >= context_pages:
        return pages
    fitting = [f"resources.{name}.max_tokens: {pages * size}"] if pages else []
    needed_bytes = (context_pages + 1) * page_bytes
    needed = f"{context_pages} pages of {size} tokens ({bytes_in_words(needed_bytes)} with the page of padding rows)"
    message = f"resource {name!r}: one context of max_tokens={spec.max_tokens} needs {needed}, but the pool holds "
    if spec.tokens is None and memory is not None:
        message += f"{pages} pages within its memory budget of {bytes_in_words(memory)}"
        raise DoesNotFit(message, needed_bytes, memory, fitting)
    if affordable is None or affordable >= context_pages:
        fitting.append(f"resources.{name}.tokens: {context_pages * size}")
    remedy = f". It would fit with {' or '.join(fitting)}" if fitting else ""
    raise SetupError(f"{message}{pages} pages within its tokens={spec.tokens}{remedy}")

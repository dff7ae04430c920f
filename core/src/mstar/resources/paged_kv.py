"""Keys and values of self-attention in pages: the ``paged_kv`` resource."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.resources.attention import AttentionNeed, KVBatch, KVMemory, KVPlan, pick_backend
from mstar.resources.attention.memory import dtype_named
from mstar.resources.base import IntegrityError, Owner, Resource, ResourceContext, Row, Usage
from mstar.resources.budget import DoesNotFit
from mstar.resources.pages import PagePool
from mstar.resources.slots import SlotPool
from mstar.spec import resources as specs
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.request import EngineRequest
from mstar.spec.sizes import bytes_in_words

__all__ = ["PagedKV", "PagedView"]


class PagedView:
    """What a node uses: attention of a step's tokens over their contexts.

    ``positions``: int64 ``[N]``, the position of each token of the step in its context.
    """

    def __init__(self, memory: KVMemory, plan: KVPlan, windows: Sequence[int | None], positions: npt.NDArray[np.int64]):
        self._memory, self._plan, self._windows = memory, plan, windows
        self._places: Tensor | None = None
        self.positions = torch.from_numpy(positions).to(memory.data.device)

    def write_to(self, places: npt.NDArray[np.int64]) -> None:
        """The step's tokens are kept, at *places* int64 ``[N]`` of the memory. Without this call they are not."""
        self._places = torch.from_numpy(places).to(self._memory.data.device)

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


class PagedKV(Resource):
    """Paged keys and values with prefix cache and copy-on-write. Its view is a :class:`PagedView`; units are pages."""

    kind = "paged_kv"
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
            ),
            spec.backend,
        )
        self.pool = PagePool(pages, spec.page_size, spec.prefix_cache)
        self.memory = KVMemory(spec.layers, pages * spec.page_size, spec.kv_heads, spec.head_dim, dtype, context.device)
        # The pool's tables again, as one array: a step's tables are one indexing operation.
        self._lines = SlotPool(context.max_owners)
        self._tables = np.zeros((context.max_owners, self.pool.units(spec.max_tokens)), np.int32)

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

    def close(self, owner: Owner) -> None:
        self.pool.close(owner)
        self._lines.release(owner)

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
        else:
            self.pool.attach(owner, ids)
        self._mirror(owner, 0)

    # --- a step -------------------------------------------------------------------------------------------------------
    def plan(self, rows: Sequence[Row], frozen: bool = False) -> PagedView:
        lines = np.fromiter((self._lines[row.owner] for row in rows), np.int64, len(rows))
        lengths = np.fromiter((row.length for row in rows), np.int64, len(rows))
        starts = np.fromiter((self.pool.length(row.owner) for row in rows), np.int64, len(rows))
        if not frozen:
            self._grow(rows)
        size = self.pool.page_size
        longest = int((starts + (0 if frozen else lengths)).max()) if len(rows) else 0
        tables = self._tables[lines, : self.pool.units(longest)]
        batch = KVBatch(lengths, starts, tables, size, "beside" if frozen else "written")
        row_of, positions = flat_positions(starts, lengths)
        plan = self.backend.plan_kv(self.memory, batch)
        view = PagedView(self.memory, plan, self.spec.windows, positions)
        if not frozen:
            view.write_to(tables[row_of, positions // size].astype(np.int64) * size + positions % size)
        return view

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        if not frozen:
            for row in rows:
                self.pool.commit(row.owner, row.length, row.ids)

    def rollback(self, rows: Sequence[Row], frozen: bool = False) -> None:
        """Nothing to undo: what was written lies past the committed length, in pages that the owner keeps for later."""

    def _grow(self, rows: Sequence[Row]) -> None:
        for row in rows:  # all are checked before any changes: a refused step leaves no copy half-done
            if not self.pool.fits(row.owner, row.length):
                raise IntegrityError(f"{row.owner} grows past the {self.name!r} pages that were reserved for it")
        copies: list[tuple[int, int]] = []
        for row in rows:
            first, copied = self.pool.grow(row.owner, row.length)
            copies.extend(copied)
            if first < len(self.pool.table(row.owner)):
                self._mirror(row.owner, first)
        if copies:
            size = self.pool.page_size
            places = np.asarray(copies, np.int64)[:, :, None] * size + np.arange(size)
            both = torch.from_numpy(places.transpose(1, 0, 2).reshape(2, -1)).to(self.memory.data.device)
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
            table = self.pool.table(owner)
            if self._tables[self._lines[owner], : len(table)].tolist() != list(table):
                raise IntegrityError(f"the page table of {owner} in {self.name!r} is not the pool's")


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
    affordable = None if memory is None else memory // page_bytes
    pages = context.max_owners * context_pages if spec.tokens is None else spec.tokens // size
    if affordable is not None and memory is not None and pages > affordable:
        if spec.tokens is not None:
            settings = [f"resources.{name}.tokens: {affordable * size}"] if affordable else []
            if affordable < context_pages:
                settings = [f"{setting} and resources.{name}.max_tokens: {affordable * size}" for setting in settings]
            raise DoesNotFit(
                f"resource {name!r}: tokens={spec.tokens} need {bytes_in_words(pages * page_bytes)} "
                f"({page_bytes // size} bytes a token), more than the memory budget of {bytes_in_words(memory)}",
                pages * page_bytes,
                memory,
                settings,
            )
        pages = affordable
    if pages >= context_pages:
        return pages
    fitting = [f"resources.{name}.max_tokens: {pages * size}"] if pages else []
    needed = f"{context_pages} pages of {size} tokens ({bytes_in_words(context_pages * page_bytes)})"
    message = f"resource {name!r}: one context of max_tokens={spec.max_tokens} needs {needed}, but the pool holds "
    if spec.tokens is None and memory is not None:
        message += f"{pages} pages within its memory budget of {bytes_in_words(memory)}"
        raise DoesNotFit(message, context_pages * page_bytes, memory, fitting)
    if affordable is None or affordable >= context_pages:
        fitting.append(f"resources.{name}.tokens: {context_pages * size}")
    remedy = f". It would fit with {' or '.join(fitting)}" if fitting else ""
    raise SetupError(f"{message}{pages} pages within its tokens={spec.tokens}{remedy}")

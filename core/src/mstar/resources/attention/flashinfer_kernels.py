"""FlashInfer's kernels: which are used for what, their workspaces, and planning without waiting for the device.

Its wrapper classes plan from tensors on the device, which they read back, or copy their own from pageable memory: both
wait for the device. So the functions beneath them are called here, as vLLM and SGLang do for decoding: the plan is made
from arrays that are on the host anyway, and travels in pinned memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.resources.attention.flashinfer_pages import PageList
from mstar.resources.staging import record

__all__ = ["Combination", "Kernel", "KernelFault", "Library", "Shape"]

log = logging.getLogger(__name__)

_FLOATS = 1 << 27
"""Bytes of the workspace for partial results, unless a kernel needs more: see :func:`_partial_results`."""
_INTS = 1 << 23
"""Bytes of the workspace for one plan of any step; FlashInfer's own choice."""
_LANE_INTS = 1 << 18
"""The same for one query a row: enough for some 8,000 rows."""
_SLOW_SECONDS = 5.0
_NHD, _NO_POSITIONS = 0, 0


class KernelFault(Exception):
    """FlashInfer has no working kernel for something; the message is its reason."""


class Shape(NamedTuple):
    """What memory a kernel reads. *page*: tokens per page."""

    kv_heads: int
    head_dim: int
    page: int
    dtype: torch.dtype


class Combination(NamedTuple):
    """How a layer attends. *window_left*: earlier tokens that a query sees, -1 for all; *softcap*: 0 for none."""

    heads: int
    window_left: int
    causal: bool
    scale: float
    softcap: float


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _buffer(size: int, device: torch.device | str, pin: bool = False) -> Tensor:
    with torch.inference_mode(False):  # usable in and outside of inference mode, whoever comes first
        return torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pin)


class _PinnedRing:
    """Pinned memory that plans are written to and copied to the device from: the next one while earlier copies wait."""

    def __init__(self, size: int, count: int, device: torch.device):
        self._cuda, self._device = device.type == "cuda", device
        self._buffers = [_buffer(size, "cpu", self._cuda) for _ in range(count)]
        self._events: list[Any] = [_event() if self._cuda else None for _ in range(count)]
        self._turn = 0

    def take(self) -> Tensor:
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._cuda:
            self._events[self._turn].synchronize()  # of an event that was never recorded: at once
        return self._buffers[self._turn]

    def sent(self) -> None:
        """The copy of what was taken last has been ordered."""
        if self._cuda:
            record(self._events[self._turn], self._device)


class Library:
    """FlashInfer on one device.

    :raises ImportError: it is not installed. What else it raises says that its installation is broken.
    """

    def __init__(self, device: torch.device):
        from flashinfer import cascade, decode, prefill, utils

        self.device = device
        self.pdl: bool = utils.device_support_pdl(device)
        self.hopper: bool = utils.is_sm90a_supported(device)
        self.work = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
        self.merge = cascade.merge_state
        self.rings = {True: _PinnedRing(_LANE_INTS, 16, device), False: _PinnedRing(_INTS, 4, device)}
        self._decode, self._prefill = decode.get_batch_decode_module, prefill.get_batch_prefill_module
        self._floats: Tensor | None = None
        self._faults: dict[tuple[Any, ...], str] = {}
        self.fault: str | None = None
        """Why the last kernel that could not be had was not."""
        self._told = False

    def floats(self, size: int) -> Tensor:
        """Workspace of at least *size* bytes. Kernels of one stream share it; whoever has an older one keeps that."""
        size = max(size, _FLOATS if self.device.type == "cuda" else 0)
        if self._floats is None or self._floats.shape[0] < size:
            self._floats = _buffer(size, self.device)
        return self._floats

    def module(self, kind: str, shape: Shape, windowed: bool, capped: bool) -> Any:
        """The functions of one kernel. *kind*: ``decode`` (CUDA cores), ``fa2`` or ``fa3`` (tensor cores; both for
        pages and for packed keys).

        :raises KernelFault: it cannot be loaded or compiled. Said once in the log, and not tried again.
        """
        dtype, dim = shape.dtype, shape.head_dim
        options = (dtype, dtype, dtype, torch.int32, dim, dim, _NO_POSITIONS, windowed, capped)
        name = (kind, *options)
        if name in self._faults:
            self.fault = self._faults[name]
            raise KernelFault(self.fault)
        try:
            with self._told_when_slow():
                return self._decode(*options) if kind == "decode" else self._prefill(kind, *options, False)
        except Exception as error:  # compilers, linkers and loaders raise what they like
            lines = str(error).strip().splitlines() or [""]
            text = f"{kind} kernel, {dtype}, head_dim {dim}{', window' * windowed}{', softcap' * capped}"
            self.fault = self._faults[name] = f"it has no {text}: {type(error).__name__}: {lines[0]}"
            log.warning("FlashInfer: %s", self.fault)
            raise KernelFault(self.fault) from error

    @contextmanager
    def _told_when_slow(self) -> Iterator[None]:
        def tell() -> None:
            if not self._told:
                self._told = True
                log.warning("FlashInfer compiles kernels for this GPU: this takes minutes, once on a machine")

        timer = threading.Timer(_SLOW_SECONDS, tell)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class Kernel:
    """One kernel with its plan: made for a lane of so many rows and queries, or for any step.

    :param kind: see :meth:`Library.module`.
    """

    def __init__(
        self, library: Library, kind: str, shape: Shape, how: Combination, lane: tuple[int, int] | None = None
    ):
        self._module = library.module(kind, shape, how.window_left >= 0, how.softcap > 0)
        self._library, self._kind, self._shape, self._how = library, kind, shape, how
        self._lane = lane is not None
        self._floats = library.floats(_partial_results(lane, library.work, shape, how))
        self._ints = _buffer(_LANE_INTS if self._lane else _INTS, library.device)
        self._empty = torch.empty(0, dtype=shape.dtype)
        self._plan: Any = None
        self._first: tuple[int, ...] | None = None
        self._read: npt.NDArray[np.int32] | None = None  # what the last plan was made from
        self.planned_for: object = None
        """For whose rows it was planned last: whoever finds someone else here plans again."""

    def plan(self, pages: PageList, owner: object) -> None:
        """Divide *pages* among the GPU's multiprocessors. The plan is copied to the device behind what was ordered
        before. Where it would be the one that was made last, that is on the device already.

        :raises RuntimeError: of a lane: the plan is not of the shape that its graph has captured.
        """
        read = pages.read_by_plan(self._kind)
        if self._read is not None and np.array_equal(self._read, read):
            self.planned_for = owner
            return
        self._read = None  # unless this one succeeds
        queries, indptr, lengths = pages.host()
        kv_heads, dim, page, _ = self._shape
        heads, window, causal, _, softcap = self._how
        ring = self._library.rings[self._lane]
        room = (self._floats, self._ints, ring.take())
        if self._kind == "decode":
            problem = (pages.rows, heads, kv_heads, page, self._lane, window, softcap, dim, dim)
            self._plan = self._module.plan(*room, indptr, *problem, self._empty, self._empty)
        else:
            sizes = (pages.queries, pages.rows, heads, kv_heads, page, self._lane, dim, dim, causal, window)
            # fa2: no fixed division of contexts, division allowed, no thread blocks kept free.
            extra = (-1, False, 0) if self._kind == "fa2" else ()
            self._plan = self._module.plan(*room, queries, indptr, lengths, *sizes, *extra)
        ring.sent()
        self.planned_for = owner
        if self._lane:
            plan = tuple(self._plan)
            if self._first is None:
                self._first = plan
            elif plan != self._first:
                self.planned_for = None
                raise RuntimeError(f"FlashInfer's plan {plan} is not {self._first}, which a CUDA graph has captured")
        self._read = read

    def paged(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: tuple[Tensor, Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """Attention of *q* over pages ``[pages, page, kv_heads, head_dim]`` into *out* and *lse* (base 2).

        :param tables: of the planned rows on the device, as ``split_packed`` gives them.
        """
        _, window, causal, scale, softcap = self._how
        queries, indptr, indices, last = tables
        room, pdl = (self._floats, self._ints, self._plan), self._library.pdl
        if self._kind == "decode":
            options = (_NHD, window, pdl, None, softcap, scale, 1.0, 1e4)
            self._module.run(*room, q, keys, values, indptr, indices, last, out, lse, *options)
            return
        rows = (queries, indptr, indices, last)
        unused = (None,) * 6  # masks, slopes and multi-item scoring
        scales = (None, None, None, 1.0, 1e4, 0, self._floats.shape[0])
        self._module.paged_run(
            *room, q, keys, values, *rows, out, lse, int(causal), _NHD, window, pdl, *unused, softcap, scale, *scales
        )

    def ragged(self, q: Tensor, k: Tensor, v: Tensor, indptr: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention within the planned segments, whose starts are *indptr* on the device."""
        _, window, causal, scale, softcap = self._how
        unused = (None,) * 6
        self._module.ragged_run(
            self._floats,
            self._ints,
            self._plan,
            q,
            k,
            v,
            indptr,
            indptr,
            out,
            lse,
            int(causal),
            _NHD,
            window,
            self._library.pdl,
            *unused,
            softcap,
            scale,
            1.0,
            1e4,
            0,
        )


def _partial_results(lane: tuple[int, int] | None, work: int, shape: Shape, how: Combination) -> int:
    """Bytes of partial results of contexts that are divided.

    FlashInfer divides into no more than *work* pieces, twice the multiprocessors, over the key heads. A captured step
    (*lane*: its rows and queries) has place for as many in any case, and for all tiles that its rows might begin. A
    piece has a tile of 16, 64 or 128 queries, whichever holds the most that a row can have.
    """
    shared = how.heads // shape.kv_heads
    pieces, tile = work // shape.kv_heads, 128
    if lane is not None:
        rows, queries = lane
        longest = (queries - rows + 1) * shared
        tile = 16 if longest <= 16 else 64 if longest <= 64 else 128
        pieces = max(pieces, -(-queries * shared // tile) + rows - 1)
    return how.heads * (pieces + 1) * tile * (shape.head_dim + 1) * 4

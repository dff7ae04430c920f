"""Embeddings of media by content: the ``media_embeddings`` resource."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.resources.base import IntegrityError, Owner, Resource, ResourceContext, Row, State, Usage
from mstar.resources.budget import DoesNotFit
from mstar.resources.media_books import MediaBooks, Piece
from mstar.resources.staging import to_device
from mstar.spec import resources as specs
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.request import EngineRequest
from mstar.spec.sizes import bytes_in_words

__all__ = ["MediaEmbeddings", "MediaView"]

Lines = npt.NDArray[np.int64]
_NONE = np.zeros(0, np.int64)


class MediaView:
    """What nodes use: the encoder :meth:`write`, the language model :meth:`embed`."""

    def __init__(self, pool: Tensor, lines: Tensor | None, writes: bool):
        self._pool, self._lines, self._writes = pool, lines, writes

    def write(self, embeddings: Tensor) -> None:
        """*embeddings* ``[M, width]``: of all pieces of the step, in order."""
        if not self._writes or self._lines is None:
            raise LookupError("an entry that lists media embeddings as frozen cannot write any")
        if embeddings.shape[0] != self._lines.shape[0]:
            raise ValueError(f"{embeddings.shape[0]} embeddings for media that have {self._lines.shape[0]}")
        self._pool.index_copy_(0, self._lines, embeddings.to(self._pool.dtype))

    def embed(self, ids: Tensor, table: Callable[[Tensor], Tensor]) -> Tensor:
        """*ids* int64 ``[N]`` → ``[N, width]``: the media's embeddings where ids are negative, *table*'s elsewhere."""
        if self._lines is None:
            return table(ids)
        x, media = table(ids.clamp(min=0)), (self._lines >= 0)[:, None]
        return torch.where(media, self._pool[self._lines.clamp(min=0)].to(x.dtype), x)


@dataclass(slots=True)
class _Context:
    """One request's media.

    :param units: lines promised. :param starts: where each piece begins among the encoder's items, and where the last
        one ends. :param until: behind which token of the prompt each is no longer needed. :param at: line of each token
        of the prompt, -1 for text. :param read: tokens read so far.
    """

    units: int
    is_open: bool = False
    pieces: list[Piece] = field(default_factory=list)
    starts: Lines = field(default_factory=lambda: _NONE)
    until: Lines = field(default_factory=lambda: _NONE)
    at: Lines = field(default_factory=lambda: _NONE)
    read: int = 0

    def span(self, start: int, length: int) -> list[Piece]:
        """The pieces of items *start* to *start + length*, which are whole."""
        first, last = np.searchsorted(self.starts, (start, start + length))
        if self.starts[first] != start or self.starts[last] != start + length:
            raise IntegrityError(f"a step has items {start} to {start + length}, which are no whole pieces")
        return self.pieces[first:last]


class MediaEmbeddings(Resource):
    """A pool of embeddings that requests with the same media share. Its view is a :class:`MediaView`; units are
    embeddings.

    A request holds its media until its prompt is computed. They are then kept for others, and so is what a request
    brought that ended before. Requests share within one ``cache_salt``.
    """

    kind = "media_embeddings"
    capturable = capturable_chunks = True
    speculates = True
    batch_invariant = True
    moves = True
    looks_at = ("pieces", "prompt")
    spec: specs.MediaEmbeddings

    def __init__(self, name: str, spec: specs.MediaEmbeddings, context: ResourceContext):
        super().__init__(name, spec, context)
        for key in ("tokens", "max_tokens"):
            if getattr(spec, key) < 1:
                raise SetupError(
                    f"resource {name!r}: with {key}={getattr(spec, key)} no request could bring any media; give "
                    f"resources.{name}.{key} room for those of a request, or leave it out"
                )
        line = spec.width * context.dtype.itemsize
        needed = (spec.tokens + 1) * line
        if context.memory is not None and needed > context.memory:
            fit = max(0, context.memory // line - 1)
            message = (
                f"resource {name!r}: tokens={spec.tokens} embeddings of {spec.width} need {bytes_in_words(needed)}, "
                f"more than the memory budget of {bytes_in_words(context.memory)}"
            )
            raise DoesNotFit(message, needed, context.memory, [f"resources.{name}.tokens: {fit}"] if fit else [])
        with torch.inference_mode(False):  # the last line is where captured steps write their padding
            self.pool = torch.zeros(spec.tokens + 1, spec.width, dtype=context.dtype, device=context.device)
        self.books = MediaBooks(spec.tokens, spec.cache)
        self._contexts: dict[Owner, _Context] = {}
        self._waiting: set[Owner] = set()  # whose prompts have media that are not read yet
        self._promised = 0

    # --- admission ----------------------------------------------------------------------------------------------------
    def units(self, tokens: int) -> int:
        return tokens

    def capacity(self) -> int:
        return self.spec.tokens

    def reserve(self, owner: Owner, units: int) -> bool:
        if self._promised + units > self.spec.tokens:
            return False
        context = self._contexts.setdefault(owner, _Context(0))
        context.units += units
        self._promised += units
        return True

    def open(self, owner: Owner, request: EngineRequest) -> None:
        context = self._get(owner)
        context.is_open = True
        given = request.inputs.get(self.spec.pieces)
        if given is None:
            return
        table, prompt = np.asarray(given), np.asarray(request.inputs[self.spec.prompt])
        sizes, places = self._checked(table, prompt, context.units)
        salt = request.cache_salt
        for size, first, second in zip(sizes.tolist(), table[:, 2].tolist(), table[:, 3].tolist(), strict=True):
            context.pieces.append(self.books.take((salt, first, second), size))
        context.starts = np.concatenate(([0], np.cumsum(table[:, 0])))
        context.until = places[np.cumsum(sizes) - 1] + 1
        context.at = np.full(int(places[-1]) + 1, -1, np.int64)
        context.at[places] = np.concatenate([piece.lines for piece in context.pieces])
        self._waiting.add(owner)

    def _checked(self, table: npt.NDArray[np.int64], prompt: Lines, units: int) -> tuple[Lines, Lines]:
        """Embeddings of each piece, and where the prompt has media."""
        name = self.spec.pieces
        if table.ndim != 2 or table.shape[1] != 4 or table.dtype.kind != "i" or not len(table):
            message = f"{name}: expected integers [S, 4], got {table.dtype} {list(table.shape)}"
            raise RequestError(message, param=name)
        sizes: Lines = table[:, 1]
        places = np.flatnonzero(prompt < 0)
        if (sizes < 1).any() or not np.array_equal(table[:, 0], sizes * self.spec.items):
            raise RequestError(f"{name}: a piece must have {self.spec.items} items for each embedding", param=name)
        if int(sizes.sum()) != len(places):
            message = f"the prompt has {len(places)} placeholders for {int(sizes.sum())} embeddings of media"
            raise RequestError(message, param=self.spec.prompt)
        if len(places) > units:
            raise IntegrityError(f"{len(places)} embeddings of media, but {units} were promised")
        return sizes, places

    def close(self, owner: Owner) -> None:
        context = self._get(owner)
        self._let_go(owner, context)
        del self._contexts[owner]

    def _let_go(self, owner: Owner, context: _Context) -> None:
        """*owner* needs no media any more."""
        self.books.release(context.pieces)
        context.pieces = []
        self._promised -= context.units
        context.units = 0
        self._waiting.discard(owner)

    def _get(self, owner: Owner) -> _Context:
        try:
            return self._contexts[owner]
        except KeyError:
            raise IntegrityError(f"{owner} has no reservation in {self.name!r}") from None

    # --- from one rank to another -------------------------------------------------------------------------------------
    def export(self, owner: Owner) -> State:
        """``lines``: ``[M, width]``, the embeddings of the pieces that are *ready*, one after the other."""
        context = self._get(owner)
        ready = [number for number, piece in enumerate(context.pieces) if piece.ready]
        facts = {"read": context.read, "ready": ready}
        if not ready:
            return State(facts, {})
        lines = np.concatenate([context.pieces[number].lines for number in ready])
        return State(facts, {"lines": self.pool.index_select(0, to_device(lines, self.pool.device))})

    def adopt(self, owner: Owner, request: EngineRequest, state: State) -> None:
        self.open(owner, request)
        context = self._get(owner)
        pieces = [context.pieces[number] for number in state.facts["ready"]]
        if pieces:
            parts = state.tensors["lines"].split([len(piece.lines) for piece in pieces])
            new = {id(piece): (piece, part) for piece, part in zip(pieces, parts, strict=True) if not piece.ready}
            for piece, part in new.values():
                self.pool.index_copy_(0, to_device(piece.lines, self.pool.device), part.to(self.pool.dtype))
                piece.ready = True
        self._read(owner, int(state.facts["read"]))

    # --- prefix reuse -------------------------------------------------------------------------------------------------
    def match(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> int | None:
        return None

    def skip(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> None:
        self._read(owner, len(ids))

    # --- calls in pieces ----------------------------------------------------------------------------------------------
    def portion(self, owner: Owner, start: int, most: int) -> tuple[int, int] | None:
        context = self._get(owner)
        starts = context.starts.tolist()
        if not context.pieces:  # all are read: a prefix cache holds what comes of them
            return starts[-1] - start, 0
        known = starts.index(start)
        while known < len(context.pieces) and (context.pieces[known].ready or context.until[known] <= context.read):
            known += 1
        end, seen = known, set[int]()
        while end < len(context.pieces):
            piece = context.pieces[end]
            if piece.ready or id(piece) in seen or (end > known and starts[end + 1] - starts[known] > most):
                break
            seen.add(id(piece))
            end += 1
        return starts[known] - start, starts[end] - starts[known]

    def lookups(self) -> tuple[int, int] | None:
        return self.books.asked, self.books.hits

    # --- a step -------------------------------------------------------------------------------------------------------
    def variant(self, rows: Sequence[Row], frozen: bool = False) -> Hashable | None:
        if not frozen:
            return "write"
        return "media" if any(self._upcoming(row) is not None for row in rows) else "text"

    @property
    def variants(self) -> Sequence[Hashable]:
        return ("text",)

    def _upcoming(self, row: Row) -> Lines | None:
        """Lines of *row*'s tokens, ``None`` if none of them has one."""
        if row.owner not in self._waiting:
            return None
        context = self._contexts[row.owner]
        lines = context.at[context.read : context.read + row.length]
        return lines if (lines >= 0).any() else None

    def plan(self, rows: Sequence[Row], frozen: bool = False) -> MediaView:
        stage = self.context.stage
        if frozen:
            lines = self._to_read(rows)
            if lines is not None and stage.lane is not None:
                lines = np.pad(lines, (0, stage.lane.tokens - len(lines)), constant_values=-1)
        else:
            found = [piece.lines for row in rows for piece in self._get(row.owner).span(row.start, row.length)]
            lines = np.concatenate(found) if found else _NONE
            if stage.lane is not None:
                spare = stage.lane.tokens // self.spec.items - len(lines)
                lines = np.pad(lines, (0, spare), constant_values=self.spec.tokens)
        sent = None if lines is None else stage.put(f"{self.name}.lines", lines)
        view: MediaView = stage.keep(f"{self.name}.view", lambda: MediaView(self.pool, sent, not frozen))
        return view

    def _to_read(self, rows: Sequence[Row]) -> Lines | None:
        if self.context.stage.lane is not None and self.context.stage.lane.variants.get(self.name) == "text":
            return None
        found = [self._upcoming(row) for row in rows] if self._waiting else []
        if self.context.stage.lane is None and all(lines is None for lines in found):
            return None
        parts = [
            np.full(row.length, -1, np.int64)
            if lines is None
            else np.pad(lines, (0, row.length - len(lines)), constant_values=-1)
            for row, lines in zip(rows, found, strict=True)
        ]
        return np.concatenate(parts) if parts else _NONE

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        for row in rows:
            if frozen:
                self._read(row.owner, row.length)
            else:
                for piece in self._get(row.owner).span(row.start, row.length):
                    piece.ready = True

    def _read(self, owner: Owner, tokens: int) -> None:
        """*tokens* more of *owner*'s prompt are computed. Once all of its media are behind, they are let go of."""
        if owner not in self._waiting:
            return
        context = self._contexts[owner]
        context.read += tokens
        if context.read >= len(context.at):
            self._let_go(owner, context)

    def retract(self, row: Row) -> None:
        """Nothing to undo: what is launched ahead comes after the prompt."""

    # --- books --------------------------------------------------------------------------------------------------------
    def device_bytes(self) -> int:
        return self.pool.nbytes

    def usage(self) -> Usage:
        cached = sum(len(piece.lines) for piece in self.books.idle.values())
        return Usage(self._promised, self.spec.tokens, cached)

    def check(self, owners: Sequence[Owner]) -> None:
        if set(owners) != set(self._contexts):
            raise IntegrityError(
                f"{self.name!r} is open for {sorted(self._contexts)} but open owners are {sorted(owners)}"
            )
        self.books.check([context.pieces for context in self._contexts.values()])
        promised = sum(context.units for context in self._contexts.values())
        if promised != self._promised or self.books.held > promised:
            raise IntegrityError(
                f"{self.name!r}: {self._promised} lines promised, {promised} by its books, {self.books.held} held"
            )

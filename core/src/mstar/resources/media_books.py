"""Books of embeddings of media: which lines of the pool hold what, who needs it, what is kept for others. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mstar.resources.base import IntegrityError

__all__ = ["Key", "MediaBooks", "Piece"]

Lines = npt.NDArray[np.int64]
Key = tuple[str, int, int]
"""Salt, and two words of a digest."""


@dataclass(slots=True, eq=False)
class Piece:
    """Media of one content. *lines*: of the pool, in order. *ready*: they hold its embeddings."""

    key: Key
    lines: Lines
    ready: bool = False
    holders: int = 1


@dataclass(slots=True)
class MediaBooks:
    """*lines* lines, given to pieces by content. What nobody holds stays, if it is ready and *keep* says so, least
    recently used first to go."""

    lines: int
    keep: bool = True
    pieces: dict[Key, Piece] = field(default_factory=dict)
    idle: OrderedDict[Key, Piece] = field(default_factory=OrderedDict)
    held: int = 0
    asked: int = 0
    hits: int = 0
    _free: Lines = field(init=False)
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        self._free, self._left = np.arange(self.lines, dtype=np.int64)[::-1].copy(), self.lines

    def take(self, key: Key, size: int) -> Piece:
        """The piece of this content, held once more; new if it is not known. There is room for it, or what nobody
        holds gives way."""
        self.asked += size
        piece = self.pieces.get(key)
        if piece is not None and len(piece.lines) == size:
            self.hits += size if piece.ready else 0
            if self.idle.pop(key, None) is not None:
                self.held += size
            piece.holders += 1
            return piece
        if piece is not None:
            raise IntegrityError(f"media of one digest have {len(piece.lines)} embeddings and {size}")
        while self._left < size:
            if not self.idle:
                raise IntegrityError(f"{size} lines wanted, {self._left} free: more is held than was promised")
            _, old = self.idle.popitem(last=False)
            self._drop(old)
        self._left -= size
        piece = self.pieces[key] = Piece(key, self._free[self._left : self._left + size].copy())
        self.held += size
        return piece

    def release(self, pieces: Iterable[Piece]) -> None:
        """Let go of each of *pieces* once. The last ones are the first to give way: a prompt's end is seen again less
        often than its beginning."""
        for piece in reversed(list(pieces)):
            piece.holders -= 1
            if piece.holders:
                continue
            self.held -= len(piece.lines)
            if piece.ready and self.keep:
                self.idle[piece.key] = piece
            else:
                self._drop(piece)

    def _drop(self, piece: Piece) -> None:
        del self.pieces[piece.key]
        size = len(piece.lines)
        self._free[self._left : self._left + size] = piece.lines
        self._left += size

    def check(self, holders: Sequence[Sequence[Piece]]) -> None:
        """Raise :class:`IntegrityError` unless the pieces are held as *holders* say and every line is accounted for."""
        counts: dict[int, int] = {}
        for pieces in holders:
            for piece in pieces:
                counts[id(piece)] = counts.get(id(piece), 0) + 1
        if {id(p): p.holders for p in self.pieces.values() if p.holders} != counts:
            raise IntegrityError("pieces of media are held by others than the open requests")
        if {key for key, piece in self.pieces.items() if not piece.holders} != set(self.idle):
            raise IntegrityError("pieces of media that nobody holds are not those that are kept")
        lines = [self._free[: self._left], *(piece.lines for piece in self.pieces.values())]
        if not np.array_equal(np.sort(np.concatenate(lines)), np.arange(self.lines)):
            raise IntegrityError("lines of media embeddings are lost or counted twice")
        if self.held != sum(len(piece.lines) for piece in self.pieces.values() if piece.holders):
            raise IntegrityError(f"{self.held} lines of media embeddings are not those that are held")

"""The first pieces of what somebody plays, held until those behind them will come in time.

A first piece is short, so that sound starts early. Where a server has many listeners the next one may take about as
long as the first one plays, and a step that takes longer is a gap. So a piece waits for the next one there, and a
listener who is nearly alone hears it at once. Players know this as preroll, or as a jitter buffer; here it is as long
as the request's own pace asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mstar.graph.streams import Chunk, InnerStream
from mstar.spec.graph import CLIENT, Stream, Whole
from mstar.spec.request import TokenLogprob

__all__ = ["JITTER_S", "MARGIN", "MOST", "Piece", "Preroll"]

MARGIN = 3.0
"""What is held must play so many times longer than the next piece is expected to take,"""

JITTER_S = 0.1
"""or so many seconds longer: a step that comes in between is no longer where more is waited for."""

MOST = 4
"""Pieces that are held at most."""


@dataclass(slots=True)
class Piece:
    """An emission that waits. :param items: that it adds to what was sent before."""

    data: Any
    items: int
    logprobs: list[TokenLogprob] | None
    heard: dict[str, int] | None


class Preroll:
    """What a client stream has before its playback begins, whose emissions are made of an inner stream's chunks, one of
    each. Belongs to one request.

    :param source: that inner stream. :param each: seconds that the sound of one of its items plays.
    :param item: and one of the client stream's.
    :ivar held: in the order in which it was made.
    """

    __slots__ = ("_each", "_item", "_source", "held")

    def __init__(self, source: InnerStream, each: float, item: float):
        self._source, self._each, self._item = source, each, item
        self.held: list[Piece] = []

    @classmethod
    def of(cls, out: Stream, inner: Mapping[str, InnerStream]) -> Preroll | None:
        """``None``: *out* has no clock, or nothing tells when its next piece may be expected."""
        if out.seconds_per_item is None or out.fresh is None:
            return None
        source = inner[out.fresh.pull]
        if source.spec.source == CLIENT or isinstance(source.spec.chunk, Whole):
            return None
        return cls(source, out.fresh.per_unit * out.seconds_per_item / source.unit, out.seconds_per_item)

    def holds(self, piece: Piece, chunk: Chunk, credit: int, now: float) -> bool:
        """Keep *piece*, made of *chunk*, and say whether all that is held goes on waiting.

        :param credit: emissions that the client takes before it acknowledges one. Not all of them are held: the writer
            would wait for a client that has heard nothing. :param now: monotonic seconds.
        """
        self.held.append(piece)
        return len(self.held) < min(MOST, credit) and not self._in_time(chunk, now)

    def _in_time(self, chunk: Chunk, now: float) -> bool:
        """Whether the piece behind *chunk*'s will surely come before what is held is over, or holding helps nobody.

        It takes as long as the items that its chunk lacks, at the pace of this request so far, and then about what
        *chunk*'s took from when it was complete: turns of others and its own step. Who is slower than real time falls
        silent whatever is held, and hears what there is.
        """
        source = self._source
        pace = None if source.ended else source.pace(now)
        if pace is None or pace >= self._each:
            return True
        due = pace * source.missing + (now - chunk.at)
        return min(MARGIN * due, due + JITTER_S) <= sum(piece.items for piece in self.held) * self._item

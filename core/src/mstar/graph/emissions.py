"""What one request's client is sent, and when.

Nearly everything leaves in the call that made it. What somebody plays may be held before its playback begins
(:mod:`mstar.graph.preroll`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from mstar.graph.calls import CallRun
from mstar.graph.preroll import Piece, Preroll
from mstar.graph.streams import InnerStream, OutStream, fresh
from mstar.graph.values import Ref
from mstar.spec.request import Emit, EngineRequest, TokenLogprob

__all__ = ["Emissions"]


class Emissions:
    """The way to the client of one request.

    :param streams: to the client, by name. :param inner: what they may be made of.
    :param emit: called with each :class:`~mstar.spec.request.Emit`.
    """

    __slots__ = ("_emit", "_live", "_prerolls", "_request", "_streams")

    def __init__(
        self,
        request: EngineRequest,
        streams: Mapping[str, OutStream],
        inner: Mapping[str, InnerStream],
        emit: Callable[[Emit], None],
    ):
        self._request, self._streams, self._emit = request, streams, emit
        self._live = bool(request.client_streams)  # what is emitted says which input it was computed from
        prerolls = {name: Preroll.of(out.spec, inner) for name, out in streams.items()}
        self._prerolls = {name: preroll for name, preroll in prerolls.items() if preroll is not None}  # not begun yet

    def write(self, name: str, ref: Ref, logprobs: list[TokenLogprob] | None, call: CallRun) -> None:
        """*call* emits *ref* on a stream.

        :raises RequestError: what somebody would hear, see or carry out is no numbers.
        """
        out = self._streams[name]
        overlap = 0
        if out.spec.fresh is not None:
            ref, overlap = fresh(ref, out.spec.fresh, call.pulled[out.spec.fresh.pull])
        data, count = out.payload(ref)
        if not count:
            return
        told = dict(call.heard) if self._live else None
        sampled = logprobs if out.spec.modality == "tokens" else None  # what else it emits has none
        piece, now = Piece(data, count - overlap, sampled, told), time.monotonic()
        preroll = self._prerolls.get(name)
        if preroll is None or out.spec.fresh is None:
            self._send(name, piece, now)
        elif not preroll.holds(piece, call.pulled[out.spec.fresh.pull], out.credit, now):
            self._begin(name, now)

    def tell(self, name: str, done: int, total: int) -> None:
        """Say that *done* of *total* iterations are over (0: nobody knows), if the client wants to hear it and keeps
        up."""
        out, want = self._streams[name], self._request.want
        if out.full or (out.spec.modality not in want and "preview" not in want):
            return
        self._send(name, Piece(np.array([[done, total]], dtype=np.int64), 1, None, None), time.monotonic())

    def send_held(self, source: str | None = None) -> None:
        """Send what is held of the streams that partition *source* writes, or of all: nothing more will come."""
        for name in list(self._prerolls):
            if source is None or self._streams[name].spec.source == source:
                self._begin(name, time.monotonic())

    def _begin(self, name: str, now: float) -> None:
        """Send what is held of a stream; from now on nothing is."""
        for piece in self._prerolls.pop(name).held:
            self._send(name, piece, now)

    def _send(self, name: str, piece: Piece, now: float) -> None:
        seq, data = self._streams[name].sent(piece.items, now), piece.data
        request = self._request.id
        self._emit(Emit(id=request, stream=name, seq=seq, data=data, logprobs=piece.logprobs, heard=piece.heard))

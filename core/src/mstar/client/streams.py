"""Answers that the client without an event loop hands out while they are made: of one request, and of a live one."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import connect

from mstar.client.answers import Ending, broken_off, error_of, only, unreachable
from mstar.client.live import Conversation, Heard, Items, Observation
from mstar.runtime.result import Result
from mstar.spec.errors import RequestError
from mstar.spec.processor import ArrayDelta, Delta
from mstar.spec.request import Usage

if TYPE_CHECKING:
    from mstar.client.sync import Client

__all__ = ["Live", "Stream"]


class Stream(Ending):
    """An answer as it is made: iterate it for its deltas. Leaving it early (:meth:`close`, or the end of a ``with``)
    cancels the request.

    :ivar finish_reason: why it ended, once it has. :ivar usage: what it cost, then.
    """

    def __init__(self, url: str, response: httpx.Response, fault: Callable[[httpx.TransportError], RequestError]):
        super().__init__()
        self._url, self._response, self._fault = url, response, fault
        self._deltas = self._read()

    def __iter__(self) -> Iterator[Delta]:
        return self._deltas

    def __next__(self) -> Delta:
        return next(self._deltas)

    def _read(self) -> Iterator[Delta]:
        try:
            with contextlib.closing(self._response):
                for line in self._response.iter_lines():
                    if line and (delta := self.read(json.loads(line))) is not None:
                        yield delta
        except httpx.TransportError as error:
            raise self._fault(error) from None
        if self.finish_reason is None:
            raise broken_off(self._url, "there was no last line")

    def result(self) -> Result:
        """All that was not taken yet, joined."""
        deltas = list(self)
        return Result.of(deltas, self.finish_reason or "", self.usage)

    def close(self) -> None:
        self._response.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Live:
    """A live request: :meth:`push` what it shall hear, iterate it for what it says. One thread may push while another
    iterates, but not with ``max_in_flight``, which makes pushing read. Closing it (the end of a ``with``)
    cancels what still runs.

    :ivar finish_reason: why it ended, once it has. :ivar usage: what it cost, then.
    """

    def __init__(self, client: Client, talk: Conversation, opening: bytes, max_in_flight: int | None):
        self._url, self._talk, self._most = client.url, talk, max_in_flight
        self._inbox: deque[Heard] = deque()
        self._stack = contextlib.ExitStack()
        try:
            self._socket = self._stack.enter_context(connect(client._socket_url, **client._socket_options))
        except InvalidStatus as error:
            response = error.response
            raise error_of(response.status_code, response.headers, bytes(response.body or b"")) from None
        except (OSError, WebSocketException) as error:
            raise unreachable(client.url, error) from None
        self._send(opening)

    @property
    def finish_reason(self) -> str | None:
        return self._talk.finish_reason

    @property
    def usage(self) -> Usage:
        return self._talk.usage

    def push(self, stream: str | Observation, items: Items = None) -> int:
        """Send *items* of *stream*, or an observation (stream → items): arrays ``[n, *item shape]`` or texts.

        Returns its number: 0, 1, 2…, which :attr:`Heard.seq` refers to. With ``max_in_flight`` it may wait for answers,
        which are kept for whoever iterates.
        """
        while self._most is not None and self._talk.in_flight >= self._most and not self._talk.ended:
            if (heard := self._receive()) is not None:
                self._inbox.append(heard)
        frame, seq = self._talk.append(self._talk.observation(stream, items))
        self._send(frame)
        return seq

    def end(self, stream: str | None = None) -> None:
        """Nothing more will come on *stream*, or on any."""
        self._send(self._talk.end(stream))

    def act(self, observation: Items | Observation) -> np.ndarray[Any, Any]:
        """Push *observation* (of the only live stream, or stream → items) and wait for its actions. What answers to
        older observations is dropped."""
        seq = self.push(self._talk.alone(observation))
        for heard in self:
            if isinstance(heard.delta, ArrayDelta) and heard.seq is not None and heard.seq >= seq:
                return np.asarray(heard.delta.data)
        return only(None, "actions")

    def __iter__(self) -> Iterator[Heard]:
        return self

    def __next__(self) -> Heard:
        if self._inbox:
            return self._inbox.popleft()
        heard = None if self._talk.ended else self._receive()
        if heard is None:
            raise StopIteration
        return heard

    def result(self) -> Result:
        """All that was not taken yet, up to the end, joined. End the input first."""
        deltas = [heard.delta for heard in self]
        return Result.of(deltas, self.finish_reason or "", self.usage)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, frame: bytes) -> None:
        try:
            self._socket.send(frame)
        except ConnectionClosed as error:
            raise broken_off(self._url, str(error)) from None

    def _receive(self) -> Heard | None:
        """The next delta; ``None`` at the end."""
        while not self._talk.ended:
            try:
                frame = self._socket.recv()
            except ConnectionClosed as error:
                raise broken_off(self._url, str(error)) from None
            if (heard := self._talk.receive(frame)) is not None:
                return heard
        return None

"""One client's socket: many requests in flight, one writer, everything cancelled when it closes.

The reader hands each message to its request's own task, so that no request waits for another; what they answer goes
through one bounded queue to the one writer. A client that reads slowly slows its own requests down, nobody else's.
The reader itself never waits for a model: while it did, pings of the client would not be answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from mstar.spec.errors import RequestError
from mstar.spec.tasks import GenerateTask
from mstar_server.answers import cancel, start
from mstar_server.errors import as_request_error, error_event
from mstar_server.exchange import Exchange, current
from mstar_server.native.frames import JSON, MSGPACK, Kind
from mstar_server.native.request import as_sent, make_task, with_files
from mstar_server.native.response import done_object
from mstar_server.native.socket_messages import Follow, Opening, parse_follow, parse_opening
from mstar_server.protocols import Answer
from mstar_server.sockets import send
from mstar_server.state import ServerState

__all__ = ["Socket"]

QUEUED_EVENTS = 64

QUICK_BYTES = 64 * 1024
"""Messages up to this size are read at once; larger ones in a thread, so that other clients need not wait."""


class _Running:
    """A request of this socket: its task, and what the client has sent for it that was not passed on yet.

    :param kind: of its opening message, and so of its events.
    """

    def __init__(self, kind: Kind, inbox_size: int):
        self.kind = kind
        self.inbox: asyncio.Queue[Follow] = asyncio.Queue(inbox_size)
        self.task: asyncio.Task[None] | None = None
        self.overflow = False
        self._appends = 0  # messages with appends, passed on so far
        self._sent: dict[str, deque[tuple[range, int]]] = {}  # stream → (its items, number of the message)

    def number(self) -> int:
        """The number of the next message with appends: 0, 1, 2…"""
        self._appends += 1
        return self._appends - 1

    def sent(self, stream: str, items: range, number: int) -> None:
        """Message *number* brought *items* of *stream*."""
        if items:
            self._sent.setdefault(stream, deque()).append((items, number))

    def newest(self, heard: Mapping[str, int]) -> int | None:
        """The newest message of which something was in the first *heard* items of its streams."""
        newest = None
        for stream, items in heard.items():
            sent = self._sent.get(stream, deque())
            while sent and sent[0][0].stop < items:
                sent.popleft()
            if sent and sent[0][0].start < items:
                newest = max(sent[0][1], -1 if newest is None else newest)
        return newest


class Socket:
    """Serves one accepted websocket until it closes."""

    def __init__(self, websocket: WebSocket, state: ServerState):
        self.websocket, self.state, self.options = websocket, state, state.options
        self._running: dict[str, _Running] = {}
        self._outbox: asyncio.Queue[tuple[Kind, dict[str, Any]]] = asyncio.Queue(QUEUED_EVENTS)
        self._closed = False

    async def run(self) -> None:
        writer = asyncio.create_task(self._write())
        reader = asyncio.create_task(self._read())
        try:
            await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._closed = True
            tasks = [writer, reader, *(r.task for r in self._running.values() if r.task is not None)]
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results[:2]:
            if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
                raise result

    async def _write(self) -> None:
        while True:
            kind, event = await self._outbox.get()
            frame = kind.encode(event)
            await send(self.websocket, frame.decode() if kind is JSON else frame)

    async def _read(self) -> None:
        while True:
            message = await self.websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            kind, payload = (MSGPACK, message["bytes"]) if text is None else (JSON, text)
            try:
                await self._on_frame(kind, payload)
            except RequestError as error:
                await self._say_error(kind, error, None)

    async def _on_frame(self, kind: Kind, payload: str | bytes) -> None:
        limit = self.options.max_socket_message_bytes
        if len(payload) > limit or (isinstance(payload, str) and len(payload.encode()) > limit):
            reason = f"the message is larger than the limit of {limit} bytes"
            raise RequestError(reason, code="too_large", status=413)
        large = len(payload) > QUICK_BYTES
        message = await asyncio.to_thread(kind.message, payload) if large else kind.message(payload)
        request_id = message.get("id")
        running = None if request_id is None else self._running.get(request_id)
        try:
            if running is not None:
                follow = await asyncio.to_thread(parse_follow, message) if large else parse_follow(message)
                self._follow(running, follow)
            elif not message.keys() <= {"id", "append", "end_input", "cancel"} or request_id is None:
                self._check_room()
                if large:
                    opening = await asyncio.to_thread(parse_opening, message, self.options)
                else:
                    opening = parse_opening(message, self.options)
                self._open(kind, request_id or f"gen-{uuid.uuid4().hex}", opening)
                await asyncio.sleep(0)  # a task that is cancelled before it began would never say so
            else:
                raise RequestError(
                    f"no request {request_id!r} is in flight", param="id", code="unknown_request", status=404
                )
        except RequestError as error:
            await self._say_error(kind, error, request_id)

    def _check_room(self) -> None:
        if len(self._running) >= self.options.max_socket_requests:
            text = f"{len(self._running)} requests are in flight on this socket, the limit"
            raise RequestError(text, code="too_many_requests", status=429, type="rate_limit_error")

    def _open(self, kind: Kind, request_id: str, opening: Opening) -> None:
        running = self._running[request_id] = _Running(kind, self.options.max_socket_appends)
        running.task = asyncio.create_task(self._serve_in_exchange(request_id, running, opening))

    def _follow(self, running: _Running, follow: Follow) -> None:
        assert running.task is not None
        if follow.cancel:
            running.task.cancel()
        elif running.inbox.full():
            # dropping input would corrupt the stream silently: the request fails instead
            running.overflow = True
            running.task.cancel()
        else:
            running.inbox.put_nowait(follow)

    async def _serve_in_exchange(self, request_id: str, running: _Running, opening: Opening) -> None:
        """Each request of the socket counts, takes its time and can be cancelled by itself."""
        outer: Exchange | None = current()
        with outer.child() if outer is not None else contextlib.nullcontext():
            await self._serve(request_id, running, opening)

    async def _serve(self, request_id: str, running: _Running, opening: Opening) -> None:
        answers: list[Answer] = []
        feeder: asyncio.Task[None] | None = None
        try:
            service = self.state.ready(opening.native.model, "generate")
            task: GenerateTask = make_task(opening.native, service.spec, opening.live)
            sampling = await self.state.sampling(service)
            task = await with_files(task, opening.native, service.spec, self.state.media, sampling)
            # the engine's ids are unique in the server, the client's only on its socket
            with as_sent(service.spec.knobs):
                answers += await start(service, [task], f"gen-{uuid.uuid4().hex}")
                feeder = asyncio.create_task(self._feed(answers[0], opening, running))
                await self._relay(request_id, running, answers[0], feeder)
        except asyncio.CancelledError:
            cancel(answers)
            await self._say_cancelled(request_id, running, answers)
        except Exception as error:
            await self._say_error(running.kind, as_request_error(error), request_id)
        finally:
            cancel(answers)
            del self._running[request_id]
            if feeder is not None:
                feeder.cancel()
                await asyncio.wait([feeder])  # its error, if any, was the answer's or has been told
                if not feeder.cancelled():
                    feeder.exception()

    async def _relay(self, request_id: str, running: _Running, answer: Answer, feeder: asyncio.Task[None]) -> None:
        """Pass the answer on until it ends or its feeder fails."""
        kind, counts = running.kind, Counter[str]()
        async for delta in answer:
            if feeder.done() and not feeder.cancelled() and feeder.exception() is not None:
                break
            index = counts[delta.stream]
            counts[delta.stream] += 1
            newest = running.newest(answer.heard)
            event = await asyncio.to_thread(kind.delta, delta, index) if kind.heavy(delta) else kind.delta(delta, index)
            seq = {} if newest is None else {"seq": newest}
            await self._say(kind, {"id": request_id, **event, **seq})
        if feeder.done() and not feeder.cancelled():
            feeder.result()
        await self._say(kind, {"id": request_id, **done_object(answer)})

    async def _feed(self, answer: Answer, opening: Opening, running: _Running) -> None:
        """Pass on what the client sends for the request, in order. A bad append fails the request."""
        try:
            await self._push(answer, opening, running, opening.follow)
            while True:
                await self._push(answer, opening, running, await running.inbox.get())
        except Exception:
            if answer.finish_reason is not None:
                return  # it came too late to matter: the answer is complete
            answer.cancel("cancelled")
            raise

    async def _push(self, answer: Answer, opening: Opening, running: _Running, follow: Follow) -> None:
        number = running.number() if follow.appends else 0
        for append in follow.appends:
            _check_live(append.stream, opening, "append")
            running.sent(append.stream, await answer.push(append.stream, append.data), number)
        if isinstance(follow.end, str):
            _check_live(follow.end, opening, "end_input")
            await answer.push(follow.end, None, end=True)
        elif follow.end:
            for stream in opening.live:
                await answer.push(stream, None, end=True)

    async def _say(self, kind: Kind, event: dict[str, Any]) -> None:
        if not self._closed:  # else nobody empties the queue any more
            await self._outbox.put((kind, event))

    async def _say_error(self, kind: Kind, error: RequestError, request_id: str | None) -> None:
        head = {} if request_id is None else {"id": request_id}
        await self._say(kind, {**head, **error_event(error)})

    async def _say_cancelled(self, request_id: str, running: _Running, answers: list[Answer]) -> None:
        if running.overflow:
            text = f"more than {self.options.max_socket_appends} messages were waiting for the model: send them slower"
            await self._say_error(running.kind, RequestError(text, code="too_many_appends", status=429), request_id)
        elif answers:
            await self._say(running.kind, {"id": request_id, **done_object(answers[0], "cancelled")})
        else:
            cancelled = {"id": request_id, "type": "done", "finish_reason": "cancelled", "usage": None}
            await self._say(running.kind, cancelled)


def _check_live(stream: str, opening: Opening, param: str) -> None:
    if stream not in opening.live:
        names = ", ".join(opening.live) or "none"
        message = f"{stream!r} is not one of the request's live streams ({names})"
        raise RequestError(message, param=f"{param}.{stream}" if param == "append" else param, code="unknown_stream")

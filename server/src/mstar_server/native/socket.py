"""One client's socket: many requests in flight, one writer, everything cancelled when it closes.

The reader hands each message to its request's own task, so that no request waits for another; what they answer goes
through one bounded queue to the one writer. A client that reads slowly slows its own requests down, nobody else's.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from mstar.spec.errors import RequestError
from mstar.spec.tasks import GenerateTask
from mstar_server.answers import cancel
from mstar_server.errors import as_request_error, error_object
from mstar_server.native.request import make_task, with_files
from mstar_server.native.response import delta_object, done_object, is_heavy
from mstar_server.native.socket_messages import Follow, Opening, parse_follow, parse_message, parse_opening
from mstar_server.protocols import Answer
from mstar_server.state import ServerState

__all__ = ["Socket"]

QUEUED_EVENTS = 64


class _Running:
    """A request of this socket: its task, and what the client has sent for it that was not passed on yet."""

    def __init__(self, inbox_size: int):
        self.inbox: asyncio.Queue[Follow] = asyncio.Queue(inbox_size)
        self.task: asyncio.Task[None] | None = None
        self.overflow = False


class Socket:
    """Serves one accepted websocket until it closes."""

    def __init__(self, websocket: WebSocket, state: ServerState):
        self.websocket, self.state, self.options = websocket, state, state.options
        self._running: dict[str, _Running] = {}
        self._outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue(QUEUED_EVENTS)
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
            event = await self._outbox.get()
            await self.websocket.send_text(msgspec.json.encode(event).decode())

    async def _read(self) -> None:
        while True:
            message = await self.websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                await self._on_frame(message)
            except RequestError as error:
                await self._say_error(error, None)

    async def _on_frame(self, frame: Any) -> None:
        text = frame.get("text")
        if text is None:
            raise RequestError("send JSON in text frames, not binary ones", code="unsupported_frame")
        limit = self.options.max_socket_message_bytes
        if len(text) > limit or len(text.encode()) > limit:
            reason = f"the message is larger than the limit of {limit} bytes"
            raise RequestError(reason, code="too_large", status=413)
        message = parse_message(text)
        request_id = message.get("id")
        running = None if request_id is None else self._running.get(request_id)
        try:
            if running is not None:
                self._follow(running, message)
            elif not message.keys() <= {"id", "append", "end_input", "cancel"} or request_id is None:
                self._open(request_id, message)
                await asyncio.sleep(0)  # a task that is cancelled before it began would never say so
            else:
                raise RequestError(
                    f"no request {request_id!r} is in flight", param="id", code="unknown_request", status=404
                )
        except RequestError as error:
            await self._say_error(error, request_id)

    def _open(self, request_id: str | None, message: dict[str, Any]) -> None:
        if len(self._running) >= self.options.max_socket_requests:
            text = f"{len(self._running)} requests are in flight on this socket, the limit"
            raise RequestError(text, code="too_many_requests", status=429, type="rate_limit_error")
        request_id = request_id or f"gen-{uuid.uuid4().hex}"
        opening = parse_opening(message, self.options)
        running = self._running[request_id] = _Running(self.options.max_socket_appends)
        running.task = asyncio.create_task(self._serve(request_id, running, opening))

    def _follow(self, running: _Running, message: dict[str, Any]) -> None:
        follow = parse_follow(message)
        assert running.task is not None
        if follow.cancel:
            running.task.cancel()
        elif running.inbox.full():
            # dropping input would corrupt the stream silently: the request fails instead
            running.overflow = True
            running.task.cancel()
        else:
            running.inbox.put_nowait(follow)

    async def _serve(self, request_id: str, running: _Running, opening: Opening) -> None:
        answers: list[Answer] = []
        feeder: asyncio.Task[None] | None = None
        try:
            service = self.state.ready(opening.native.model, "generate")
            task: GenerateTask = make_task(opening.native, service.spec, opening.live)
            task = await with_files(task, opening.native, service.spec, self.state.media)
            # the engine's ids are unique in the server, the client's only on its socket
            answers.append(await service.generate(task, f"gen-{uuid.uuid4().hex}"))
            feeder = asyncio.create_task(self._feed(answers[0], opening, running))
            await self._relay(request_id, answers[0], feeder)
        except asyncio.CancelledError:
            cancel(answers)
            await self._say_cancelled(request_id, running, answers)
        except Exception as error:
            await self._say_error(as_request_error(error), request_id)
        finally:
            cancel(answers)
            del self._running[request_id]
            if feeder is not None:
                feeder.cancel()
                await asyncio.wait([feeder])  # its error, if any, was the answer's or has been told
                if not feeder.cancelled():
                    feeder.exception()

    async def _relay(self, request_id: str, answer: Answer, feeder: asyncio.Task[None]) -> None:
        """Pass the answer on until it ends or its feeder fails."""
        counts: Counter[str] = Counter()
        async for delta in answer:
            if feeder.done() and not feeder.cancelled() and feeder.exception() is not None:
                break
            index = counts[delta.stream]
            counts[delta.stream] += 1
            if is_heavy(delta):
                event = await asyncio.to_thread(delta_object, delta, index)
            else:
                event = delta_object(delta, index)
            await self._say({"id": request_id, **event})
        if feeder.done() and not feeder.cancelled():
            feeder.result()
        await self._say({"id": request_id, **done_object(answer)})

    async def _feed(self, answer: Answer, opening: Opening, running: _Running) -> None:
        """Pass on what the client sends for the request, in order. A bad append fails the request."""
        try:
            await self._push(answer, opening, opening.follow)
            while True:
                await self._push(answer, opening, await running.inbox.get())
        except Exception:
            if answer.finish_reason is not None:
                return  # it came too late to matter: the answer is complete
            answer.cancel("cancelled")
            raise

    async def _push(self, answer: Answer, opening: Opening, follow: Follow) -> None:
        for append in follow.appends:
            _check_live(append.stream, opening, "append")
            await answer.push(append.stream, append.data)
        if isinstance(follow.end, str):
            _check_live(follow.end, opening, "end_input")
            await answer.push(follow.end, None, end=True)
        elif follow.end:
            for stream in opening.live:
                await answer.push(stream, None, end=True)

    async def _say(self, event: dict[str, Any]) -> None:
        if not self._closed:  # else nobody empties the queue any more
            await self._outbox.put(event)

    async def _say_error(self, error: RequestError, request_id: str | None) -> None:
        head = {} if request_id is None else {"id": request_id}
        await self._say({**head, "type": "error", **error_object(error)})

    async def _say_cancelled(self, request_id: str, running: _Running, answers: list[Answer]) -> None:
        if running.overflow:
            text = f"more than {self.options.max_socket_appends} messages were waiting for the model: send them slower"
            await self._say_error(RequestError(text, code="too_many_appends", status=429), request_id)
        elif answers:
            await self._say({"id": request_id, **done_object(answers[0], "cancelled")})
        else:
            await self._say({"id": request_id, "type": "done", "finish_reason": "cancelled", "usage": None})


def _check_live(stream: str, opening: Opening, param: str) -> None:
    if stream not in opening.live:
        names = ", ".join(opening.live) or "none"
        message = f"{stream!r} is not one of the request's live streams ({names})"
        raise RequestError(message, param=f"{param}.{stream}" if param == "append" else param, code="unknown_stream")

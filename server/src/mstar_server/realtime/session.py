"""One client's session: events in, one writer out, and what runs for it in between.

The reader takes one event after the other; what takes time runs in tasks of its own (at most one response, a few
transcriptions), so that a slow model keeps no event waiting. Everything that is sent goes through one bounded queue to
one writer: a client that reads slowly slows down its own session, nobody else's. When the socket closes, all ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from mstar.spec.errors import RequestError
from mstar_server.errors import as_request_error, error_object
from mstar_server.realtime.audio_buffer import AudioBuffer
from mstar_server.realtime.conversation import Conversation, heard_item, read_item
from mstar_server.realtime.events import error_event, id_of, new_id, parse_event, spelled, text_field
from mstar_server.realtime.model import SessionModel
from mstar_server.realtime.running import Running
from mstar_server.realtime.settings import SessionSettings, session_object, updated
from mstar_server.realtime.turns import TurnDetector
from mstar_server.sockets import close, send
from mstar_server.state import ServerState

__all__ = ["Session"]

QUEUED_EVENTS = 256
_PIECE_S = 0.1
_LARGE_CHARS = 1 << 18

Handler = Callable[[dict[str, Any]], Awaitable[None]]


class _Close:
    """For the writer: close the socket with this code and reason."""

    def __init__(self, code: int, reason: str):
        self.code, self.reason = code, reason


class Session:
    """Serves one accepted websocket until it closes.

    :param beta: the client speaks the beta's protocol. :param transcription: it asked for a transcription session.
    """

    def __init__(self, websocket: WebSocket, state: ServerState, model: str | None, *, beta: bool, transcription: bool):
        self.websocket, self.state, self.options, self.beta = websocket, state, state.options, beta
        self.id, self._wanted = new_id("sess"), model
        self.settings = SessionSettings(kind="transcription" if transcription else "realtime")
        self.buffer = AudioBuffer(self.options.max_realtime_audio_s)
        self.conversation = Conversation(self.options.max_realtime_items, self.options.max_realtime_audio_s)
        self._outbox: asyncio.Queue[dict[str, Any] | _Close] = asyncio.Queue(QUEUED_EVENTS)
        self._closed = False
        self._detector: TurnDetector | None = None
        self._detector_at = 0  # where in the session's audio the detector began
        self._turn: str | None = None  # the item that the speech that goes on will be
        self._last_turn: str | None = None
        self._handlers: dict[str, Handler] = {
            "session.update": self._on_update,
            "transcription_session.update": self._on_update,
            "input_audio_buffer.append": self._on_append,
            "input_audio_buffer.commit": self._on_commit,
            "input_audio_buffer.clear": self._on_clear,
            "output_audio_buffer.clear": self._on_clear_output,
            "conversation.item.create": self._on_create,
            "conversation.item.retrieve": self._on_retrieve,
            "conversation.item.delete": self._on_delete,
            "conversation.item.truncate": self._on_truncate,
            "response.create": self._on_respond,
            "response.cancel": self._on_cancel,
        }

    # --- the socket

    async def run(self) -> None:
        try:
            model = SessionModel(self.state, self._wanted, self.settings.kind)
        except RequestError as error:
            await self._refuse(error)
            return
        self.model = model
        self.running = Running(self.state, model, self.conversation, self.say)
        self.settings = model.defaults(self.settings)
        self._watch_turns()
        writer = asyncio.create_task(self._write())
        reader = asyncio.create_task(self._read())
        try:
            await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._closed = True
            for task in (writer, reader):
                task.cancel()
            results = await asyncio.gather(writer, reader, return_exceptions=True)
            await self.running.close()
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
                raise result

    async def _refuse(self, error: RequestError) -> None:
        event = spelled(error_event(error_object(error)["error"], None), self.beta)
        with contextlib.suppress(WebSocketDisconnect):
            await send(self.websocket, msgspec.json.encode(event).decode())
            await close(self.websocket, 1008, error.message)

    async def say(self, event: dict[str, Any]) -> None:
        told = spelled(event, self.beta)
        if told is not None and not self._closed:  # else nobody empties the queue any more
            await self._outbox.put(told)

    async def _write(self) -> None:
        while True:
            event = await self._outbox.get()
            if isinstance(event, _Close):
                await close(self.websocket, event.code, event.reason)
                return
            await send(self.websocket, msgspec.json.encode(event).decode())

    async def _read(self) -> None:
        await self._tell_session("created")
        while True:
            try:
                async with asyncio.timeout(self.options.realtime_idle_s):
                    frame = await self.websocket.receive()
            except TimeoutError:
                if self.running.busy:
                    continue
                reason = f"nothing was sent for {self.options.realtime_idle_s:g} seconds"
                await self._say_error(RequestError(reason, code="session_expired"), None)
                await self._outbox.put(_Close(1000, reason))
                await asyncio.Event().wait()  # the writer ends the session
            if frame["type"] == "websocket.disconnect":
                return
            await self._on_frame(frame)

    async def _on_frame(self, frame: Any) -> None:
        text = frame.get("text")
        event_id = None
        try:
            if text is None:
                raise RequestError("send JSON in text frames, not binary ones", code="unsupported_frame")
            limit = self.options.max_socket_message_bytes
            if len(text) > limit or len(text.encode()) > limit:
                reason = f"the message is larger than the limit of {limit} bytes"
                raise RequestError(reason, code="too_large", status=413)
            event_id = id_of(text) if len(text) < _LARGE_CHARS else None
            event = parse_event(text)
            event_id = event.get("event_id") if isinstance(event.get("event_id"), str) else None
            await self._handlers[event["type"]](event)
        except Exception as error:
            await self._say_error(as_request_error(error), event_id)

    async def _say_error(self, error: RequestError, event_id: str | None) -> None:
        await self.say(error_event(error_object(error)["error"], event_id))

    # --- the session

    async def _tell_session(self, what: str) -> None:
        kind = self.settings.kind
        prefix = "transcription_session" if self.beta and kind == "transcription" else "session"
        shown = session_object(self.settings, self.id, self.model.name, self.beta)
        await self.say({"type": f"{prefix}.{what}", "session": shown})

    async def _on_update(self, event: dict[str, Any]) -> None:
        session = event.get("session")
        if event["type"] == "transcription_session.update" and isinstance(session, dict):
            session = {"type": "transcription", **session}
        new = updated(self.settings, session)
        if new.input_format != self.settings.input_format and len(self.buffer):
            raise RequestError("the input's format cannot change while the buffer has audio: commit or clear it")
        if new.kind != self.settings.kind and self.running.busy:
            raise RequestError("'session.type' cannot change while something runs", param="session.type")
        asked = session.get("model") if isinstance(session, dict) else None
        changed = self.model.changed(self.settings, new, asked)
        await self.model.check_included(changed)
        if changed.transcription != self.settings.transcription:
            await self.model.check_wish(changed)
        self.settings = changed
        self._watch_turns()
        await self._tell_session("updated")

    def _watch_turns(self) -> None:
        turns, rate = self.settings.turns, self.settings.input_format.rate
        if turns is None:
            self._detector = None
        elif self._detector is None or self._detector.rate != rate or self._detector.settings != turns:
            self._detector = TurnDetector(turns, rate)
            self._detector_at = self.buffer.begins_at + len(self.buffer)

    # --- audio

    async def _on_append(self, event: dict[str, Any]) -> None:
        if self.settings.kind == "realtime":
            self.model.check_hears(self.settings)  # a transcription's model may yet be named before the turn ends
        text, kind = text_field(event, "audio"), self.settings.input_format
        if len(text) < _LARGE_CHARS:
            samples = self.buffer.read(text, kind)
        else:
            samples = await asyncio.to_thread(self.buffer.read, text, kind)
        if self._detector is None:
            self.buffer.append(samples)
            if len(samples):
                await self._hear(samples)
            return
        size = int(kind.rate * _PIECE_S)
        for start in range(0, len(samples), size):
            await self._watch(self._detector, samples[start : start + size])

    async def _watch(self, detector: TurnDetector, samples: np.ndarray) -> None:
        """A piece of audio where turns are found by its loudness."""
        rate, padding = detector.rate, detector.settings.prefix_padding_ms * detector.rate // 1000
        self.buffer.append(samples)
        if self._turn is not None and detector.speaking:
            await self._hear(samples)
        for what, position in detector.feed(samples):
            at = position + self._detector_at
            if what == "started":
                start = max(at - padding, self.buffer.begins_at)
                self.buffer.keep(self.buffer.begins_at + len(self.buffer) - start)
                self._turn = new_id("item")
                head = {"audio_start_ms": start * 1000 // rate, "item_id": self._turn}
                await self.say({"type": "input_audio_buffer.speech_started", **head})
                if detector.settings.interrupt_response:
                    await self.running.interrupt("turn_detected")
                await self._hear(samples)
            elif self._turn is not None:
                head = {"audio_end_ms": at * 1000 // rate, "item_id": self._turn}
                await self.say({"type": "input_audio_buffer.speech_stopped", **head})
                await self._commit(detector.settings.create_response)
        if self._turn is None:
            self.buffer.keep(padding + rate // 2)  # what a turn that is just beginning may need

    async def _hear(self, samples: np.ndarray) -> None:
        """Audio of a turn that goes on, the buffer's newest, for a model that hears live."""
        if self.model.listener(self.settings) is not None:
            self._turn = self._turn or new_id("item")
            if not self.running.listening:  # what came before the session had its model counts as well
                samples = self.buffer.peek()
            await self.running.hear(samples, self.settings, self._turn)

    async def _on_commit(self, event: dict[str, Any]) -> None:
        if not len(self.buffer):
            raise RequestError("the input audio buffer is empty", code="input_audio_buffer_commit_empty")
        if self._detector is not None:
            self._detector.reset()
        await self._commit(create_response=False)

    async def _commit(self, create_response: bool) -> None:
        self.model.check_hears(self.settings)
        settings, samples = self.settings, self.buffer.take()
        item = heard_item(samples, settings.input_format.rate, self._turn or new_id("item"))
        self._turn = None
        if settings.kind == "realtime":
            before = self.conversation.add(item)
        else:  # nobody will answer it: it is not kept
            before, self._last_turn = self._last_turn, item.id
        await self.say({"type": "input_audio_buffer.committed", "previous_item_id": before, "item_id": item.id})
        for word in ("added", "done"):
            told = {"type": f"conversation.item.{word}", "previous_item_id": before, "item": item.object()}
            await self.say(told)
        await self.running.heard(item, settings)
        if create_response and settings.kind == "realtime" and self.model.listener(settings) is None:
            await self.running.respond(settings, {})

    async def _on_clear(self, event: dict[str, Any]) -> None:
        self.buffer.take()
        self._turn = None
        if self._detector is not None:
            self._detector.reset()
        await self.running.drop_live()
        await self.say({"type": "input_audio_buffer.cleared"})

    async def _on_clear_output(self, event: dict[str, Any]) -> None:
        message = "audio leaves as it is made: there is no output buffer here; cancel the response"
        raise RequestError(message, param="type", code="unsupported_event")

    # --- items

    async def _on_create(self, event: dict[str, Any]) -> None:
        self._check_conversation()
        item = read_item(event.get("item"), self.settings.input_format)
        after = event.get("previous_item_id")
        if after is not None and not isinstance(after, str):
            raise RequestError("'previous_item_id' must be a string", param="previous_item_id")
        if any(content.audio is not None for content in item.content):
            self.model.check_hears(self.settings)
        before = self.conversation.add(item, after)
        for word in ("added", "done"):
            told = {"type": f"conversation.item.{word}", "previous_item_id": before, "item": item.object()}
            await self.say(told)
        if any(content.audio is not None and not content.text for content in item.content):
            await self.running.heard(item, self.settings)

    async def _on_retrieve(self, event: dict[str, Any]) -> None:
        item = self.conversation.find(text_field(event, "item_id"))
        await self.say({"type": "conversation.item.retrieved", "item": item.object()})

    async def _on_delete(self, event: dict[str, Any]) -> None:
        item_id = text_field(event, "item_id")
        self.conversation.remove(item_id)
        await self.say({"type": "conversation.item.deleted", "item_id": item_id})

    async def _on_truncate(self, event: dict[str, Any]) -> None:
        """What a client did not hear of an answer is to be forgotten. How far its words got nobody knows."""
        item = self.conversation.find(text_field(event, "item_id"))
        end = event.get("audio_end_ms")
        if item.role != "assistant" or item.type != "message":
            raise RequestError("only an assistant's message can be truncated", param="item_id")
        if event.get("content_index") != 0:
            raise RequestError("'content_index' must be 0", param="content_index")
        if isinstance(end, bool) or not isinstance(end, int) or end < 0:
            raise RequestError("'audio_end_ms' must be a whole number from 0", param="audio_end_ms")
        item.content[0].text = ""
        head = {"item_id": item.id, "content_index": 0, "audio_end_ms": end}
        await self.say({"type": "conversation.item.truncated", **head})

    def _check_conversation(self) -> None:
        if self.settings.kind == "transcription":
            raise RequestError("a transcription session has no conversation", param="type", code="unsupported_event")

    # --- responses

    async def _on_respond(self, event: dict[str, Any]) -> None:
        self._check_conversation()
        response = event.get("response")
        if response is not None and not isinstance(response, dict):
            raise RequestError("'response' must be an object", param="response")
        await self.running.respond(self.settings, response or {})

    async def _on_cancel(self, event: dict[str, Any]) -> None:
        wanted = event.get("response_id")
        if not await self.running.interrupt("client_cancelled", wanted):
            raise RequestError("no response is in progress", code="response_cancel_not_active")

"""What runs for a session: at most one response, a few transcriptions, and a turn that is heard live."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mstar.spec.errors import RequestError
from mstar.spec.knobs import Knobs, validate_knobs
from mstar.spec.tasks import ChatTask, Task, TranscriptionTask
from mstar_server.answers import cancel, start
from mstar_server.errors import as_request_error, error_object
from mstar_server.exchange import current
from mstar_server.openai.text_answers import token_bytes_of
from mstar_server.openai.transcription_response import Spell
from mstar_server.protocols import Answer, Service
from mstar_server.realtime.audio_buffer import LiveAudio
from mstar_server.realtime.conversation import Content, Conversation, Item, read_item
from mstar_server.realtime.events import new_id
from mstar_server.realtime.hearing import listen, write_down
from mstar_server.realtime.model import STREAM, SessionModel
from mstar_server.realtime.replies import Reply, Say
from mstar_server.realtime.settings import SessionSettings, Transcribing, updated
from mstar_server.state import ServerState

__all__ = ["Running"]

MOST_TRANSCRIPTIONS = 8
"""Turns that are being written down; with more the session's reader waits."""


Ask = Callable[[], Awaitable[list[Answer]]]
"""Starts the request whose answer is told."""


def _opened() -> asyncio.Future[Answer]:
    return asyncio.get_running_loop().create_future()


def _apart() -> AbstractContextManager[Any]:
    """Each response and each transcription counts, takes its time and can be cancelled by itself."""
    outer = current()
    return nullcontext() if outer is None else outer.child()


class _Live:
    """A turn that is heard while it is said: the item *item_id*."""

    def __init__(self, answer: Answer, audio: LiveAudio, item_id: str):
        self.answer, self.audio, self.item_id = answer, audio, item_id

    async def push(self, samples: np.ndarray, end: bool = False) -> None:
        if self.answer.finish_reason is None:
            part = self.audio.feed(samples, end)
            if end or part is not None:
                await self.answer.push(STREAM, part, end=end)


class Running:
    """Starts what a session needs and ends it. All events go through *say*."""

    def __init__(self, state: ServerState, model: SessionModel, conversation: Conversation, say: Say):
        self.state, self.model, self.conversation, self.say = state, model, conversation, say
        self._conversation_id = new_id("conv")
        self._reply: Reply | None = None
        self._reply_task: asyncio.Task[None] | None = None
        self._why = ""  # the response is being cancelled
        self._live: _Live | None = None
        self._writing: dict[str, asyncio.Task[None]] = {}

    @property
    def busy(self) -> bool:
        """Whether anything runs that ends by itself. What hears a turn live does not: it waits for the client."""
        if self._live is None:
            return self._replying or bool(self._writing)
        return bool(self._writing.keys() - {self._live.item_id})

    @property
    def listening(self) -> bool:
        """Whether a turn is being heard live."""
        return self._live is not None

    @property
    def _replying(self) -> bool:
        return self._reply_task is not None and not self._reply_task.done()

    async def close(self) -> None:
        """End everything, and wait for it."""
        tasks = [*self._writing.values(), *([self._reply_task] if self._reply_task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.drop_live()

    # --- what is heard

    async def hear(self, samples: np.ndarray, settings: SessionSettings, item_id: str) -> None:
        """*samples* of the turn *item_id*, for a model that hears live. The first ones open its request."""
        if self._live is None:
            await self._open_live(settings, item_id)
        if self._live is not None:
            await self._live.push(samples)

    async def _open_live(self, settings: SessionSettings, item_id: str) -> None:
        service = self.model.listener(settings)
        if service is None:
            return
        rate = next((feed.rate for feed in service.spec.live if feed.modality == "audio"), None)
        audio = LiveAudio(settings.input_format.rate, rate)
        if settings.kind == "transcription":
            wish = settings.transcription or Transcribing()
            task: Task = TranscriptionTask(
                knobs=validate_knobs(service.spec.knobs, {}), want=("text",), live=(STREAM,), audio=None,
                language=wish.language, prompt=wish.prompt, logprobs=0 if settings.logprobs else None,
            )  # fmt: skip
            spell = token_bytes_of(await self.state.processor(service)) if settings.logprobs else None
            item, opened = Item("message", item_id, "user", [Content("input_audio")]), _opened()
            self._write(item, self._listen(service, task, item, audio, opened, spell))
            self._live = _Live(await opened, audio, item_id)
            return
        await self.interrupt("turn_detected")
        task = self._chat(settings, self.conversation, service, (STREAM,))
        opened = _opened()
        reply = Reply(settings, self.say, self.conversation, None, self._conversation_id)
        await self._begin(reply, lambda: start(service, [task], new_id("rt")), opened)
        self._live = _Live(await opened, audio, item_id)

    async def _listen(
        self,
        service: Service,
        task: Task,
        item: Item,
        audio: LiveAudio,
        opened: asyncio.Future[Answer],
        spell: Spell | None,
    ) -> None:
        answers: list[Answer] = []
        try:
            answers += await start(service, [task], new_id("trsc"))
        except Exception as error:
            opened.set_exception(error)
            return
        opened.set_result(answers[0])
        try:
            await listen(answers[0], item, audio, self.say, spell)
        finally:
            cancel(answers)

    async def heard(self, item: Item, settings: SessionSettings) -> None:
        """*item*, a turn of the client's, is complete: end what hears it live, or have it written down."""
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(RequestError):  # it ended meanwhile: its own task tells how
                await live.push(np.zeros(0, np.float32), end=True)
        if live is not None and settings.kind == "transcription":
            return
        writer = self.model.writer(settings)
        if writer is None:
            return
        while len(self._writing) >= MOST_TRANSCRIPTIONS:
            await asyncio.wait(self._writing.values(), return_when=asyncio.FIRST_COMPLETED)
        wish = settings.transcription or Transcribing()
        self._write(item, write_down(self.state, writer, wish, item, self.say, settings.logprobs))

    def _write(self, item: Item, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                with _apart():
                    await work
            finally:
                del self._writing[item.id]
                if not self.model.hears:  # the words are enough from now on
                    for content in item.content:
                        content.audio = None

        self._writing[item.id] = asyncio.create_task(guarded())

    async def drop_live(self) -> None:
        """The turn that is heard live counts for nothing: nothing more is told of it."""
        live, self._live = self._live, None
        if live is None:
            return
        cancel([live.answer])
        if (writing := self._writing.get(live.item_id)) is not None:
            writing.cancel()

    # --- responses

    async def respond(self, settings: SessionSettings, wish: dict[str, Any]) -> None:
        """Start a response. *wish*: what ``response.create`` says of it. Raises :class:`RequestError`."""
        service = self._service()
        if "chat" not in service.spec.abilities:
            message = f"the model {service.spec.key!r} answers while it hears: send it audio"
            raise RequestError(message, param="type", code="unsupported_event")
        if self._replying:
            message = "a response is in progress: wait for its response.done, or cancel it"
            raise RequestError(message, code="conversation_already_has_active_response")
        wish = dict(wish)
        joins, given, metadata = wish.pop("conversation", None), wish.pop("input", None), wish.pop("metadata", None)
        if joins not in (None, "auto", "none"):
            raise RequestError("'response.conversation' must be 'auto' or 'none'", param="response.conversation")
        settings = self.model.changed(settings, updated(settings, wish, "response"), None)
        shown = self.conversation if given is None else self._given(given, settings)
        reply = Reply(
            settings, self.say, None if joins == "none" else self.conversation, metadata, self._conversation_id
        )
        # what is validated later, by the processor, fails the response
        self._chat(settings, shown, service)
        await self._begin(reply, lambda: self._asked(settings, shown))

    def _given(self, value: Any, settings: SessionSettings) -> Conversation:
        """The items that a response is to see instead of the conversation."""
        if not isinstance(value, list):
            raise RequestError("'response.input' must be a list of items", param="response.input")
        found = Conversation(self.conversation.most, self.conversation.longest_s)
        for entry in value:
            if isinstance(entry, dict) and entry.get("type") == "item_reference":
                found.add(self.conversation.find(str(entry.get("id"))))
            else:
                found.add(read_item(entry, settings.input_format))
        return found

    async def _begin(self, reply: Reply, ask: Ask, opened: asyncio.Future[Answer] | None = None) -> None:
        """Tell *reply*. :param opened: gets the answer as soon as it runs, or why it does not."""
        self._reply, self._why = reply, ""
        self._reply_task = asyncio.create_task(self._tell_apart(reply, ask, opened))
        await asyncio.sleep(0)  # a task that is cancelled before it began would never say so

    async def _tell_apart(self, reply: Reply, ask: Ask, opened: asyncio.Future[Answer] | None) -> None:
        with _apart():
            try:
                await self._tell(reply, ask, opened)
            finally:
                if opened is not None and not opened.done():
                    opened.set_exception(RequestError("the response has ended", code="request_ended", status=409))

    async def _tell(self, reply: Reply, ask: Ask, opened: asyncio.Future[Answer] | None) -> None:
        """From ``response.created`` to ``response.done``."""
        found: list[Answer] = []
        status: str = "completed"
        details: dict[str, Any] | None = None
        try:
            await reply.begin()
            found += await ask()
            (answer,) = found
            if opened is not None:
                opened.set_result(answer)
            await reply.follow(answer)
            if answer.finish_reason == "length":
                status, details = "incomplete", {"reason": "max_output_tokens"}
        except asyncio.CancelledError:
            cancel(found)
            status, details = "cancelled", {"reason": self._why or "client_cancelled"}
        except Exception as error:
            status, details = "failed", {"error": error_object(as_request_error(error))["error"]}
        finally:
            cancel(found)
        await reply.end(status, details, found[0] if found else None)

    async def _asked(self, settings: SessionSettings, shown: Conversation) -> list[Answer]:
        if not self.model.hears and self._writing:  # the turn's words are what the model is shown
            await asyncio.wait(self._writing.values())
        service = self._service()
        return await start(service, [self._chat(settings, shown, service)], new_id("rt"))

    def _chat(
        self, settings: SessionSettings, shown: Conversation, service: Service, live: tuple[str, ...] = ()
    ) -> ChatTask:
        speaks = "audio" in settings.modalities
        return ChatTask(
            knobs=self._knobs(settings, service.spec.knobs),
            messages=shown.messages(settings.instructions, self.model.hears),
            tools=settings.tools,
            tool_choice=settings.tool_choice,
            want=tuple(name for name in ("text", "audio") if name == "text" or speaks),
            live=live,
        )

    def _knobs(self, settings: SessionSettings, knobs: type[Knobs]) -> Knobs:
        wanted = {"temperature": settings.temperature, "max_tokens": settings.max_output_tokens}
        values: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
        if settings.voice is not None and "voice" in knobs.model_fields:
            values["voice"] = settings.voice
        return validate_knobs(knobs, values)

    async def interrupt(self, why: str, response_id: Any = None) -> bool:
        """Cancel the response that runs, if it is the one with *response_id*; whether there was one."""
        reply, task = self._reply, self._reply_task
        if reply is None or task is None or task.done() or (response_id is not None and response_id != reply.id):
            return False
        self._why = why
        task.cancel()
        await asyncio.wait([task])
        return True

    def _service(self) -> Service:
        if self.model.service is None:
            raise RequestError("the session has no model", param="model", code="missing_required_parameter")
        return self.model.service

"""One response of a session: what a model says, as the protocol's events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mstar.spec.processor import AudioDelta, TextDelta, ToolCallDelta
from mstar_server.protocols import Answer
from mstar_server.realtime.audio_buffer import OutgoingAudio
from mstar_server.realtime.conversation import Content, Conversation, Item
from mstar_server.realtime.events import new_id
from mstar_server.realtime.settings import SessionSettings

__all__ = ["Reply", "Say"]

Say = Callable[[dict[str, Any]], Awaitable[None]]


class Reply:
    """Tells a response from ``response.created`` to ``response.done``. Its items join *conversation* as they begin.

    :param say: sends an event. :param conversation: ``None``: the response stays out of it.
    """

    def __init__(
        self,
        settings: SessionSettings,
        say: Say,
        conversation: Conversation | None,
        metadata: Any,
        conversation_id: str,
    ):
        self.id = new_id("resp")
        self.settings, self.say, self.conversation, self.metadata = settings, say, conversation, metadata
        self.conversation_id = None if conversation is None else conversation_id
        self.items: list[Item] = []
        self._audio = OutgoingAudio(settings.output_format)
        self._speaks = "audio" in settings.modalities
        self._index = -1  # of the tool call that is being told

    async def begin(self) -> None:
        await self.say({"type": "response.created", "response": self._object("in_progress", None, None)})

    async def follow(self, answer: Answer) -> None:
        """Tell all that *answer* says."""
        async for delta in answer:
            if isinstance(delta, TextDelta) and delta.text:
                await self._text(delta.text)
            elif isinstance(delta, AudioDelta) and self._speaks:
                await self._sound(self._audio.encode(delta.samples, delta.rate))
            elif isinstance(delta, ToolCallDelta):
                await self._call(delta)
        if self._audio.seconds:
            await self._sound(self._audio.end())

    async def end(self, status: str, details: Mapping[str, Any] | None, answer: Answer | None) -> None:
        """Close what is open and say ``response.done``. :param status: ``completed``, ``incomplete``, ``cancelled``,
        ``failed``. :param details: of a status other than completed."""
        if self.items and self.items[-1].status == "in_progress":
            await self._close("completed" if status == "completed" else "incomplete")
        usage = None if answer is None else self._usage(answer)
        await self.say({"type": "response.done", "response": self._object(status, details, usage)})

    async def _text(self, text: str) -> None:
        item = await self._message()
        item.content[0].text += text
        kind = "output_audio_transcript" if self._speaks else "output_text"
        await self._tell(f"response.{kind}.delta", content_index=0, delta=text)

    async def _sound(self, data: str) -> None:
        if data:
            await self._message()
            await self._tell("response.output_audio.delta", content_index=0, delta=data)

    async def _message(self) -> Item:
        """The message that is being told, begun if need be."""
        if self.items and self.items[-1].type == "message" and self.items[-1].status == "in_progress":
            return self.items[-1]
        content = Content("output_audio" if self._speaks else "output_text")
        item = Item("message", role="assistant", content=[content], status="in_progress")
        await self._open(item)
        await self._tell("response.content_part.added", content_index=0, part=self._part(content))
        return item

    async def _call(self, delta: ToolCallDelta) -> None:
        if delta.index != self._index or self.items[-1].type != "function_call":
            self._index = delta.index
            await self._open(Item("function_call", status="in_progress", call_id=new_id("call"), name=delta.name))
        if delta.arguments:
            item = self.items[-1]
            item.arguments += delta.arguments
            kind = "response.function_call_arguments.delta"
            await self._tell(kind, call_id=item.call_id, delta=delta.arguments)

    async def _open(self, item: Item) -> None:
        if self.items and self.items[-1].status == "in_progress":
            await self._close("completed")
        before = None if self.conversation is None else self.conversation.add(item)
        self.items.append(item)
        await self.say(
            {
                "type": "response.output_item.added",
                "response_id": self.id,
                "output_index": len(self.items) - 1,
                "item": item.object(),
            }
        )
        if self.conversation is not None:
            await self.say({"type": "conversation.item.added", "previous_item_id": before, "item": item.object()})

    async def _close(self, status: str) -> None:
        item = self.items[-1]
        item.status = status
        if item.type == "message":
            content = item.content[0]
            if self._speaks:
                await self._tell("response.output_audio.done", content_index=0)
                await self._tell("response.output_audio_transcript.done", content_index=0, transcript=content.text)
            else:
                await self._tell("response.output_text.done", content_index=0, text=content.text)
            await self._tell("response.content_part.done", content_index=0, part=self._part(content))
        else:
            kind = "response.function_call_arguments.done"
            await self._tell(kind, call_id=item.call_id, name=item.name, arguments=item.arguments)
        head = {"response_id": self.id, "output_index": len(self.items) - 1}
        await self.say({"type": "response.output_item.done", **head, "item": item.object()})
        if self.conversation is not None:
            await self.say({"type": "conversation.item.done", "item": item.object()})

    def _part(self, content: Content) -> dict[str, Any]:
        if self._speaks:
            return {"type": "audio", "transcript": content.text}
        return {"type": "text", "text": content.text}

    async def _tell(self, kind: str, **fields: Any) -> None:
        head = {"response_id": self.id, "item_id": self.items[-1].id, "output_index": len(self.items) - 1}
        await self.say({"type": kind, **head, **fields})

    def _object(self, status: str, details: Mapping[str, Any] | None, usage: Any) -> dict[str, Any]:
        settings = self.settings
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": None if details is None else {"type": status, **details},
            "output": [item.object() for item in self.items],
            "output_modalities": list(settings.modalities),
            "conversation_id": self.conversation_id,
            "max_output_tokens": settings.max_output_tokens or "inf",
            "metadata": self.metadata,
            "usage": usage,
        }

    def _usage(self, answer: Answer) -> dict[str, Any]:
        cached = 0 if answer.usage is None else answer.usage.cached
        return {
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.completion_tokens,
            "input_token_details": {"cached_tokens": cached},
            "output_token_details": {},
            "audio_seconds": round(self._audio.seconds, 3),
        }

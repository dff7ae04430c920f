"""What was said in a session: items, in order, and the messages that a chat model is shown of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mstar.spec.errors import RequestError, nearest
from mstar.spec.tasks import Audio, Message, Part, Text
from mstar_server.media.values import decode_base64
from mstar_server.realtime.audio_buffer import AudioFormat
from mstar_server.realtime.events import new_id

__all__ = ["Content", "Conversation", "Item", "heard_item", "read_item"]

_ROLES = ("user", "assistant", "system")
_TEXTS = ("input_text", "output_text", "text")


@dataclass
class Content:
    """A part of a message. *text*: what it says, for audio its transcript (empty until that is known)."""

    type: str
    text: str = ""
    audio: Audio | None = None

    def object(self) -> dict[str, Any]:
        return {"type": self.type, "transcript" if self.type.endswith("audio") else "text": self.text}

    def part(self, hears: bool) -> Part | None:
        """As a model is shown it that *hears*, or not: then audio is its transcript."""
        if self.audio is not None and hears:
            return self.audio
        return Text(self.text) if self.text else None


@dataclass
class Item:
    """One thing in a conversation, as the protocol has it: a message, a call of a function, or what it gave."""

    type: str
    id: str = field(default_factory=lambda: new_id("item"))
    role: str = ""
    content: list[Content] = field(default_factory=list)
    status: str = "completed"
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str = ""

    def object(self) -> dict[str, Any]:
        head = {"id": self.id, "object": "realtime.item", "type": self.type, "status": self.status}
        if self.type == "message":
            return {**head, "role": self.role, "content": [part.object() for part in self.content]}
        if self.type == "function_call":
            return {**head, "call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return {**head, "call_id": self.call_id, "output": self.output}

    @property
    def seconds(self) -> float:
        return sum(len(c.audio.samples) / c.audio.rate for c in self.content if c.audio is not None)


def read_item(value: Any, kind: AudioFormat) -> Item:
    """An item that a client sends; *kind*: the format of its audio. Raises :class:`RequestError` with the field."""
    if not isinstance(value, dict):
        raise RequestError("'item' must be an object", param="item")
    given = value.get("id")
    if given is not None and not (isinstance(given, str) and 0 < len(given) <= 512):
        raise RequestError("'item.id' must be a string of 1 to 512 characters", param="item.id")
    item = Item(str(value.get("type")), given or new_id("item"))
    if item.type == "message":
        item.role = str(value.get("role"))
        if item.role not in _ROLES:
            message = f"'item.role': {item.role[:80]!r} is unknown{nearest(item.role, _ROLES)}"
            raise RequestError(message, param="item.role")
        content = value.get("content")
        if not isinstance(content, list):
            raise RequestError("'item.content' must be a list of parts", param="item.content")
        item.content = [_read_content(part, f"item.content[{i}]", kind) for i, part in enumerate(content)]
    elif item.type == "function_call":
        item.call_id, item.name, item.arguments = (_text(value, n) for n in ("call_id", "name", "arguments"))
    elif item.type == "function_call_output":
        item.call_id, item.output = _text(value, "call_id"), _text(value, "output")
    else:
        known = nearest(item.type, ("message", "function_call", "function_call_output"))
        raise RequestError(f"'item.type': {item.type[:80]!r} is not supported{known}", param="item.type")
    return item


def _text(value: Mapping[str, Any], name: str) -> str:
    found = value.get(name)
    if not isinstance(found, str):
        raise RequestError(f"'item.{name}' must be a string", param=f"item.{name}")
    return found


def _read_content(part: Any, where: str, kind: AudioFormat) -> Content:
    if not isinstance(part, dict):
        raise RequestError(f"{where!r} must be an object", param=where)
    type_ = part.get("type")
    if type_ in _TEXTS:
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(f"'{where}.text' must be a string", param=f"{where}.text")
        return Content(str(type_), text)
    if type_ == "input_audio":
        audio = part.get("audio")
        if not isinstance(audio, str):
            raise RequestError(f"'{where}.audio' must be base64", param=f"{where}.audio")
        samples = kind.decode(decode_base64(audio, f"{where}.audio"), f"{where}.audio")
        return Content("input_audio", str(part.get("transcript") or ""), Audio(samples, kind.rate))
    if type_ in ("output_audio", "audio"):  # what a model said before, of which its words are known
        return Content("output_audio", str(part.get("transcript") or ""))
    known = nearest(str(type_), (*_TEXTS, "input_audio", "output_audio"))
    raise RequestError(f"'{where}.type': {str(type_)[:80]!r} is not supported{known}", param=f"{where}.type")


class Conversation:
    """Items in order. Bounded: :param most: items, :param longest_s: seconds of the client's audio that are kept."""

    def __init__(self, most: int, longest_s: float):
        self.most, self.longest_s = most, longest_s
        self._items: dict[str, Item] = {}

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    @property
    def last(self) -> str | None:
        return next(reversed(self._items), None)

    def find(self, item_id: str) -> Item:
        item = self._items.get(item_id)
        if item is None:
            raise RequestError(f"there is no item {item_id[:80]!r}", param="item_id", code="item_not_found", status=404)
        return item

    def add(self, item: Item, after: str | None = None) -> str | None:
        """Put *item* behind the item *after* (``root``: at the start; ``None``: at the end). Returns the id of the one
        before it. Raises :class:`RequestError` when the conversation is full."""
        if item.id in self._items:
            raise RequestError(f"an item {item.id[:80]!r} is there already", param="item.id", code="duplicate_id")
        if len(self._items) >= self.most:
            message = f"the conversation has {self.most} items, the limit: delete some"
            raise RequestError(message, param="item", code="conversation_full")
        kept = sum(other.seconds for other in self._items.values())
        if item.seconds and kept + item.seconds > self.longest_s:
            message = f"the conversation's audio is longer than {self.longest_s:g} seconds: delete some of its items"
            raise RequestError(message, param="item", code="conversation_full")
        if after is None or after == self.last:
            before, self._items[item.id] = self.last, item
            return before
        items = list(self._items.values())
        place = 0 if after == "root" else items.index(self.find(after)) + 1
        items.insert(place, item)
        self._items = {item.id: item for item in items}
        return items[place - 1].id if place else None

    def remove(self, item_id: str) -> None:
        del self._items[self.find(item_id).id]

    def messages(self, instructions: str, hears: bool) -> tuple[Message, ...]:
        """For a chat model. Calls join the assistant's message before them, as chats have it."""
        found = [Message("system", (Text(instructions),))] if instructions else []
        for item in self:
            if item.type == "message":
                parts = tuple(part for content in item.content if (part := content.part(hears)) is not None)
                if parts:
                    found.append(Message(item.role, parts))  # type: ignore[arg-type]
            elif item.type == "function_call":
                call = {"id": item.call_id, "type": "function"}
                function = {"function": {"name": item.name, "arguments": item.arguments}}
                if found and found[-1].role == "assistant":
                    last = found.pop()
                    found.append(Message("assistant", last.content, (*last.tool_calls, {**call, **function})))
                else:
                    found.append(Message("assistant", (), ({**call, **function},)))
            else:
                found.append(Message("tool", (Text(item.output),), tool_call_id=item.call_id))
        return tuple(found)


def heard_item(samples: np.ndarray, rate: int, item_id: str) -> Item:
    """The client's turn."""
    return Item("message", item_id, "user", [Content("input_audio", "", Audio(samples, rate))])

"""From an answer's deltas to a response's output items, with the events that tell a client of each step.

One :class:`Items` serves both kinds of answer: a stream sends the events on, a whole answer drops them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

from mstar.spec.processor import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from mstar_server.openai.chat_response import logprob_entries

__all__ = ["Event", "Items"]

Event = dict[str, Any]
"""``type`` and its fields, without ``sequence_number``."""


class Items:
    """The output of one response. :ivar output: its items, the last of which may still grow.

    :param token_bytes: set when the client asked for log-probabilities.
    """

    def __init__(self, token_bytes: Callable[[int], bytes] | None = None):
        self.output: list[dict[str, Any]] = []
        self.reasoning_tokens = 0
        self._token_bytes = token_bytes
        self._open: str | None = None  # the last item's type, while it grows
        self._call = -1

    def add(self, delta: Delta) -> Iterator[Event]:
        if isinstance(delta, TextDelta):
            if delta.text or delta.logprobs:
                yield from self._add_text(delta)
        elif isinstance(delta, ReasoningDelta):
            self.reasoning_tokens += len(delta.tokens)
            if delta.text:
                yield from self._add_reasoning(delta.text)
        elif isinstance(delta, ToolCallDelta):
            yield from self._add_call(delta)

    def end(self, complete: bool) -> Iterator[Event]:
        """No more deltas come. *complete*: the model came to its end by itself."""
        yield from self._close("completed" if complete else "incomplete")

    def _add_text(self, delta: TextDelta) -> Iterator[Event]:
        if self._open != "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._begin("message", "msg", {"role": "assistant", "content": []})
            yield from self._begin_part(part)
        part = self._item["content"][0]
        part["text"] += delta.text
        entries = logprob_entries(delta.logprobs, self._token_bytes) if self._token_bytes is not None else []
        part["logprobs"] += entries
        yield self._event("response.output_text.delta", content_index=0, delta=delta.text, logprobs=entries)

    def _add_reasoning(self, text: str) -> Iterator[Event]:
        if self._open != "reasoning":
            yield from self._begin("reasoning", "rs", {"summary": [], "content": []})
            yield from self._begin_part({"type": "reasoning_text", "text": ""})
        self._item["content"][0]["text"] += text
        yield self._event("response.reasoning_text.delta", content_index=0, delta=text)

    def _add_call(self, delta: ToolCallDelta) -> Iterator[Event]:
        if self._open != "function_call" or self._call != delta.index:
            self._call = delta.index
            call = {"call_id": f"call_{uuid.uuid4().hex}", "name": delta.name, "arguments": ""}
            yield from self._begin("function_call", "fc", call)
        if delta.arguments:
            self._item["arguments"] += delta.arguments
            yield self._event("response.function_call_arguments.delta", delta=delta.arguments)

    @property
    def _item(self) -> dict[str, Any]:
        return self.output[-1]

    def _begin(self, kind: str, prefix: str, fields: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self.output.append(item)
        self._open = kind
        # a copy, as the item will change while the event may still wait to be sent
        yield {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": _copy(item)}

    def _begin_part(self, part: dict[str, Any]) -> Iterator[Event]:
        self._item["content"].append(part)
        yield self._event("response.content_part.added", content_index=0, part=dict(part))

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        item, self._open = self._item, None
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        else:
            part = item["content"][0]
            done: dict[str, Any] = {"content_index": 0, "text": part["text"]}
            if item["type"] == "message":
                yield self._event("response.output_text.done", logprobs=part["logprobs"], **done)
            else:
                yield self._event("response.reasoning_text.done", **done)
            yield self._event("response.content_part.done", content_index=0, part=dict(part))
        yield {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": _copy(item)}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self._item["id"], "output_index": len(self.output) - 1, **fields}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)

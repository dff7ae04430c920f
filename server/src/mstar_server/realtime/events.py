"""Events of the protocol: what clients send, read and checked; what they are sent, in the names that they know.

Reference: the realtime types of OpenAI's Python client. Inside, events have the names of the general release; a client
of the beta is sent the older ones, and either may send both.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from mstar.spec.errors import RequestError, nearest

__all__ = ["CLIENT_EVENTS", "error_event", "id_of", "new_id", "parse_event", "spelled", "text_field"]

CLIENT_EVENTS: Mapping[str, tuple[str, ...]] = {
    "session.update": ("session",),
    "transcription_session.update": ("session",),
    "input_audio_buffer.append": ("audio",),
    "input_audio_buffer.commit": (),
    "input_audio_buffer.clear": (),
    "output_audio_buffer.clear": (),
    "conversation.item.create": ("item", "previous_item_id"),
    "conversation.item.retrieve": ("item_id",),
    "conversation.item.delete": ("item_id",),
    "conversation.item.truncate": ("item_id", "content_index", "audio_end_ms"),
    "response.create": ("response",),
    "response.cancel": ("response_id",),
}
"""Type → its fields, beside ``type`` and ``event_id``."""

_BETA_TYPES: Mapping[str, str | None] = {
    "response.output_text.delta": "response.text.delta",
    "response.output_text.done": "response.text.done",
    "response.output_audio.delta": "response.audio.delta",
    "response.output_audio.done": "response.audio.done",
    "response.output_audio_transcript.delta": "response.audio_transcript.delta",
    "response.output_audio_transcript.done": "response.audio_transcript.done",
    "conversation.item.added": "conversation.item.created",
    "conversation.item.done": None,
}
"""Type of the general release → that of the beta; ``None``: it had no such event."""

_BETA_PARTS = {"output_text": "text", "output_audio": "audio"}


def new_id(prefix: str) -> str:
    """An id of ours, as the protocol has them: *prefix* says of what."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def parse_event(text: str) -> dict[str, Any]:
    """The event in a frame: an object with a known type and known fields. Raises :class:`RequestError`."""
    try:
        event = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the message is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(event, dict):
        raise RequestError("the message must be a JSON object", code="invalid_json")
    kind = event.get("type")
    if not isinstance(kind, str):
        raise RequestError("'type' must be a string", param="type", code="missing_required_parameter")
    fields = CLIENT_EVENTS.get(kind)
    if fields is None:
        raise RequestError(
            f"unknown event {kind[:80]!r}{nearest(kind, CLIENT_EVENTS)}", param="type", code="unknown_event"
        )
    for name in event:
        if name not in fields and name not in ("type", "event_id"):
            known = nearest(name, (*fields, "event_id"))
            raise RequestError(f"unknown parameter {name[:80]!r}{known}", param=name, code="unknown_parameter")
    return event


def text_field(event: Mapping[str, Any], name: str) -> str:
    """The text *name* of *event*; a 400 about it if it is missing or no text."""
    value = event.get(name)
    if not isinstance(value, str):
        code = "missing_required_parameter" if value is None else "invalid_value"
        raise RequestError(f"{name!r} must be a string", param=name, code=code)
    return value


def id_of(message: str) -> str | None:
    """The ``event_id`` of a frame, for the error about it; ``None`` where it cannot be read."""
    try:
        event = json.loads(message)
    except (ValueError, RecursionError):
        return None
    found = event.get("event_id") if isinstance(event, dict) else None
    return found if isinstance(found, str) and len(found) <= 512 else None


def error_event(body: Mapping[str, Any], event_id: str | None) -> dict[str, Any]:
    """*body*: the ``error`` of the HTTP routes' error object. :param event_id: of the client's event at fault."""
    return {"type": "error", "error": {**body, "event_id": event_id}}


def spelled(event: dict[str, Any], beta: bool) -> dict[str, Any] | None:
    """*event* in the client's words, with an id of its own; ``None`` if the client's protocol has no such event."""
    event = {"event_id": new_id("event"), **event}
    if not beta:
        return event
    kind = _BETA_TYPES.get(event["type"], event["type"])
    if kind is None:
        return None
    if "part" in event:
        event["part"] = _beta_part(event["part"])
    if "item" in event:
        event["item"] = _beta_item(event["item"])
    if "response" in event:
        event["response"] = _beta_response(event["response"])
    return {**event, "type": kind}


def _beta_part(part: Mapping[str, Any]) -> dict[str, Any]:
    return {**part, "type": _BETA_PARTS.get(part["type"], part["type"])}


def _beta_item(item: Mapping[str, Any]) -> dict[str, Any]:
    if "content" not in item:
        return dict(item)
    return {**item, "content": [_beta_part(part) for part in item["content"]]}


def _beta_response(response: Mapping[str, Any]) -> dict[str, Any]:
    changed = {**response, "output": [_beta_item(item) for item in response["output"]]}
    changed["modalities"] = changed.pop("output_modalities")
    return changed

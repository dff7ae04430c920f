"""Messages of ``/generate/ws`` as frames: JSON as text, msgpack as binary. A request is answered in kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from mstar.spec.errors import RequestError
from mstar.spec.processor import Delta
from mstar_server.native.request import is_name
from mstar_server.native.response import delta_arrays, delta_object, is_heavy

__all__ = ["JSON", "MSGPACK", "Kind"]

_DEEPEST = 64
"""Levels of objects and lists in a message."""


@dataclass(frozen=True)
class Kind:
    """How events of a request are written. *delta*: a delta and its number in the stream → an event. *heavy*: whether
    that is better done in a thread."""

    name: str
    encode: Callable[[Any], bytes]
    delta: Callable[[Delta, int], dict[str, Any]]
    heavy: Callable[[Delta], bool]
    decode: Callable[[Any], Any]

    def message(self, payload: str | bytes) -> dict[str, Any]:
        """The object in a frame. Raises :class:`RequestError` for anything else."""
        try:
            message = self.decode(payload)
            _check_keys(message)
        except (ValueError, TypeError, RecursionError) as error:
            reason = f"the message is not valid {self.name}: {error}"
            raise RequestError(reason, code=f"invalid_{self.name.lower()}") from None
        if not isinstance(message, dict):
            raise RequestError(f"the message must be a {self.name} object", code=f"invalid_{self.name.lower()}")
        if not is_name(message.get("id", "")):
            raise RequestError("'id' must be a string of at most 256 characters", param="id")
        return message


def _check_keys(value: Any, depth: int = 0) -> None:
    """Keys are strings, as JSON's always are; lists of plain numbers are not looked into twice."""
    if depth > _DEEPEST:
        raise ValueError(f"more than {_DEEPEST} levels")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"a key is a {type(key).__name__}, not a string")
            _check_keys(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, dict | list):
                _check_keys(inner, depth + 1)


JSON = Kind("JSON", msgspec.json.encode, delta_object, is_heavy, json.loads)
MSGPACK = Kind("msgpack", msgspec.msgpack.encode, delta_arrays, lambda delta: False, msgspec.msgpack.decode)

"""One live request on ``/generate/ws`` as its client sees it, without a socket: frames to send, frames that came."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mstar.client.answers import Ending, unknown_answer
from mstar.client.asks import FileLike, Knobs, upload
from mstar.spec.errors import RequestError
from mstar.spec.processor import Delta

__all__ = ["Conversation", "Heard", "Items", "Observation"]

Items = Any
"""Items of a live stream: an array ``[n, *item shape]`` (or what numpy makes one of), or a text."""

Observation = Mapping[str, Items]
"""Live stream → its items, sent as one message."""


class Heard(NamedTuple):
    """A delta, and the number of the newest :meth:`push` that it was computed from (``None``: from none)."""

    delta: Delta
    seq: int | None


class Conversation(Ending):
    """:meth:`opening`, :meth:`append` and :meth:`end` make frames to send; :meth:`receive` reads those that come."""

    def __init__(self, live: Sequence[str]):
        super().__init__()
        self.id, self.live = uuid.uuid4().hex, tuple(live)
        self.sent = self.answered = 0

    @property
    def in_flight(self) -> int:
        """Pushes that no answer has come for yet."""
        return self.sent - self.answered

    @property
    def ended(self) -> bool:
        return self.failed or self.finish_reason is not None

    def opening(
        self,
        model: str | None,
        text: str,
        files: Sequence[FileLike],
        want: Sequence[str],
        session: str | None,
        stop: Sequence[str],
        knobs: Knobs,
    ) -> bytes:
        """The first frame."""
        sent = [{"data": f.data, "name": f.name, "media_type": f.media_type} for f in map(upload, files)]
        told: dict[str, Any] = {"text": text, "output_modalities": list(want), "stop": list(stop), "live": self.live}
        told |= {"model_kwargs": dict(knobs), "files": sent}
        if model is not None:
            told["model"] = model
        if session is not None:
            told["session"] = session
        return self._frame(told)

    def append(self, observation: Observation) -> tuple[bytes, int]:
        """The frame with *observation*, and its number: 0, 1, 2…"""
        frame = self._frame({"append": {stream: _items(items) for stream, items in observation.items()}})
        self.sent += 1
        return frame, self.sent - 1

    def observation(self, stream: str | Observation, items: Items) -> Observation:
        """*items* of *stream*, or all of an observation."""
        return {stream: items} if isinstance(stream, str) else stream

    def alone(self, items: Items | Observation) -> Observation:
        """*items*, if not named, as those of the only live stream."""
        if isinstance(items, Mapping):
            return items
        if len(self.live) != 1:
            names = ", ".join(self.live) or "none"
            raise RequestError(f"say which live stream the items are for ({names}): {{name: items}}", param="live")
        return {self.live[0]: items}

    def end(self, stream: str | None) -> bytes:
        """The frame that ends *stream*, or all of them."""
        return self._frame({"end_input": True if stream is None else stream})

    def receive(self, frame: str | bytes) -> Heard | None:
        """What *frame* brings: ``None`` for the end. Raises what an error event says."""
        if isinstance(frame, str):
            raise unknown_answer("a text frame in answer to binary ones")
        event = msgspec.msgpack.decode(frame)
        delta = self.read(event)
        if delta is None:
            return None
        seq = event.get("seq")
        if seq is not None:
            self.answered = max(self.answered, seq + 1)
        return Heard(delta, seq)

    def _frame(self, message: Mapping[str, Any]) -> bytes:
        return msgspec.msgpack.encode({"id": self.id, **message}, enc_hook=_plain)


def _items(items: Items) -> Any:
    if isinstance(items, str):
        return items
    array = np.asarray(items)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"items are numbers or a text, not an array of {array.dtype}")
    if not isinstance(items, np.ndarray) and array.dtype.kind != "b":
        array = array.astype(np.float32) if not hasattr(items, "__array__") else array
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": little.tobytes()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r:.80} cannot be sent")

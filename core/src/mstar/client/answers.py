"""What a client receives: objects of the native routes as deltas and results, every failure as a ``RequestError``."""

from __future__ import annotations

import base64
import binascii
import io
import json
import wave
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from mstar.runtime.result import Result
from mstar.spec.errors import NotReady, RequestError, TooBusy
from mstar.spec.processor import (
    ArrayDelta,
    AudioDelta,
    Delta,
    FramesDelta,
    ProgressDelta,
    ReasoningDelta,
    SegmentDelta,
    TextDelta,
    ToolCallDelta,
    Word,
)
from mstar.spec.request import Usage

__all__ = [
    "Ending",
    "broken_off",
    "delta_of",
    "error_of",
    "failure",
    "only",
    "result_of",
    "sound_of",
    "sse_text",
    "unknown_answer",
    "unreachable",
    "usage_of",
]

T = TypeVar("T")


class Ending:
    """How a request ended; filled in by :meth:`read`, which turns its lines or events into deltas."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.usage: Usage = Usage()
        self.failed = False

    def read(self, event: Mapping[str, Any]) -> Delta | None:
        """The delta in *event*, if it is one. Raises what an error event says."""
        kind = event.get("type")
        if kind == "delta":
            return delta_of(event)
        if kind == "error":
            self.failed = True
            raise failure(event, event.get("status", 500), event.get("retry_after"))
        if kind == "done":
            self.finish_reason, self.usage = event["finish_reason"], usage_of(event["usage"])
        return None  # a keepalive, or what a newer server says beside


def delta_of(event: Mapping[str, Any]) -> Delta:
    """The delta that a JSON line, or a JSON or msgpack event, says."""
    modality, stream = event["modality"], event["stream"]
    if modality == "text":
        return TextDelta(event["text"], stream=stream)
    if modality == "audio":
        return AudioDelta(_samples(event), event["rate"], stream)
    if modality in ("image", "video"):
        return FramesDelta(_frames(event), event.get("fps"), stream)
    if modality == "reasoning":
        return ReasoningDelta(event["text"], stream=stream)
    if modality == "tool_call":
        return ToolCallDelta(event["call"], event["name"], event["arguments"], stream=stream)
    if modality == "segment":
        known = {name: event[name] for name in SegmentDelta.__dataclass_fields__ if name in event}
        words = tuple(Word(**word) for word in known.pop("words", ()))
        return SegmentDelta(**{**known, "words": words, "tokens": tuple(known.get("tokens", ()))})
    if modality == "progress":
        return ProgressDelta(event["step"], event["total"], _preview(event.get("preview")), stream)
    return ArrayDelta(_array(event), modality, stream)


def result_of(body: Mapping[str, Any]) -> Result:
    """The result in the whole answer of ``/generate``."""
    deltas = [
        delta_of({"call": number, **item, "modality": modality})
        for modality, items in body["outputs"].items()
        for number, item in enumerate(items)
    ]
    return Result.of(deltas, body["finish_reason"], usage_of(body["usage"]))


def sound_of(data: bytes) -> AudioDelta:
    """The sound in a WAV file of 16 bits."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            return AudioDelta(_floats(file.readframes(file.getnframes()), file.getnchannels()), file.getframerate())
    except (wave.Error, EOFError, ValueError) as error:
        raise unknown_answer(f"a WAV file that cannot be read ({error})") from None


def usage_of(report: Mapping[str, Any] | None) -> Usage:
    """A usage report without the fields that this client does not know."""
    known = {name: value for name, value in (report or {}).items() if name in Usage.__struct_fields__}
    return Usage(**known)


def _samples(event: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    encoding = event.get("encoding")
    if encoding is None:
        return _array(event)
    data = _bytes(event["data"])
    if encoding == "wav":
        return np.asarray(sound_of(data).samples)
    if encoding != "pcm_s16le":
        raise unknown_answer(f"audio as {encoding!r}")
    return _floats(data, event.get("channels", 1))


def _floats(data: bytes, channels: int) -> np.ndarray[Any, Any]:
    samples = np.frombuffer(data, "<i2").astype(np.float32) / 32767.0
    return samples if channels == 1 else samples.reshape(-1, channels)


def _frames(event: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    encoding = event.get("encoding")
    if encoding is None:
        return _array(event)
    if encoding != "png":
        raise unknown_answer(f"frames as {encoding!r}")
    from PIL import Image

    files = event["frames"] if "frames" in event else [event["data"]]
    return np.stack([np.asarray(Image.open(io.BytesIO(_bytes(file))).convert("RGB")) for file in files])


def _preview(sent: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(sent, str):
        return np.asarray(_frames({"encoding": "png", "data": sent})[0])
    return None if sent is None else _array(sent)


def _array(event: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    data, dtype = event["data"], np.dtype(event["dtype"])
    if isinstance(data, bytes):
        return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(event["shape"])
    if dtype.kind == "f":  # JSON has null for what is not finite
        data = np.asarray(data, object)
        data[data == None] = np.nan  # noqa: E711 - elementwise
    return np.asarray(data, dtype).reshape(event["shape"])


def _bytes(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise unknown_answer(f"base64 that cannot be read ({error})") from None


def unknown_answer(what: str) -> RequestError:
    """What a client of ours is told when a server answers *what* it does not expect."""
    return RequestError(f"the server sent {what}; is it newer than this client?", code="bad_answer", status=502)


# --- failures -----------------------------------------------------------------------------------------------------


def failure(body: Any, status: int, retry_after: float | None) -> RequestError:
    """The error in *body*, an object with ``error`` as every route sends it."""
    told = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(told, Mapping):
        reason = f"the server answered {status} without an error object"
        return RequestError(reason, code="bad_answer", status=status, type="server_error")
    message = str(told.get("message"))
    error: RequestError
    if status == 429:
        error = TooBusy(message, retry_after=1.0 if retry_after is None else retry_after)
    elif status == 503:
        error = NotReady(message, retry_after=5.0 if retry_after is None else retry_after)
    else:
        error = RequestError(message, status=status)
    error.param, error.code = told.get("param"), told.get("code") or error.code
    error.type = told.get("type") or error.type
    return error


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> RequestError:
    """The error that an HTTP response with *status* of 400 or more says."""
    try:
        told = json.loads(body)
    except ValueError:
        start = body[:200].decode("utf-8", "replace").strip()
        reason = f"the server answered {status}" + (f": {start}" if start else "")
        return RequestError(reason, code="bad_answer", status=status, type="server_error")
    wait = headers.get("Retry-After", "")
    return failure(told, status, float(wait) if wait.replace(".", "", 1).isdecimal() else None)


def unreachable(url: str, error: Exception) -> RequestError:
    """No connection to *url*."""
    reason = str(error) or type(error).__name__
    message = f"cannot reach {url}: {reason}; is the server running (`mstar serve KEY`), and at this address?"
    return RequestError(message, code="connection_failed", status=503, type="connection_error")


def broken_off(url: str, reason: str) -> RequestError:
    """The connection to *url* ended before the answer did."""
    message = f"the connection to {url} ended before the answer did: {reason}"
    return RequestError(message, code="connection_lost", status=503, type="connection_error")


def only(found: T | None, what: str) -> T:
    """*found*, which a helper promises. Raises if the model made none."""
    if found is None:
        raise RequestError(f"the model answered without {what}", code="no_output", status=502, type="server_error")
    return found


def sse_text(line: str) -> str | None:
    """The new text in *line* of a streamed chat: ``None`` for a line without any. Raises what an error event says."""
    if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
        return None
    event = json.loads(data)
    if "error" in event:
        raise failure(event, event.get("status", 500), None)
    return next((choice["delta"].get("content") for choice in event["choices"]), None) or None

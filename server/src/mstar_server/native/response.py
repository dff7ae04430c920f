"""The native answer: one JSON object, or one object per delta.

In JSON audio is signed 16-bit: a WAV file when whole, bare PCM (``pcm_s16le``) in deltas. Images are PNG files. A video
is its frames as PNG files with their rate. Arrays are nested lists with dtype and shape; a number that is not finite is
null. In msgpack all of them are arrays: dtype, shape and the bytes, as the model made them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import numpy as np

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
    modality,
)
from mstar.spec.sound import channels, pcm16, wav
from mstar_server.media.encode.images import base64_text, png
from mstar_server.protocols import Answer

__all__ = ["delta_arrays", "delta_object", "done_object", "is_heavy", "whole_object"]

_HEAVY_NUMBERS = 1 << 15


def is_heavy(delta: Delta) -> bool:
    """Encoding *delta* in JSON takes milliseconds: do it in a thread."""
    if isinstance(delta, ArrayDelta):
        return bool(delta.data.size > _HEAVY_NUMBERS)
    return isinstance(delta, FramesDelta) or (isinstance(delta, ProgressDelta) and delta.preview is not None)


def delta_object(delta: Delta, index: int) -> dict[str, Any]:
    """One delta in JSON; *index* counts those of its stream."""
    head = _head(delta, index)
    if isinstance(delta, AudioDelta):
        facts = {"encoding": "pcm_s16le", "rate": delta.rate, "channels": channels(delta.samples)}
        return {**head, **facts, "data": base64_text(pcm16(delta.samples))}
    if isinstance(delta, FramesDelta):
        return {**head, "encoding": "png", **_frames(delta.frames, delta.fps)}
    if isinstance(delta, ProgressDelta):
        preview = {} if delta.preview is None else {"preview": base64_text(png(delta.preview))}
        return {**head, "step": delta.step, "total": delta.total, **preview}
    if isinstance(delta, ArrayDelta):
        return {**head, **_array(delta.data)}
    return {**head, **_words(delta)}


def delta_arrays(delta: Delta, index: int) -> dict[str, Any]:
    """One delta in msgpack: audio is float32, frames are uint8 ``[n, H, W, 3]``, nothing is encoded."""
    head = _head(delta, index)
    if isinstance(delta, AudioDelta):
        return {**head, "rate": delta.rate, **_raw(np.asarray(delta.samples, np.float32))}
    if isinstance(delta, FramesDelta):
        rate = {} if delta.fps is None else {"fps": delta.fps}
        return {**head, **rate, **_raw(np.asarray(delta.frames, np.uint8))}
    if isinstance(delta, ProgressDelta):
        preview = {} if delta.preview is None else {"preview": _raw(np.asarray(delta.preview, np.uint8))}
        return {**head, "step": delta.step, "total": delta.total, **preview}
    if isinstance(delta, ArrayDelta):
        return {**head, **_raw(delta.data)}
    return {**head, **_words(delta)}


def _words(delta: TextDelta | ReasoningDelta | ToolCallDelta | SegmentDelta) -> dict[str, Any]:
    if isinstance(delta, ToolCallDelta):
        return {"call": delta.index, "name": delta.name, "arguments": delta.arguments}
    return _segment(delta) if isinstance(delta, SegmentDelta) else {"text": delta.text}


def done_object(answer: Answer, reason: str | None = None) -> dict[str, Any]:
    """The last object of an answer; *reason* instead of how it ended."""
    return {"type": "done", "finish_reason": reason or answer.finish_reason, "usage": usage_object(answer)}


def usage_object(answer: Answer) -> dict[str, Any]:
    """What an answer has used."""
    usage = answer.usage
    report: dict[str, Any] = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    if usage is not None:
        report |= {"input": usage.input, "output": usage.output, "cached": usage.cached}
        report |= {"queued_s": usage.queued_s, "run_s": usage.run_s}
    return report


def whole_object(answer: Answer, deltas: Iterable[Delta]) -> dict[str, Any]:
    """The whole answer: what each stream said, joined, in lists by modality."""
    streams: dict[tuple[str, str], list[Any]] = {}
    for delta in deltas:
        if isinstance(delta, ProgressDelta):
            continue  # of no interest once all is done
        streams.setdefault((modality(delta), delta.stream), []).append(delta)
    outputs: dict[str, list[dict[str, Any]]] = {}
    for (kind, stream), parts in streams.items():
        outputs.setdefault(kind, []).extend({"stream": stream, **item} for item in _joined(kind, parts))
    return {
        "id": answer.id,
        "outputs": outputs,
        "finish_reason": answer.finish_reason,
        "usage": usage_object(answer),
    }


def _head(delta: Delta, index: int) -> dict[str, Any]:
    return {"type": "delta", "modality": modality(delta), "stream": delta.stream, "index": index}


def _joined(kind: str, parts: list[Any]) -> list[dict[str, Any]]:
    if kind in ("text", "reasoning"):
        return [{"text": "".join(part.text for part in parts)}]
    if kind == "audio":
        samples, rate = np.concatenate([part.samples for part in parts]), parts[0].rate
        return [
            {"encoding": "wav", "rate": rate, "channels": channels(samples), "data": base64_text(wav(samples, rate))}
        ]
    if kind == "video":
        return [{"encoding": "png", **_frames([f for part in parts for f in part.frames], parts[0].fps)}]
    if kind == "image":
        return [{"encoding": "png", "data": base64_text(png(frame))} for part in parts for frame in part.frames]
    if kind == "tool_call":
        return [_call(list(pieces)) for _, pieces in groupby(parts, key=lambda piece: piece.index)]
    if kind == "segment":
        return [_segment(part) for part in parts]
    return [_array(part.data) for part in parts]


def _call(pieces: list[ToolCallDelta]) -> dict[str, Any]:
    return {"name": pieces[0].name, "arguments": "".join(piece.arguments for piece in pieces)}


def _segment(delta: SegmentDelta) -> dict[str, Any]:
    facts = {name: value for name, value in dataclasses.asdict(delta).items() if name != "stream"}
    return {**facts, "tokens": list(delta.tokens), "words": list(facts["words"])}


def _frames(frames: Any, fps: float | None) -> dict[str, Any]:
    encoded = [base64_text(png(frame)) for frame in frames]
    if fps is not None:
        return {"fps": fps, "frames": encoded}
    return {"data": encoded[0]} if len(encoded) == 1 else {"frames": encoded}


def _array(data: Any) -> dict[str, Any]:
    return {"dtype": str(data.dtype), "shape": list(data.shape), "data": data.tolist()}


def _raw(data: Any) -> dict[str, Any]:
    little = data.astype(data.dtype.newbyteorder("<"), copy=False)
    return {"dtype": data.dtype.name, "shape": list(data.shape), "data": little.tobytes()}

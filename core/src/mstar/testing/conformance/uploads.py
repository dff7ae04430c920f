"""Decoded media as a client sends them: files in JSON, parts of a chat message."""

from __future__ import annotations

import base64
import importlib.util
import io
import wave
from collections.abc import Sequence
from typing import Any

import numpy as np

from mstar.spec.tasks import Audio, File, Image, Part, Text

__all__ = ["chat_content", "files", "unsendable", "wav_file"]


def unsendable(parts: Sequence[Part]) -> str:
    """Why *parts* cannot be sent over HTTP, or ``""``."""
    kinds = {type(part) for part in parts}
    if Audio in kinds and importlib.util.find_spec("soundfile") is None:
        return "its sample request has audio, for which the server needs `pip install soundfile`"
    strange = sorted(kind.__name__.lower() for kind in kinds - {Image, Audio, File, Text})
    return f"its sample request has parts that the suite cannot send: {', '.join(strange)}" if strange else ""


def files(parts: Sequence[Part]) -> list[dict[str, str]]:
    """For ``files`` of a native request."""
    found = []
    for part in parts:
        name, media_type, data = _encode(part)
        found.append({"data": base64.b64encode(data).decode(), "name": name, "media_type": media_type})
    return found


def chat_content(text: str, parts: Sequence[Part]) -> Any:
    """For ``content`` of a chat message."""
    if not parts:
        return text
    content: list[dict[str, Any]] = []
    for part in parts:
        _, media_type, data = _encode(part)
        kind = "image_url" if isinstance(part, Image) else "audio_url"
        url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
        content.append({"type": kind, kind: {"url": url}})
    return [*content, {"type": "text", "text": text}]


def _encode(part: Part) -> tuple[str, str, bytes]:
    """A file's name, media type and bytes."""
    if isinstance(part, Image):
        from PIL import Image as Pillow

        image = io.BytesIO()
        Pillow.fromarray(part.pixels).save(image, "PNG")
        return "sample.png", "image/png", image.getvalue()
    if isinstance(part, Audio):
        name, data, media_type = wav_file(part)
        return name, media_type, data
    if isinstance(part, File):
        return part.name, part.media_type, part.data
    if isinstance(part, Text):
        return "sample.txt", "text/plain", part.text.encode()
    raise TypeError(f"{type(part).__name__} cannot be sent")


def wav_file(audio: Audio) -> tuple[str, bytes, str]:
    """*audio* as a file of a form: name, bytes, media type."""
    sound = io.BytesIO()
    with wave.open(sound, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(audio.rate)
        writer.writeframes((np.clip(audio.samples, -1, 1) * 32767).astype("<i2").tobytes())
    return "sample.wav", sound.getvalue(), "audio/wav"

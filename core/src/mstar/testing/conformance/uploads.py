"""Decoded media as a client sends them: files in JSON, parts of a chat message."""

from __future__ import annotations

import base64
import io
import pkgutil
import wave
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mstar.spec.tasks import Audio, File, Image, Part, Text, Video

__all__ = ["chat_content", "files", "unsendable", "wav_file"]

_SENDABLE = (Image, Audio, Video, File, Text)
_URLS: Mapping[type[Part], str] = {Image: "image_url", Audio: "audio_url", Video: "video_url"}


def unsendable(parts: Sequence[Part]) -> str:
    """Why *parts* cannot be sent over HTTP, or ``""``."""
    strange = sorted({type(part).__name__.lower() for part in parts if not isinstance(part, _SENDABLE)})
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
        if isinstance(part, Text):
            content.append({"type": "text", "text": part.text})
            continue
        name, media_type, data = _encode(part)
        url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
        if isinstance(part, File):
            content.append({"type": "file", "file": {"file_data": url, "filename": name}})
        else:
            kind = _URLS[type(part)]
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
    if isinstance(part, Video):
        encode = pkgutil.resolve_name("mstar_server.media.encode.video:mp4")
        return "sample.mp4", "video/mp4", encode(part.frames, part.fps, part.audio)
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

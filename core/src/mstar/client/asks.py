"""What a client sends: bodies of requests, files of any kind as uploads."""

from __future__ import annotations

import io
import json
import mimetypes
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from mstar.spec.errors import RequestError
from mstar.spec.sound import wav
from mstar.spec.tasks import Audio, File, Image

__all__ = [
    "FileLike",
    "Knobs",
    "chat_content",
    "generate_content",
    "json_content",
    "speech_content",
    "tts_ask",
    "upload",
    "voice_content",
    "voice_path",
]

FileLike = str | PathLike[str] | bytes | Image | Audio | File | np.ndarray[Any, Any]
"""A file's path or bytes; a picture (also as its array, uint8 ``[H, W, 3]``); samples with their rate."""

Knobs = Mapping[str, Any]


def upload(file: FileLike) -> File:
    """*file* as it is sent: pictures as PNG, samples as 16-bit WAV, anything else as it is.

    :raises TypeError: nothing that can be sent. :raises OSError: the file cannot be read.
    """
    match file:
        case File():
            return file
        case bytes():
            return File(file, "file")
        case str() | PathLike():
            path = Path(file)
            return File(path.read_bytes(), path.name, mimetypes.guess_type(path.name)[0] or "application/octet-stream")
        case Image():
            return File(_png(file.pixels), "image.png", "image/png")
        case np.ndarray():
            return File(_png(file), "image.png", "image/png")
        case Audio():
            return File(wav(np.asarray(file.samples), file.rate), "audio.wav", "audio/wav")
    raise TypeError(f"a file is a path, bytes, a picture or mstar.spec.tasks' Image, Audio or File, not {file!r:.80}")


def _png(pixels: Any) -> bytes:
    from PIL import Image as Pillow

    pixels = np.asarray(pixels)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise TypeError(f"a picture is uint8 [H, W, 3], not {pixels.dtype} {list(pixels.shape)}")
    out = io.BytesIO()
    Pillow.fromarray(np.ascontiguousarray(pixels)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def json_content(body: Mapping[str, Any]) -> dict[str, Any]:
    """*body* as arguments for a request; fields that are ``None`` are left out."""
    told = {name: value for name, value in body.items() if value is not None}
    return {"content": _json(told).encode(), "headers": {"Content-Type": "application/json"}}


def _json(value: Any) -> str:
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r:.80} cannot be sent as JSON")


def generate_content(
    model: str | None,
    text: str,
    files: Sequence[FileLike],
    want: Sequence[str],
    session: str | None,
    stop: Sequence[str],
    knobs: Knobs,
    streaming: bool,
) -> dict[str, Any]:
    """Arguments for a request to ``/generate``: a form when there are files, else JSON."""
    if isinstance(files, str | bytes | PathLike) or not isinstance(files, Sequence):
        raise TypeError(f"files is a list, also for one file: [{files!r:.80}]")
    words = [stop] if isinstance(stop, str) else list(stop)
    body: dict[str, Any] = {"model": model, "text": text, "session": session}
    if not files:
        more = {"output_modalities": list(want), "streaming": streaming, "model_kwargs": dict(knobs), "stop": words}
        return json_content({**body, **more})
    fields = {name: value for name, value in body.items() if value is not None}
    fields |= {"streaming": "true" if streaming else "false", "model_kwargs": _json(dict(knobs))}
    parts: list[tuple[str, tuple[str | None, Any] | tuple[str, bytes, str]]] = []
    parts += [(name, (None, value)) for name, value in fields.items()]
    parts += [("output_modalities", (None, word)) for word in want]
    parts += [("stop", (None, word)) for word in words]
    for sent in map(upload, files):
        parts.append(("files", (sent.name or "file", sent.data, sent.media_type)))
    return {"files": parts}


def chat_content(model: str, messages: str | Sequence[Mapping[str, Any]], stream: bool, knobs: Knobs) -> dict[str, Any]:
    """Arguments for a request to ``/v1/chat/completions``."""
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    return json_content({"model": model, "messages": turns, "stream": stream, **knobs})


def tts_ask(reference_audio: FileLike | None, ref_text: str | None, knobs: Knobs) -> tuple[list[FileLike], Knobs]:
    """Files and knobs of a request for speech in the voice of a clip."""
    if reference_audio is None and ref_text is not None:
        raise RequestError("ref_text is what reference_audio says: send both", param="ref_text")
    named = knobs if ref_text is None else {**knobs, "ref_text": ref_text}
    return ([] if reference_audio is None else [reference_audio]), named


def speech_content(
    model: str, text: str, voice: str, reference_audio: FileLike | None, ref_text: str | None, knobs: Knobs
) -> dict[str, Any]:
    """Arguments for a request to ``/v1/audio/speech``, which knows *voice* by name; the answer is a WAV file."""
    if reference_audio is not None:
        raise RequestError("voice and reference_audio are two voices: send one of them", param="voice")
    body = {"model": model, "input": text, "voice": voice, "ref_text": ref_text, "response_format": "wav"}
    return json_content({**body, **knobs})


def voice_content(name: str, audio: FileLike, text: str | None, language: str | None) -> dict[str, Any]:
    """Arguments for a request that uploads *audio* as the voice *name*."""
    sent = upload(audio)
    told = {"name": name, "text": text, "language": language}
    return {
        "data": {field: value for field, value in told.items() if value is not None},
        "files": {"audio_sample": (sent.name or "file", sent.data, sent.media_type)},
    }


def voice_path(voice: str) -> str:
    """Where the voice of this id or name is."""
    return f"/v1/audio/voices/{quote(voice, safe='')}"

"""The sound of a chat's answer, as OpenAI's clients read it."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mstar.spec.processor import AudioDelta, Delta
from mstar_server.media.encode.sound import SoundStream, whole_sound

__all__ = ["SOUND_FORMATS", "ChatVoice", "whole_voice"]

SOUND_FORMATS: Mapping[str, str] = {
    "wav": "wav", "pcm16": "pcm", "mp3": "mp3", "opus": "opus", "aac": "aac", "flac": "flac",
}  # fmt: skip
"""``audio.format`` of a chat → the encoders' name."""


class ChatVoice:
    """The ``audio`` of one choice's deltas: one file, header and all, over all of them.

    Nothing is kept when the answer has ended: it expires when it was *created*.
    """

    def __init__(self, name: str, created: int):
        self._id, self._created, self._stream = _new_id(), created, SoundStream(name)

    def piece(self, **fields: Any) -> dict[str, Any]:
        return {"id": self._id, **fields}

    def feed(self, delta: AudioDelta) -> dict[str, Any] | None:
        """``None`` while the encoder holds back what it has. The first piece says the rate."""
        first = not self._stream.begun
        data = self._stream.feed([delta])
        rate = {"sample_rate": self._stream.rate} if first and self._stream.begun else {}
        return self.piece(data=_coded(data), **rate) if data or rate else None

    def finish(self) -> Iterator[dict[str, Any]]:
        if data := self._stream.finish():
            yield self.piece(data=_coded(data))
        yield {"expires_at": self._created}


def whole_voice(said: Sequence[Delta], name: str, created: int, transcript: str | None) -> dict[str, Any] | None:
    """The ``audio`` of a message; ``None`` if nothing is to be heard."""
    sound = whole_sound([delta for delta in said if isinstance(delta, AudioDelta)], name)
    if sound is None:
        return None
    return {
        "id": _new_id(),
        "data": _coded(sound.data),
        "transcript": transcript or "",
        "expires_at": created,
        "sample_rate": sound.rate,
    }


def _new_id() -> str:
    return f"audio_{uuid.uuid4().hex}"


def _coded(data: bytes) -> str:
    return base64.b64encode(data).decode()

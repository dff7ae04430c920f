"""The body of ``POST /v1/audio/speech``, and the task that it asks for.

Reference: OpenAI's API reference of speech and the request types of its Python client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from mstar.spec.errors import RequestError
from mstar.spec.knobs import Knobs
from mstar.spec.model import ModelSpec
from mstar.spec.tasks import SpeechTask, VoiceSample
from mstar_server.openai.knobs import knobs_of
from mstar_server.openai.text_request import Number
from mstar_server.options import ServerOptions

__all__ = ["Delivery", "SpeechAdapter", "SpeechFormat", "SpeechRequest", "VoiceId", "delivery"]

SpeechFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
Delivery = Literal["whole", "raw", "events"]

_SIZED = ("wav", "flac")
"""Formats whose headers hold sizes: players want them right."""


class VoiceId(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str


class SpeechRequest(BaseModel):
    """Text to speak. A model's further knobs (its listing names them) are fields of the same object."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    input: str = Field(description="The text.")
    voice: str | VoiceId | None = Field(
        None, description="A voice of `/v1/audio/voices`, or an expression that the model understands."
    )
    instructions: str | None = Field(None, description="How to speak, for models that take such words.")
    response_format: SpeechFormat | None = Field(None, description="Default: mp3.")
    speed: Number | None = Field(None, ge=0.25, le=4, description="For models that have a knob of this name.")
    stream_format: Literal["audio", "sse"] | None = Field(None, description="Bare sound (default), or events.")

    stream: StrictBool | None = Field(
        None, description="Extension: sound is sent while it is made (default, but for wav and flac), or whole."
    )
    ref_audio: str | None = Field(
        None, description="Extension: a clip whose voice is to be used: a data URL, base64, or a URL."
    )
    ref_text: str | None = Field(None, description="Extension: what is said in `ref_audio`, or in an uploaded `voice`.")
    sentence_chunking: StrictBool | None = Field(
        None, description="Extension: speak each sentence by itself, or all at once; default: as the model does best."
    )
    user: Any = Field(None, description="Accepted and ignored.")

    @property
    def format(self) -> SpeechFormat:
        return self.response_format or "mp3"

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


def delivery(body: SpeechRequest) -> Delivery:
    """How the sound is to be sent."""
    if body.stream_format == "sse":
        if body.stream is False:
            message = "'stream' is false, but 'stream_format' asks for events: send one of them"
            raise RequestError(message, param="stream")
        return "events"
    if body.stream is None:
        sized = body.format in _SIZED and body.stream_format is None
        return "whole" if sized else "raw"
    return "raw" if body.stream else "whole"


class SpeechAdapter:
    """Builds the task of one request."""

    def __init__(self, spec: ModelSpec, options: ServerOptions):
        self.spec, self.options = spec, options

    def tasks(self, body: SpeechRequest, speaker: str | VoiceSample | None) -> Sequence[SpeechTask]:
        """One task.

        :param speaker: the voice, looked up: one that the model knows, a sample, or ``None`` for its default.
        """
        self._check_texts(body)
        sample = speaker if isinstance(speaker, VoiceSample) else None
        task = SpeechTask(
            knobs=self._knobs(body),
            want=("audio",),
            text=body.input,
            voice=speaker if isinstance(speaker, str) else None,
            sample=sample,
            instructions=body.instructions or "",
        )
        return [task]

    def _check_texts(self, body: SpeechRequest) -> None:
        limit = self.options.max_speech_chars
        for name in ("input", "instructions", "ref_text"):
            text = getattr(body, name)
            if text is not None and len(text) > limit:
                message = f"{name!r} of {len(text)} characters is longer than the limit of {limit}"
                raise RequestError(message, param=name, code="text_too_long")
        if not body.input.strip():
            raise RequestError("'input' is empty", param="input")

    def _knobs(self, body: SpeechRequest) -> Knobs:
        if body.speed not in (None, 1) and "speed" not in self.spec.knobs.model_fields:
            message = f"'speed' is not supported by {self.spec.key!r}; the only valid value is 1"
            raise RequestError(message, param="speed", code="unsupported_parameter")
        return knobs_of(body, self.spec.knobs, fields=("speed",))

"""``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``: the form, and the task that it asks for.

Reference: OpenAI's API reference of audio and the request types of its Python client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mstar.spec.errors import RequestError
from mstar.spec.knobs import Knobs
from mstar.spec.model import ModelSpec
from mstar.spec.tasks import Audio, Part, TranscriptionTask
from mstar_server.errors import validation_fault
from mstar_server.openai.knobs import knobs_of
from mstar_server.options import ServerOptions

__all__ = ["TranscriptionAdapter", "TranscriptionRequest", "TranslationRequest"]

Granularity = Literal["segment", "word"]


class TranslationRequest(BaseModel):
    """What was said, in English. A model's further knobs are fields of the same form."""

    model_config = ConfigDict(extra="allow", frozen=True)
    lists: ClassVar[tuple[str, ...]] = ()

    model: str | None = Field(None, description="May be left out when the server has one model.")
    prompt: str = Field("", description="What was said before, or words that are to be spelled so.")
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"] = "json"
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    language: str | None = Field(None, max_length=64, description="Of the speech. Extension on translations.")

    @property
    def streamed(self) -> bool:
        return False


class TranscriptionRequest(TranslationRequest):
    """What was said. A model's further knobs are fields of the same form."""

    lists: ClassVar[tuple[str, ...]] = (
        "timestamp_granularities", "include", "languages", "keywords", "known_speaker_names",
        "known_speaker_references",
    )  # fmt: skip

    timestamp_granularities: list[Granularity] = Field(
        default_factory=list, description="Needs `verbose_json`. Default there: segments."
    )
    stream: bool | None = None
    include: list[Literal["logprobs"]] = Field(default_factory=list, description="Needs `json`.")
    chunking_strategy: str | None = Field(
        None,
        description="`auto`, or an object of type `server_vad`: long audio is cut where it is quiet, its windows are "
        "heard at once.",
    )
    languages: list[str] = Field(default_factory=list, description="Not supported.")
    keywords: list[str] = Field(default_factory=list, description="Not supported.")
    known_speaker_names: list[str] = Field(default_factory=list, description="Not supported.")
    known_speaker_references: list[str] = Field(default_factory=list, description="Not supported.")

    @property
    def streamed(self) -> bool:
        return bool(self.stream)


class _ServerVad(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["server_vad"]
    prefix_padding_ms: int = Field(300, ge=0)
    silence_duration_ms: int = Field(200, ge=0)
    threshold: float = Field(0.5, ge=0, le=1)


class TranscriptionAdapter:
    """Builds the task of one clip, for both routes."""

    def __init__(self, spec: ModelSpec, options: ServerOptions):
        self.spec, self.options = spec, options

    def check(self, body: TranslationRequest) -> None:
        """Raise for what is wrong with *body* beside its file."""
        self._task(body, None, translate=False)

    def tasks(
        self, body: TranslationRequest, media: Mapping[str, Part], *, translate: bool = False
    ) -> Sequence[TranscriptionTask]:
        """*media*: the clip, under ``file``."""
        audio = media["file"]
        assert isinstance(audio, Audio)
        return [self._task(body, audio, translate=translate)]

    def _task(self, body: TranslationRequest, audio: Audio | None, *, translate: bool) -> TranscriptionTask:
        if len(body.prompt) > self.options.max_text_chars:
            message = f"'prompt' is longer than the limit of {self.options.max_text_chars} characters"
            raise RequestError(message, param="prompt", code="text_too_long")
        if body.response_format == "diarized_json":
            text = "'response_format': speakers are not told apart; use 'verbose_json' for times"
            raise _unsupported(text, "response_format")
        if isinstance(body, TranscriptionRequest):
            _check(body)
        return TranscriptionTask(
            knobs=knobs_of(body, self.spec.knobs, _temperature(body, self.spec.knobs), also=("file",)),
            want=("text",),
            audio=audio,
            language=body.language,
            translate=translate,
            prompt=body.prompt,
            timestamps=_timestamps(body),
            chunked=isinstance(body, TranscriptionRequest) and body.chunking_strategy is not None,
            logprobs=0 if isinstance(body, TranscriptionRequest) and body.include else None,
        )


def _check(body: TranscriptionRequest) -> None:
    """Fields that ask for what is not there, or that do not go together."""
    for name in ("languages", "keywords", "known_speaker_names", "known_speaker_references"):
        if getattr(body, name):
            raise _unsupported(f"{name!r} is not supported", name)
    if body.timestamp_granularities and body.response_format != "verbose_json":
        text = "'timestamp_granularities' needs 'response_format': 'verbose_json'"
        raise RequestError(text, param="timestamp_granularities")
    if body.include and body.response_format != "json":
        raise RequestError("'include': log-probabilities need 'response_format': 'json'", param="include")
    if body.stream and body.response_format in ("srt", "vtt"):
        raise _unsupported(f"'stream' is not supported with 'response_format': {body.response_format!r}", "stream")
    if body.chunking_strategy not in (None, "auto"):
        _check_strategy(body.chunking_strategy)


def _check_strategy(text: str) -> None:
    param = "chunking_strategy"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        message = f"{param!r} must be 'auto' or an object of type 'server_vad', got {text[:80]!r}"
        raise RequestError(message, param=param)
    try:
        _ServerVad.model_validate(value)
    except ValidationError as error:
        fault = validation_fault(error.errors(include_url=False), value)
        fault.message, fault.param = f"{param!r}: {fault.message}", f"{param}.{fault.param}"
        raise fault from None


def _temperature(body: TranslationRequest, knobs: type[Knobs]) -> dict[str, Any]:
    """The temperature as a knob. A model that has none is greedy: 0 is what it does."""
    if body.temperature is None or (body.temperature == 0 and "temperature" not in knobs.model_fields):
        return {}
    if "temperature" not in knobs.model_fields:
        raise _unsupported(f"'temperature': this model is greedy, it takes 0, not {body.temperature}", "temperature")
    return {"temperature": body.temperature}


def _timestamps(body: TranslationRequest) -> tuple[Granularity, ...]:
    if body.response_format in ("srt", "vtt"):
        return ("segment",)
    if body.response_format != "verbose_json":
        return ()
    asked = body.timestamp_granularities if isinstance(body, TranscriptionRequest) else ()
    return tuple(dict.fromkeys(asked)) or ("segment",)


def _unsupported(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_parameter")

"""The body of ``POST /v1/chat/completions``, as OpenAI's clients send it.

Only shapes are judged here. Sampling values are judged by the model's own knobs, so that a model may have other bounds;
a field that is neither named here nor a knob of the model is refused by
:func:`~mstar_server.openai.text_request.knob_values` with the nearest known one.
Reference: OpenAI's API reference of chat completions and the request types of its Python client.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, StrictBool

from mstar.spec.errors import RequestError, nearest
from mstar.spec.knobs import Knobs
from mstar_server.openai.speech_request import VoiceId
from mstar_server.openai.text_request import Closed, TextRequest, Whole

__all__ = ["ChatAudio", "ChatMessage", "ChatRequest", "ContentPart"]


class ContentPart(Closed):
    """One part of a message's content; which field is used depends on *type*."""

    type: Literal["text", "image_url", "input_audio", "file", "refusal", "video_url", "audio_url"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | dict[str, Any] | None = Field(None, description="{'url': 'data:image/png;base64,…'} or the URL.")
    audio_url: str | dict[str, Any] | None = None
    video_url: str | dict[str, Any] | None = None
    input_audio: dict[str, Any] | None = Field(None, description="{'data': base64, 'format': 'wav'}")
    file: dict[str, Any] | None = None
    prompt_cache_breakpoint: Any = Field(None, description="Accepted and ignored.")
    cache_control: Any = Field(None, description="Accepted and ignored.")


class ChatAudio(Closed):
    """How an answer shall sound."""

    voice: str | VoiceId | None = Field(None, description="As on `/v1/audio/speech`, of the model's own voices.")
    format: Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"]

    @property
    def voice_name(self) -> str | None:
        name = self.voice.id if isinstance(self.voice, VoiceId) else self.voice
        return None if name == "default" else name


class ChatMessage(Closed):
    """One turn. What answers carry, of OpenAI's or of other servers and clients, is accepted when it is sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = Field(None, description="What an assistant thought, as the answer said it.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    annotations: Any = Field(None, description="Accepted and ignored.")
    audio: Any = Field(None, description="Accepted and ignored.")
    function_call: Any = Field(None, description="Accepted and ignored.")
    parsed: Any = Field(None, description="Accepted and ignored.")
    provider_specific_fields: Any = Field(None, description="Accepted and ignored.")
    reasoning_details: Any = Field(None, description="Accepted and ignored.")


class ChatRequest(TextRequest):
    """A chat request. A model's further knobs (its listing names them) are fields of the same object."""

    messages: list[ChatMessage]
    max_completion_tokens: Whole | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=20)

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: ChatAudio | None = Field(None, description="For answers with sound: `modalities` has `audio`.")
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, description="For models that have a knob of this name.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Extension: knobs that the chat template reads, `enable_thinking` say."
    )
    verbosity: str | None = None
    moderation: dict[str, Any] | None = None

    store: Any = Field(None, description="Accepted and ignored.")
    metadata: Any = Field(None, description="Accepted and ignored.")
    service_tier: Any = Field(None, description="Accepted and ignored.")
    safety_identifier: Any = Field(None, description="Accepted and ignored.")
    prompt_cache_key: Any = Field(None, description="Accepted and ignored.")
    prompt_cache_options: Any = Field(None, description="Accepted and ignored.")
    prompt_cache_retention: Any = Field(None, description="Accepted and ignored.")

    def token_limit(self) -> tuple[str, int | None]:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            message = f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) differ: send one of them"
            raise RequestError(message, param="max_tokens")
        return ("max_tokens", old) if new is None else ("max_completion_tokens", new)

    def further_knobs(self, knobs: type[Knobs]) -> dict[str, Any]:
        found = {}
        for name, value in (self.chat_template_kwargs or {}).items():
            if name not in knobs.model_fields:
                where = f"chat_template_kwargs.{name}"
                message = f"unknown parameter {where!r}{nearest(name, knobs.model_fields)}"
                raise RequestError(message, param=where, code="unknown_parameter")
            found[name] = value
        if self.reasoning_effort is not None and "reasoning_effort" in knobs.model_fields:
            found["reasoning_effort"] = self.reasoning_effort
        return found

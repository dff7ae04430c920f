"""The body of ``POST /v1/chat/completions``, as OpenAI's clients send it.

Only shapes are judged here. Sampling values are judged by the model's own knobs, so that a model may have other bounds;
a field that is neither named here nor a knob of the model is refused by :func:`knob_values` with the nearest known one.
Reference: OpenAI's API reference of chat completions and the request types of its Python client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError

from mstar.spec.errors import RequestError, nearest
from mstar.spec.knobs import Knobs, validate_knobs

__all__ = ["ChatMessage", "ChatRequest", "ContentPart", "StreamOptions", "knob_values"]

Number = Annotated[float, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]


class _Body(BaseModel):
    """An object inside the body. It has no fields but its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _no_other_field(cls, value: Any) -> Any:
        """As ``extra="forbid"``, which the schema shows, but with the nearest field in the error."""
        for name in value if isinstance(value, Mapping) else ():
            if name not in cls.model_fields:
                known = nearest(str(name), cls.model_fields)
                raise PydanticCustomError("extra_forbidden", "unknown", {"field": str(name), "nearest": known})
        return value


class ContentPart(_Body):
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


class ChatMessage(_Body):
    """One turn. What answers carry, of OpenAI's or of other servers and clients, is accepted when it is sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    annotations: Any = Field(None, description="Accepted and ignored.")
    audio: Any = Field(None, description="Accepted and ignored.")
    function_call: Any = Field(None, description="Accepted and ignored.")
    parsed: Any = Field(None, description="Accepted and ignored.")
    provider_specific_fields: Any = Field(None, description="Accepted and ignored.")
    reasoning: Any = Field(None, description="Accepted and ignored.")
    reasoning_content: Any = Field(None, description="Accepted and ignored.")
    reasoning_details: Any = Field(None, description="Accepted and ignored.")


class StreamOptions(_Body):
    include_usage: StrictBool | None = Field(None, description="End the stream with a chunk that carries the usage.")
    include_obfuscation: StrictBool | None = Field(None, description="Accepted and ignored.")


class ChatRequest(BaseModel):
    """A chat request. A model's further knobs (its listing names them) are fields of the same object."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    messages: list[ChatMessage]
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Whole | None = Field(None, description="How many choices.")

    temperature: Number | None = None
    top_p: Number | None = None
    seed: Whole | None = None
    max_tokens: Whole | None = Field(None, description="The older name of max_completion_tokens.")
    max_completion_tokens: Whole | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, Number] | None = Field(None, description="Token id → -100…100, added to its logit.")
    logprobs: StrictBool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=20)

    top_k: Whole | None = Field(None, description="Extension.")
    min_p: Number | None = Field(None, description="Extension.")
    repetition_penalty: Number | None = Field(None, description="Extension.")
    min_tokens: Whole | None = Field(None, description="Extension.")
    ignore_eos: StrictBool | None = Field(None, description="Extension.")
    include_stop_str_in_output: StrictBool | None = Field(
        None, description="Extension: keep the stop string that ended it."
    )

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    moderation: dict[str, Any] | None = None

    store: Any = Field(None, description="Accepted and ignored.")
    metadata: Any = Field(None, description="Accepted and ignored.")
    user: Any = Field(None, description="Accepted and ignored.")
    service_tier: Any = Field(None, description="Accepted and ignored.")
    safety_identifier: Any = Field(None, description="Accepted and ignored.")
    prompt_cache_key: Any = Field(None, description="Accepted and ignored.")
    prompt_cache_options: Any = Field(None, description="Accepted and ignored.")
    prompt_cache_retention: Any = Field(None, description="Accepted and ignored.")


_KNOBS = (
    "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty",
    "min_tokens", "ignore_eos",
)  # fmt: skip


def knob_values(body: ChatRequest, knobs: type[Knobs]) -> Knobs:
    """The knobs that the client set, validated as the model wants them. A field sent as ``null`` counts as not sent."""
    values = {name: value for name in _KNOBS if (value := getattr(body, name)) is not None}
    limit = _max_tokens(body)
    if limit is not None:
        values["max_tokens"] = limit
    for name, value in (body.model_extra or {}).items():
        if name not in knobs.model_fields:
            known = nearest(name, {*ChatRequest.model_fields, *knobs.model_fields})
            raise RequestError(f"unknown parameter {name!r}{known}", param=name, code="unknown_parameter")
        if value is not None:
            values[name] = value
    try:
        return validate_knobs(knobs, values)
    except RequestError as error:
        if error.param == "max_tokens" and body.max_tokens is None:  # name the field as the client spelled it
            error.param = "max_completion_tokens"
            error.message = error.message.replace("'max_tokens'", "'max_completion_tokens'")
        raise


def _max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) differ: send one of them"
        raise RequestError(message, param="max_tokens")
    return old if new is None else new

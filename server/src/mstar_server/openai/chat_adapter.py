"""From a chat request to :class:`~mstar.spec.tasks.ChatTask`: the server's own adapter, for models that answer in text.

A family that can do more (tools, structured output, speech) registers its own through ``mstar_openai``; it is built as
``Adapter(spec, options)`` and asked for ``tasks(body, media)``, where *media* are the request's files, decoded: see
:mod:`mstar_server.openai.adapters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mstar.spec.errors import RequestError
from mstar.spec.model import ModelSpec
from mstar.spec.tasks import ChatTask, Message, Part, Task, Text
from mstar_server.openai.chat_media import MEDIA_PARTS
from mstar_server.openai.chat_request import ChatMessage, ChatRequest, ContentPart
from mstar_server.openai.text_request import (
    check_stream_options,
    choices,
    knob_values,
    logit_bias,
    samples,
    stop_strings,
)
from mstar_server.openai.tools import read_tools, tool_choice
from mstar_server.options import ServerOptions

__all__ = ["ChatAdapter"]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "moderation": (),
}
"""Fields of OpenAI's that this adapter cannot honour, and the values that ask for nothing."""


class ChatAdapter:
    """Builds the tasks of one chat request."""

    def __init__(self, spec: ModelSpec, options: ServerOptions):
        self.spec, self.options = spec, options

    def check(self, body: ChatRequest) -> None:
        """Raise for what is wrong with *body* beside its files."""
        self._task(body, None)
        choices(body.n, self.options)

    def tasks(self, body: ChatRequest, media: Mapping[str, Part]) -> Sequence[Task]:
        """One task per choice (``n``); each has its own seed when the request has one.

        :param media: the decoded files of the request by the place of their content part.
        """
        return samples(self._task(body, media), choices(body.n, self.options))

    def _task(self, body: ChatRequest, media: Mapping[str, Part] | None) -> ChatTask:
        """:param media: ``None``: not decoded yet; they are left out."""
        for name, neutral in _NEUTRAL.items():
            value = getattr(body, name)
            if value is not None and value not in neutral:
                message = f"{name!r} is not supported by {self.spec.key!r} on this route"
                raise RequestError(message, param=name, code="unsupported_parameter")
        check_stream_options(body)
        tools = read_tools(body.tools)
        return ChatTask(
            knobs=knob_values(body, self.spec.knobs),
            messages=self._messages(body.messages, media),
            tools=tools,
            tool_choice=tool_choice(body.tool_choice, tools),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            response_format=body.response_format,
            want=("text", "audio") if self._sound(body) else ("text",),
            voice=None if body.audio is None else body.audio.voice_name,
            stop=stop_strings(body.stop),
            include_stop=bool(body.include_stop_str_in_output),
            logprobs=_logprobs(body),
            logit_bias=logit_bias(body.logit_bias),
        )

    def _sound(self, body: ChatRequest) -> bool:
        """Whether the answer shall be heard as well as read."""
        asked = body.modalities or ("text",)
        stranger = next((name for name in asked if name not in ("text", "audio")), None)
        if stranger is not None or ("audio" in asked and "audio" not in self.spec.outputs):
            message = f"'modalities': {stranger or 'audio'!r} is not supported by {self.spec.key!r} on this route"
            raise RequestError(message, param="modalities", code="unsupported_parameter")
        if "audio" not in asked:
            if body.audio is not None:
                raise RequestError("'audio' needs 'modalities': ['text', 'audio']", param="audio")
            return False
        if body.audio is None:
            message = "'audio' is required with 'modalities' of sound: {'voice': …, 'format': 'wav'}"
            raise RequestError(message, param="audio", code="missing_required_parameter")
        return True

    def _messages(self, messages: Sequence[ChatMessage], media: Mapping[str, Part] | None) -> tuple[Message, ...]:
        if not messages:
            raise RequestError("'messages' is empty: send at least one message", param="messages")
        if len(messages) > self.options.max_messages:
            message = f"{len(messages)} messages are more than the limit of {self.options.max_messages}"
            raise RequestError(message, param="messages", code="too_many_messages")
        _check_size(messages, self.options)
        return tuple(_message(m, f"messages[{i}]", media) for i, m in enumerate(messages))


def _message(message: ChatMessage, where: str, media: Mapping[str, Part] | None) -> Message:
    calls = message.tool_calls or ()
    if message.content is None and not (message.role == "assistant" and (calls or message.refusal)):
        why = f"for role {message.role!r}"
        if message.audio is not None:
            why += ": the sound of earlier answers is not kept, send its transcript"
        raise RequestError(f"'{where}.content' is required {why}", param=f"{where}.content")
    if calls and message.role != "assistant":
        raise RequestError(f"'{where}.tool_calls' is for role 'assistant' only", param=f"{where}.tool_calls")
    if message.role == "tool" and not message.tool_call_id:
        raise RequestError(f"'{where}.tool_call_id' is required for role 'tool'", param=f"{where}.tool_call_id")
    content: tuple[Part, ...]
    if message.content is None:
        content = (Text(message.refusal),) if message.refusal else ()
    elif isinstance(message.content, str):
        content = (Text(message.content),)
    else:
        parts = [_part(p, f"{where}.content[{i}]", media) for i, p in enumerate(message.content)]
        content = tuple(part for part in parts if part is not None)
    reasoning = message.reasoning_content or message.reasoning or ""
    return Message(message.role, content, calls, message.tool_call_id, message.name, reasoning)


def _part(part: ContentPart, where: str, media: Mapping[str, Part] | None) -> Part | None:
    if part.type in MEDIA_PARTS:
        return None if media is None else media[where]
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise RequestError(f"'{where}.{part.type}' is required", param=f"{where}.{part.type}")
    return Text(text)


def _check_size(messages: Sequence[ChatMessage], options: ServerOptions) -> None:
    chars = 0
    for message in messages:
        if isinstance(message.content, str):
            chars += len(message.content)
        for part in message.content if isinstance(message.content, list) else ():
            chars += len(part.text or part.refusal or "")
    if chars > options.max_text_chars:
        message_text = f"{chars} characters of text are more than the limit of {options.max_text_chars}"
        raise RequestError(message_text, param="messages", code="text_too_long")


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None

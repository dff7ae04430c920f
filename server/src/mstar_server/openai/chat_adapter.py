"""From a chat request to :class:`~mstar.spec.tasks.ChatTask`: the server's own adapter, for models that answer in text.

A family that can do more (tools, structured output, speech) registers its own through ``mstar_openai``; it is built as
``Adapter(spec, options)`` and asked for ``tasks(body)``, in a worker thread when the request carries media.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mstar.spec.errors import RequestError
from mstar.spec.model import ModelSpec
from mstar.spec.tasks import ChatTask, Message, Part, Task, Text
from mstar_server.media import decode_audio, decode_base64, decode_image, split_data_url
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
    "modalities": (["text"], []),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "moderation": (),
}
"""Fields of OpenAI's that this adapter cannot honour, and the values that ask for nothing."""

_MODALITY = {"image_url": "image", "input_audio": "audio", "audio_url": "audio", "video_url": "video", "file": "file"}


class ChatAdapter:
    """Builds the tasks of one chat request."""

    def __init__(self, spec: ModelSpec, options: ServerOptions):
        self.spec, self.options = spec, options

    def tasks(self, body: ChatRequest) -> Sequence[Task]:
        """One task per choice (``n``); each has its own seed when the request has one."""
        for name, neutral in _NEUTRAL.items():
            value = getattr(body, name)
            if value is not None and value not in neutral:
                message = f"{name!r} is not supported by {self.spec.key!r} on this route"
                raise RequestError(message, param=name, code="unsupported_parameter")
        check_stream_options(body)
        tools = read_tools(body.tools)
        task = ChatTask(
            knobs=knob_values(body, self.spec.knobs),
            messages=self._messages(body.messages),
            tools=tools,
            tool_choice=tool_choice(body.tool_choice, tools),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            response_format=body.response_format,
            want=("text",),
            stop=stop_strings(body.stop),
            include_stop=bool(body.include_stop_str_in_output),
            logprobs=_logprobs(body),
            logit_bias=logit_bias(body.logit_bias),
        )
        return samples(task, choices(body.n, self.options))

    def _messages(self, messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
        if not messages:
            raise RequestError("'messages' is empty: send at least one message", param="messages")
        if len(messages) > self.options.max_messages:
            message = f"{len(messages)} messages are more than the limit of {self.options.max_messages}"
            raise RequestError(message, param="messages", code="too_many_messages")
        _check_size(messages, self.options)
        return tuple(self._message(m, f"messages[{i}]") for i, m in enumerate(messages))

    def _message(self, message: ChatMessage, where: str) -> Message:
        calls = message.tool_calls or ()
        if message.content is None and not (message.role == "assistant" and (calls or message.refusal)):
            raise RequestError(f"'{where}.content' is required for role {message.role!r}", param=f"{where}.content")
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
            content = tuple(self._part(p, f"{where}.content[{i}]") for i, p in enumerate(message.content))
        reasoning = message.reasoning_content or message.reasoning or ""
        return Message(message.role, content, calls, message.tool_call_id, message.name, reasoning)

    def _part(self, part: ContentPart, where: str) -> Part:
        value = getattr(part, part.type)
        if value is None:
            raise RequestError(f"'{where}.{part.type}' is required", param=f"{where}.{part.type}")
        if isinstance(value, str) and part.type in ("text", "refusal"):
            return Text(value)
        modality = _MODALITY[part.type]
        if modality not in self.spec.inputs:
            takes = ", ".join(self.spec.inputs)
            message = f"'{where}': the model {self.spec.key!r} does not take {modality}; it takes {takes}"
            raise RequestError(message, param=where, code="unsupported_modality")
        return self._media(part.type, value, f"{where}.{part.type}")

    def _media(self, kind: str, value: Any, where: str) -> Part:
        if kind == "image_url":
            return decode_image(split_data_url(_url(value, where), where)[1], where, self.options)
        if kind == "audio_url":
            return decode_audio(split_data_url(_url(value, where), where)[1], where, self.options)
        if kind == "input_audio":
            data = value.get("data")
            if not isinstance(data, str):
                raise RequestError(f"'{where}.data' must be base64", param=f"{where}.data")
            return decode_audio(decode_base64(data, f"{where}.data"), where, self.options)
        raise RequestError(f"'{where}' is not supported on this route yet", param=where, code="unsupported_modality")


def _url(value: Any, where: str) -> str:
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise RequestError(f"'{where}' must be {{'url': '…'}}", param=where)
    return url


def _check_size(messages: Sequence[ChatMessage], options: ServerOptions) -> None:
    chars = media = 0
    for message in messages:
        if isinstance(message.content, str):
            chars += len(message.content)
        for part in message.content if isinstance(message.content, list) else ():
            if part.type in _MODALITY:
                media += 1
            else:
                chars += len(part.text or part.refusal or "")
    if chars > options.max_text_chars:
        message_text = f"{chars} characters of text are more than the limit of {options.max_text_chars}"
        raise RequestError(message_text, param="messages", code="text_too_long")
    if media > options.max_files:
        raise RequestError(f"{media} media parts are more than the limit of {options.max_files}", param="messages")


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None

"""The body of ``POST /v1/responses``, and the chat that it stands for.

The models' adapters know chats; a response is one with its turns spelled as *items*. Errors of the adapter name fields
of the chat; :meth:`Translation.blame` renames them to what the client sent. Reference: OpenAI's API reference of
responses and the types of its Python client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from mstar.spec.errors import RequestError, nearest
from mstar_server.errors import validation_fault
from mstar_server.openai.chat_request import ChatRequest
from mstar_server.openai.text_request import Number, Whole

__all__ = ["ResponseRequest", "Translation", "translate"]

_INCLUDABLE = {
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
}  # fmt: skip
"""What a client may ask to have included. All but the first concern items that no model here makes."""

_UNSUPPORTED = ("conversation", "prompt", "context_management", "max_tool_calls", "moderation")
_ROLES = ("user", "assistant", "system", "developer")
_MEDIA = ("input_image", "input_audio", "input_file", "input_video")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    include_obfuscation: StrictBool | None = Field(None, description="Accepted and ignored.")


class ResponseRequest(BaseModel):
    """A request for a response. A model's further knobs are fields of the same object."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    input: str | list[dict[str, Any]] = Field(description="A user's text, or the turns as items.")
    instructions: str | None = Field(None, description="A system message before everything; not carried over.")
    previous_response_id: str | None = Field(None, description="Go on from a stored response.")
    store: StrictBool | None = Field(None, description="Keep the response, so that it can be had again. Default: true.")
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    background: StrictBool | None = Field(None, description="Not supported.")

    temperature: Number | None = None
    top_p: Number | None = None
    max_output_tokens: Whole | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=20)
    include: list[str] | None = None
    text: dict[str, Any] | None = Field(None, description="`format`: text, json_object or json_schema; `verbosity`.")
    reasoning: dict[str, Any] | None = Field(None, description="`effort`; the rest is accepted and ignored.")
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    truncation: str | None = Field(None, description="`disabled`.")
    metadata: dict[str, str] | None = None

    conversation: Any = Field(None, description="Not supported.")
    prompt: Any = Field(None, description="Not supported.")
    context_management: Any = Field(None, description="Not supported.")
    max_tool_calls: Any = Field(None, description="Not supported.")
    moderation: Any = Field(None, description="Not supported.")
    user: Any = Field(None, description="Accepted and ignored.")
    service_tier: Any = Field(None, description="Accepted and ignored.")
    safety_identifier: Any = Field(None, description="Accepted and ignored.")
    prompt_cache_key: Any = Field(None, description="Accepted and ignored.")
    prompt_cache_options: Any = Field(None, description="Accepted and ignored.")
    prompt_cache_retention: Any = Field(None, description="Accepted and ignored.")


@dataclass(frozen=True)
class Translation:
    """*chat* says what the response's request says. *origins*: for each of its messages, where that came from."""

    chat: ChatRequest
    origins: Sequence[str]

    def blame(self, error: RequestError) -> RequestError:
        """*error*, about the chat, with its field as the client of ``/v1/responses`` knows it."""
        if error.param is not None:
            renamed = _renamed(error.param, self.origins)
            error.message = error.message.replace(error.param, renamed)
            error.args = (error.message,)
            error.param = renamed
        return error


_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "messages": "input",
}


def _renamed(param: str, origins: Sequence[str]) -> str:
    head, bracket, rest = param.partition("[")
    if head == "messages" and bracket:
        number, _, tail = rest.partition("]")
        if number.isdecimal() and int(number) < len(origins):
            return origins[int(number)] + tail
    return _NAMES.get(param, param)


def translate(body: ResponseRequest, history: Sequence[Mapping[str, Any]]) -> Translation:
    """The chat of *body*, which goes on from the items of *history*. Raises :class:`RequestError`."""
    _refuse_unsupported(body)
    messages: list[dict[str, Any]] = []
    origins: list[str] = []
    if body.instructions:
        _append(messages, origins, {"role": "system", "content": body.instructions}, "instructions")
    for item in history:
        _append_item(messages, origins, item, "previous_response_id")
    if isinstance(body.input, str):
        _append(messages, origins, {"role": "user", "content": body.input}, "input")
    else:
        for i, item in enumerate(body.input):
            _append_item(messages, origins, item, f"input[{i}]")
    include = body.include or []
    for i, name in enumerate(include):
        if name not in _INCLUDABLE:
            message = f"'include[{i}]': {name[:80]!r} is unknown{nearest(name, _INCLUDABLE)}"
            raise RequestError(message, param=f"include[{i}]")
    logprobs = "message.output_text.logprobs" in include or bool(body.top_logprobs)
    fields: dict[str, Any] = {
        **(body.model_extra or {}),
        "model": body.model,
        "messages": messages,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": True if logprobs else None,
        "top_logprobs": body.top_logprobs,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format((body.text or {}).get("format")),
        "verbosity": (body.text or {}).get("verbosity"),
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        "tools": _tools(body.tools),
        "tool_choice": _tool_choice(body.tool_choice),
    }
    try:
        return Translation(ChatRequest.model_validate(fields), origins)
    except ValidationError as error:
        fault = validation_fault(error.errors(include_url=False), fields)
        fault.param = _renamed(fault.param or "", origins)
        raise fault from None


def _refuse_unsupported(body: ResponseRequest) -> None:
    for name in _UNSUPPORTED:
        if getattr(body, name) is not None:
            raise _unsupported(f"{name!r} is not supported", name)
    if body.background:
        raise _unsupported("'background' is not supported: stream the response, or wait for it", "background")
    if body.truncation not in (None, "disabled"):
        raise _unsupported("'truncation' must be 'disabled': nothing is cut silently", "truncation")
    for name in body.text or ():
        if name not in ("format", "verbosity"):
            known = nearest(name, ("format", "verbosity"))
            raise RequestError(f"unknown parameter 'text.{name}'{known}", param=f"text.{name}")


def _append(messages: list[dict[str, Any]], origins: list[str], message: dict[str, Any], origin: str) -> None:
    messages.append(message)
    origins.append(origin)


def _append_item(messages: list[dict[str, Any]], origins: list[str], item: Mapping[str, Any], where: str) -> None:
    """Add what *item* says to *messages*. A call joins the assistant's message before it, as chats have it."""
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            message = f"'{where}.role': {str(role)[:80]!r} is unknown{nearest(str(role), _ROLES)}"
            raise RequestError(message, param=f"{where}.role")
        _append(messages, origins, {"role": role, "content": _content(item.get("content"), f"{where}.content")}, where)
    elif kind == "function_call":
        call_id, name, arguments = (_text(item, field, where) for field in ("call_id", "name", "arguments"))
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        if not messages or messages[-1]["role"] != "assistant":
            _append(messages, origins, {"role": "assistant", "content": None, "tool_calls": []}, where)
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str) else _content(output, f"{where}.output")
        answer = {"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content}
        _append(messages, origins, answer, where)
    elif kind != "reasoning":  # what a model thought in earlier turns is not told again
        known = nearest(str(kind), ("message", "function_call", "function_call_output", "reasoning"))
        raise RequestError(f"'{where}.type': {str(kind)[:80]!r} is not supported{known}", param=f"{where}.type")


def _text(item: Mapping[str, Any], field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise RequestError(f"'{where}.{field}' must be a string", param=f"{where}.{field}")
    return value


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where!r} must be a string or a list of parts", param=where)
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise RequestError(f"{where!r} must be an object", param=where)
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": _text(part, "text", where)}
    if kind == "refusal":
        return {"type": "refusal", "refusal": _text(part, "refusal", where)}
    if kind in _MEDIA and part.get("file_id"):
        raise _unsupported(f"'{where}.file_id' is not supported: send the data itself", f"{where}.file_id")
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": _text(part, "image_url", where)}}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    if kind == "input_video":
        return {"type": "video_url", "video_url": {"url": _text(part, "video_url", where)}}
    if kind == "input_file":
        if part.get("file_url"):
            raise _unsupported(f"'{where}.file_url' is not supported: send 'file_data'", f"{where}.file_url")
        return {"type": "file", "file": {k: part[k] for k in ("file_data", "filename") if k in part}}
    known = nearest(str(kind), ("input_text", "output_text", "refusal", *_MEDIA))
    raise RequestError(f"'{where}.type': {str(kind)[:80]!r} is unknown{known}", param=f"{where}.type")


def _response_format(form: Any) -> Any:
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
    return form


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            message = f"'tools[{i}].type': only 'function' is supported, got {str(tool.get('type'))[:80]!r}"
            raise _unsupported(message, f"tools[{i}].type")
    return [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in tools]


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _unsupported(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_parameter")

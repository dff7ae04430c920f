"""A session's settings: both protocols' objects read into one form, and written again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mstar.spec.errors import RequestError, nearest
from mstar_server.openai.tools import read_tools, tool_choice
from mstar_server.realtime.audio_buffer import FORMATS, AudioFormat, read_format
from mstar_server.realtime.turns import TurnSettings, read_turns

__all__ = ["LOGPROBS", "SessionSettings", "Transcribing", "session_object", "updated"]

Kind = Literal["realtime", "transcription"]


@dataclass(frozen=True)
class Transcribing:
    """How what the client says is written down. :param model: ``None``: the session's own."""

    model: str | None = None
    language: str | None = None
    prompt: str = ""

    def object(self) -> dict[str, Any]:
        return {"model": self.model, "language": self.language, "prompt": self.prompt}


@dataclass(frozen=True)
class SessionSettings:
    """What a session has been told so far, checked."""

    kind: Kind = "realtime"
    instructions: str = ""
    modalities: tuple[str, ...] = ("text",)
    voice: str | None = None
    input_format: AudioFormat = FORMATS["audio/pcm"]
    output_format: AudioFormat = FORMATS["audio/pcm"]
    transcription: Transcribing | None = None
    turns: TurnSettings | None = field(default_factory=TurnSettings)
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: Any = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    logprobs: bool = False
    """Whether transcripts come with the log-probabilities of their tokens."""

    @property
    def include(self) -> list[str] | None:
        return [LOGPROBS] if self.logprobs else None


LOGPROBS = "item.input_audio_transcription.logprobs"
"""The one thing that a client may have included."""

_INPUT = ("format", "transcription", "turn_detection", "noise_reduction")
_OUTPUT = ("format", "voice", "speed")
_FLAT = {
    "output_modalities": "modalities",
    "input_audio_format": "input_format",
    "output_audio_format": "output_format",
    "input_audio_transcription": "transcription",
    "max_response_output_tokens": "max_output_tokens",
}
"""Fields of either protocol → their name here, where that is another one."""

_KNOWN = (
    "type", "model", "instructions", "modalities", "voice", "input_format", "output_format", "transcription",
    "turn_detection", "tools", "tool_choice", "max_output_tokens", "temperature", "prompt",
    "include",
)  # fmt: skip
_IGNORED = (
    "id", "object", "expires_at", "client_secret", "tracing", "truncation", "reasoning", "speed",
    "parallel_tool_calls", "noise_reduction", "input_audio_noise_reduction", "metadata", "conversation",
)  # fmt: skip


def updated(old: SessionSettings, session: Any, param: str = "session") -> SessionSettings:
    """*old* changed by a client's *session* object, of either protocol. Raises :class:`RequestError` with the field."""
    if not isinstance(session, dict):
        raise RequestError(f"{param!r} must be an object", param=param)
    new = old
    for name, (where, value) in _flattened(session, param).items():
        new = _changed(new, name, value, where)
    return new


def _flattened(session: Mapping[str, Any], param: str) -> dict[str, tuple[str, Any]]:
    """Name → (where it stood, value); without those that are ignored."""
    found: dict[str, tuple[str, Any]] = {}
    for name, value in session.items():
        where = f"{param}.{name}"
        if name == "audio":
            found |= _audio(value, where)
        elif (plain := _FLAT.get(name, name)) in _KNOWN and name not in ("input_format", "output_format"):
            found[plain] = (where, value)
        elif name not in _IGNORED:
            known = nearest(name, {"audio", *session_fields()})
            raise RequestError(f"unknown parameter {where[:160]!r}{known}", param=where, code="unknown_parameter")
    return found


def session_fields() -> set[str]:
    """The keys of ``session`` that a client may send."""
    return {*_FLAT, *_KNOWN} - {"input_format", "output_format", "transcription"}


def _audio(audio: Any, param: str) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    for side, body in _object(audio, param, ("input", "output")).items():
        where = f"{param}.{side}"
        for name, value in _object(body, where, _INPUT if side == "input" else _OUTPUT).items():
            if name not in _IGNORED:
                found[f"{side}_format" if name == "format" else name] = (f"{where}.{name}", value)
    return found


def _object(value: Any, param: str, known: tuple[str, ...]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{param!r} must be an object", param=param)
    for name in value:
        if name not in known:
            where = f"{param}.{name}"
            message = f"unknown parameter {where[:160]!r}{nearest(name, known)}"
            raise RequestError(message, param=where, code="unknown_parameter")
    return value


def _changed(old: SessionSettings, name: str, value: Any, where: str) -> SessionSettings:
    match name:
        case "type":
            if value not in ("realtime", "transcription"):
                known = nearest(str(value), ("realtime", "transcription"))
                raise RequestError(f"{where!r}: {str(value)[:80]!r} is unknown{known}", param=where)
            return replace(old, kind=value)
        case "turn_detection":
            return replace(old, turns=read_turns(value, where))
        case "transcription":
            return replace(old, transcription=None if value is None else _transcribing(value, where))
        case "model":  # the session's, which the socket's address named: the session checks that it stays
            return old
    if value is None:
        return old
    match name:
        case "instructions":
            return replace(old, instructions=_text(value, where))
        case "voice":
            return replace(old, voice=_voice(value, where))
        case "input_format":
            return replace(old, input_format=read_format(value, where))
        case "output_format":
            return replace(old, output_format=read_format(value, where))
        case "modalities":
            return replace(old, modalities=_modalities(value, where))
        case "tools":
            return replace(old, tools=_tools(value, where))
        case "tool_choice":
            choice = value
            if isinstance(value, dict) and value.get("type") == "function" and "name" in value:
                choice = {"type": "function", "function": {"name": value["name"]}}
            return replace(old, tool_choice=tool_choice(choice, old.tools))
        case "include":
            return replace(old, logprobs=_includes(value, where))
        case "max_output_tokens":
            return replace(old, max_output_tokens=_tokens(value, where))
        case "temperature":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
                raise RequestError(f"{where!r} must be a number from 0 to 100", param=where)
            return replace(old, temperature=float(value))
    raise RequestError(f"{where!r} is not supported", param=where, code="unsupported_parameter")


def _includes(value: Any, where: str) -> bool:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise RequestError(f"{where!r} must be a list of names", param=where)
    for number, name in enumerate(value):
        if name != LOGPROBS:
            place = f"{where}[{number}]"
            message = f"{place!r}: {name[:80]!r} cannot be included; what can: {LOGPROBS!r}"
            raise RequestError(message, param=place, code="unsupported_value")
    return bool(value)


def _transcribing(value: Any, where: str) -> Transcribing:
    body = _object(value, where, ("model", "language", "prompt", "delay", "keywords", "languages"))
    for name in ("keywords", "languages"):
        if body.get(name):
            field_ = f"{where}.{name}"
            raise RequestError(f"{field_!r} is not supported", param=field_, code="unsupported_parameter")
    texts = {name: body.get(name) for name in ("model", "language", "prompt")}
    for name, text in texts.items():
        if text is not None:
            _text(text, f"{where}.{name}")
    return Transcribing(texts["model"], texts["language"], texts["prompt"] or "")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where!r} must be a string", param=where)
    return value


def _voice(value: Any, where: str) -> str:
    return _text(value.get("id") if isinstance(value, dict) else value, where)


def _modalities(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or any(word not in ("text", "audio") for word in value):
        raise RequestError(f"{where!r} must be a list of 'text' and 'audio'", param=where)
    return tuple(dict.fromkeys(value))


def _tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RequestError(f"{where!r} must be a list of tools", param=where)
    nested = [
        tool
        if "function" in tool or tool.get("type") != "function"
        else {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in value
    ]
    return read_tools(nested)


def _tokens(value: Any, where: str) -> int | None:
    if value == "inf":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{where!r} must be a whole number from 1, or 'inf'", param=where)
    return value


def session_object(settings: SessionSettings, session_id: str, model: str | None, beta: bool) -> dict[str, Any]:
    """What ``session.created`` and ``session.updated`` show: what holds."""
    turns = None if settings.turns is None else settings.turns.object()
    transcription = None if settings.transcription is None else settings.transcription.object()
    if beta:
        return _beta_object(settings, session_id, model, turns, transcription)
    heard = {
        "format": settings.input_format.object(),
        "transcription": transcription,
        "noise_reduction": None,
        "turn_detection": turns,
    }
    if settings.kind == "transcription":
        name = "realtime.transcription_session"
        return {
            "type": "transcription",
            "object": name,
            "id": session_id,
            "audio": {"input": heard},
            "include": settings.include,
        }
    return {
        "type": "realtime",
        "object": "realtime.session",
        "id": session_id,
        "model": model,
        "output_modalities": list(settings.modalities),
        "instructions": settings.instructions,
        "tools": [{"type": "function", **tool["function"]} for tool in settings.tools],
        "tool_choice": settings.tool_choice or "auto",
        "max_output_tokens": settings.max_output_tokens or "inf",
        "audio": {
            "input": heard,
            "output": {"format": settings.output_format.object(), "voice": settings.voice, "speed": 1.0},
        },
        "include": settings.include,
    }


def _beta_object(
    settings: SessionSettings, session_id: str, model: str | None, turns: Any, transcription: Any
) -> dict[str, Any]:
    heard = {
        "id": session_id,
        "input_audio_format": settings.input_format.beta_name,
        "input_audio_transcription": transcription,
        "turn_detection": turns,
        "include": settings.include,
    }
    if settings.kind == "transcription":
        return {"object": "realtime.transcription_session", **heard}
    return {
        "object": "realtime.session",
        **heard,
        "model": model,
        "modalities": list(settings.modalities),
        "instructions": settings.instructions,
        "voice": settings.voice,
        "output_audio_format": settings.output_format.beta_name,
        "tools": [{"type": "function", **tool["function"]} for tool in settings.tools],
        "tool_choice": settings.tool_choice or "auto",
        "temperature": settings.temperature,
        "max_response_output_tokens": settings.max_output_tokens or "inf",
    }

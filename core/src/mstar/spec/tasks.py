"""Tasks: what a client wants, free of HTTP. The server (or the offline API) builds one; a processor prepares it.

Media arrive decoded (see ``mstar_server.media``): images as uint8 arrays ``[H, W, 3]``, audio as float32 ``[samples]``
mono with its rate, video as uint8 ``[frames, H, W, 3]`` with its frame rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "Audio",
    "ChatTask",
    "CompletionTask",
    "File",
    "GenerateTask",
    "Image",
    "Message",
    "Part",
    "Task",
    "Text",
    "Video",
]


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Image:
    """uint8 ``[H, W, 3]``, sRGB."""

    pixels: Any


@dataclass(frozen=True)
class Audio:
    """float32 ``[samples]``, mono, in -1…1; *rate* in Hz."""

    samples: Any
    rate: int


@dataclass(frozen=True)
class Video:
    """uint8 ``[frames, H, W, 3]``; *fps* in frames a second; *audio* if the container had a track."""

    frames: Any
    fps: float
    audio: Audio | None = None


@dataclass(frozen=True)
class File:
    """Anything else that a client uploaded."""

    data: bytes
    name: str = ""
    media_type: str = "application/octet-stream"


Part = Text | Image | Audio | Video | File


@dataclass(frozen=True)
class Message:
    """One turn. ``content`` keeps the client's order of parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: tuple[Part, ...] = ()
    tool_calls: Sequence[Mapping[str, Any]] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every task carries.

    :param knobs: a validated instance of the spec's knobs class.
    :param stop: strings that end the answer; never shown to the client unless *include_stop*.
    :param logprobs: ``None``, or the number of alternatives per token.
    :param tenant: whose request it is: tenants share the rows, and neither prompts' heads nor sessions.
    :param timeout: seconds that it may take from now on, within what the deployment allows.
    """

    knobs: Any
    want: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    session: str | None = None
    tenant: str = ""
    timeout: float | None = None


@dataclass(frozen=True, kw_only=True)
class ChatTask(Task):
    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = None
    response_format: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True


@dataclass(frozen=True, kw_only=True)
class CompletionTask(Task):
    prompt: str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class GenerateTask(Task):
    """The native request: a text, files, and everything else in the knobs."""

    text: str = ""
    parts: tuple[Part, ...] = ()
    live: tuple[str, ...] = ()
    """Client streams that stay open for :class:`~mstar.spec.request.Push` after the request began."""

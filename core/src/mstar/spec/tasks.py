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
    "EmbeddingTask",
    "File",
    "GenerateTask",
    "Image",
    "ImageTask",
    "Message",
    "Part",
    "SpeechTask",
    "Task",
    "Text",
    "TranscriptionTask",
    "Video",
    "VideoTask",
    "VoiceSample",
]


@dataclass(frozen=True)
class Text:
    """A part of a message that is text."""

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
    """uint8 ``[frames, H, W, 3]``; *fps* in frames a second; *audio* if the container had a track.

    :param times: seconds at which the frames are shown, where they were chosen for a model that says which it looks at
        (:class:`mstar.spec.model.Frames`); empty: as *fps* says, and the model has its choice of them.
    :param resized: they have the size that the model wants (:attr:`mstar.spec.processor.Processor.frames`).
    """

    frames: Any
    fps: float
    audio: Audio | None = None
    times: tuple[float, ...] = ()
    resized: bool = False


@dataclass(frozen=True)
class File:
    """Anything else that a client uploaded."""

    data: bytes
    name: str = ""
    media_type: str = "application/octet-stream"


Part = Text | Image | Audio | Video | File


@dataclass(frozen=True)
class Message:
    """One turn. ``content`` keeps the client's order of parts. *reasoning*: what an assistant thought before it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: tuple[Part, ...] = ()
    tool_calls: Sequence[Mapping[str, Any]] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every task carries.

    :param knobs: a validated instance of the spec's knobs class.
    :param stop: strings that end the answer; never shown to the client unless *include_stop*.
    :param logprobs: ``None``, or the number of alternatives per token.
    :param response_format: what the answer may look like: a form of :mod:`mstar.spec.constraints`, checked by the
        processor. :param format_param: the client's field that it comes from, which errors name.
    :param tenant: whose request it is: tenants share the rows, and neither prompts' heads nor sessions.
    :param timeout: seconds that it may take from now on, within what the deployment allows.
    :param live: client streams that stay open for :class:`~mstar.spec.request.Push` after the request began. On
        ``/v1/realtime`` it is ``("audio",)``: what the client says comes as :class:`Audio` parts on that stream, which
        :meth:`~mstar.spec.processor.Processor.push` turns into items of the graph's own stream.
    """

    knobs: Any
    want: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    response_format: Mapping[str, Any] | None = None
    format_param: str = "response_format"
    session: str | None = None
    tenant: str = ""
    timeout: float | None = None
    live: tuple[str, ...] = ()

    @property
    def media(self) -> tuple[Part, ...]:
        """All that the request brings beside plain text, in the client's order."""
        return ()


@dataclass(frozen=True, kw_only=True)
class ChatTask(Task):
    """A conversation to go on with.

    :param tools: as OpenAI spells them (``{"type": "function", "function": {"name", "description", "parameters"}}``).
    :param tool_choice: ``None`` or ``auto`` (the model's choice), ``none``, ``required``, or one tool, as OpenAI spells
        it (``{"type": "function", "function": {"name"}}``). :param parallel_tool_calls: false: at most one call.
    :param voice: of the sound, where *want* has ``audio``: as in :class:`SpeechTask`.
    """

    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    voice: str | None = None

    @property
    def media(self) -> tuple[Part, ...]:
        return tuple(part for message in self.messages for part in message.content)


@dataclass(frozen=True, kw_only=True)
class CompletionTask(Task):
    """Text that goes on from a prompt: text, or the ids of its tokens."""

    prompt: str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class GenerateTask(Task):
    """The native request: a text, files, and everything else in the knobs."""

    text: str = ""
    parts: tuple[Part, ...] = ()

    @property
    def media(self) -> tuple[Part, ...]:
        return self.parts


@dataclass(frozen=True, kw_only=True)
class EmbeddingTask(Task):
    """One text (or its token ids) to one vector, which the renderer gives as an ``ArrayDelta`` of modality
    ``embedding``, float32 ``[dimensions]``."""

    input: str | Sequence[int]
    dimensions: int | None = None


@dataclass(frozen=True)
class VoiceSample:
    """A clip whose voice is to be spoken with.

    :param text: its transcript; empty when not known. :param id: the same for the same clip and transcript, so that
        what a model makes of them can be kept; empty when nobody has computed it.
    :param param: the field of the request that brought it, which errors name.
    """

    audio: Audio
    text: str = ""
    id: str = ""
    param: str = "ref_audio"


@dataclass(frozen=True, kw_only=True)
class SpeechTask(Task):
    """Text to speech. Speed, language and the like are knobs of the model.

    :param voice: a voice that the model brings (``Processor.voices``), or an expression that it understands
        (``Processor.knows_voice``); ``None``: the model's default.
    :param sample: the voice as a clip, for models that clone; then *voice* is ``None``.
    :param instructions: how to speak, for models that take such words.
    """

    text: str
    voice: str | None = None
    sample: VoiceSample | None = None
    instructions: str = ""

    @property
    def media(self) -> tuple[Part, ...]:
        return () if self.sample is None else (self.sample.audio,)


@dataclass(frozen=True, kw_only=True)
class TranscriptionTask(Task):
    """Speech to text.

    :param audio: the whole clip; ``None`` when it arrives on the live stream ``audio``.
    :param language: code of the spoken language (``en``); ``None``: to be found out.
    :param translate: write English, whatever was spoken. :param prompt: what was said or is to be spelled so.
    :param timestamps: which times the client wants.
    :param chunked: cut a long clip where it is quiet and hear the windows at once, also where the model would rather go
        through it from the beginning to the end. Families that always do so need not look.
    :param offset: of a window: where in the client's clip it begins, in seconds.
    :param carried: what a renderer gives the task that follows its own; its family's business alone.
    """

    audio: Audio | None
    language: str | None = None
    translate: bool = False
    prompt: str = ""
    timestamps: tuple[Literal["segment", "word"], ...] = ()
    chunked: bool = False
    offset: float = 0.0
    carried: Any = None

    @property
    def media(self) -> tuple[Part, ...]:
        return () if self.audio is None else (self.audio,)


@dataclass(frozen=True, kw_only=True)
class ImageTask(Task):
    """A picture from words, or from words and pictures.

    :param images: references, or what is to be edited. :param mask: of the first image's size: transparent where it
        is to be edited, as uint8 ``[H, W]``, 255 where it stays.
    :param size: width and height in pixels; ``None``: the model's choice.
    """

    prompt: str
    images: tuple[Image, ...] = ()
    mask: Any = None
    size: tuple[int, int] | None = None

    @property
    def media(self) -> tuple[Part, ...]:
        return self.images


@dataclass(frozen=True, kw_only=True)
class VideoTask(Task):
    """A video from words, or from words and pictures or a video.

    :param images: the first frame (and further ones, as the model takes them). :param size: width and height.
    :param seconds: ``None``: the model's choice. The rate is the model's, or a knob.
    """

    prompt: str
    images: tuple[Image, ...] = ()
    video: Video | None = None
    size: tuple[int, int] | None = None
    seconds: float | None = None

    @property
    def media(self) -> tuple[Part, ...]:
        return self.images if self.video is None else (*self.images, self.video)

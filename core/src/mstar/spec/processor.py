"""The API side of a family: tasks in, prepared requests out; engine events in, deltas out. No weights, no device."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mstar.spec.canvas import Canvas
from mstar.spec.errors import RequestError
from mstar.spec.knobs import Knobs
from mstar.spec.model import ModelSpec
from mstar.spec.request import Done, Emit, EngineRequest, Push, TokenLogprob
from mstar.spec.tasks import ChatTask, CompletionTask, Part, SpeechTask, Task, TranscriptionTask

__all__ = [
    "ArrayDelta",
    "AudioDelta",
    "Delta",
    "FramesDelta",
    "Intake",
    "Prepared",
    "Processor",
    "ProcessorContext",
    "ProgressDelta",
    "ReasoningDelta",
    "Renderer",
    "SegmentDelta",
    "TextDelta",
    "Tokenizes",
    "ToolCallDelta",
    "Voice",
    "Word",
    "modality",
]


@dataclass(frozen=True)
class ProcessorContext:
    """What a processor is built from.

    :param weights: the local folder in the published layout.
    :param options: as the model gets them (:class:`mstar.nn.model.BuildContext`): an instance of ``spec.options``.
    """

    spec: ModelSpec
    weights: Path | None
    options: Any = field(default_factory=Knobs)


class Intake(abc.ABC):
    """Takes what a client sends during one request, in order, where that needs to remember what came before: a
    resampler's state, say. Called from a thread pool, one call at a time."""

    @abc.abstractmethod
    def push(self, stream: str, part: Any, request_id: str, end: bool = False) -> Push:
        """As :meth:`Processor.push`, in its place."""


@dataclass(frozen=True)
class Prepared:
    """An engine request plus what the API side keeps to itself.

    :param prompt_tokens: for usage. :param state: anything that the renderer needs.
    :param intake: of what the client sends during the request; ``None``: :meth:`Processor.push` takes it.
    """

    request: EngineRequest
    prompt_tokens: int = 0
    state: Any = None
    intake: Intake | None = None


@dataclass(frozen=True)
class TextDelta:
    """New text. ``tokens`` are the ids that it came from (empty while text is held back for a stop string)."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    stream: str = "text"


@dataclass(frozen=True)
class ReasoningDelta:
    """New text of what a model thinks before it answers, without tags around it; otherwise as :class:`TextDelta`."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    stream: str = "text"


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call of one of the task's tools.

    :param index: 0, 1, 2… of the answer's calls, which come one after the other. :param name: of the tool, with the
        call's first piece; empty after that. :param arguments: a piece of their JSON text.
    """

    index: int
    name: str = ""
    arguments: str = ""
    tokens: tuple[int, ...] = ()
    stream: str = "text"


@dataclass(frozen=True)
class AudioDelta:
    """float32 ``[samples]`` (mono) or ``[samples, channels]`` in -1…1 at *rate* Hz."""

    samples: Any
    rate: int
    stream: str = "audio"

    def save(self, path: str | Path) -> None:
        """Write a 16-bit WAV file."""
        from mstar.spec.sound import wav

        Path(path).write_bytes(wav(self.samples, self.rate))


@dataclass(frozen=True)
class FramesDelta:
    """uint8 ``[frames, H, W, 3]``: one image (``fps`` None) or frames of a video."""

    frames: Any
    fps: float | None = None
    stream: str = "image"

    def save(self, path: str | Path) -> None:
        """Write a picture in the format of *path*'s suffix (PNG, JPEG, WebP…), or a video as an animated GIF, WebP or
        PNG.

        :raises ValueError: the suffix says none of these.
        """
        from PIL import Image

        pictures = [Image.fromarray(frame) for frame in self.frames]
        if len(pictures) == 1:
            pictures[0].save(path)
        elif Path(path).suffix.lower() in (".gif", ".webp", ".png"):
            rest = pictures[1:]
            pictures[0].save(path, save_all=True, append_images=rest, duration=1000 / (self.fps or 1.0), loop=0)
        else:
            raise ValueError(f"{path}: {len(pictures)} frames can be saved as .gif, .webp or .png")


@dataclass(frozen=True)
class ArrayDelta:
    """Numbers for a program: actions, states, embeddings. *data* is a numpy array."""

    data: Any
    modality: str = "action"
    stream: str = "action"


@dataclass(frozen=True)
class Word:
    """A spoken word, in seconds from the clip's start."""

    text: str
    start: float
    end: float


@dataclass(frozen=True)
class SegmentDelta:
    """Where a piece of a transcript was said. The text itself has gone out as :class:`TextDelta` before.

    :param start: seconds from the clip's start, as *end*. :param language: code of what was spoken, if that is known.
    :param avg_logprob: mean log-probability of its tokens. :param no_speech_prob: of there being no speech at all.
    """

    start: float
    end: float
    text: str
    words: tuple[Word, ...] = ()
    language: str | None = None
    tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    stream: str = "text"


@dataclass(frozen=True)
class ProgressDelta:
    """Step *step* of *total* is done. *preview*: what there is to see, uint8 ``[H, W, 3]``."""

    step: int
    total: int
    preview: Any = None
    stream: str = "progress"


Delta = (
    TextDelta | ReasoningDelta | ToolCallDelta | AudioDelta | FramesDelta | ArrayDelta | SegmentDelta | ProgressDelta
)


@dataclass(frozen=True)
class Voice:
    """A voice that a model brings.

    :param id: what requests call it. :param name: for people; default: the id. :param language: code of what it speaks
        (``en``, ``pt-BR``); ``None``: any that the model speaks. :param gender: ``female``, ``male`` or ``neutral``, if
        that is known.
    """

    id: str
    name: str = ""
    language: str | None = None
    gender: str | None = None
    description: str = ""


def modality(delta: Delta) -> str:
    """What clients call it: one of ``ModelSpec.outputs``, or what goes with one (``reasoning``, ``progress``…)."""
    if isinstance(delta, TextDelta):
        return "text"
    if isinstance(delta, ReasoningDelta):
        return "reasoning"
    if isinstance(delta, ToolCallDelta):
        return "tool_call"
    if isinstance(delta, AudioDelta):
        return "audio"
    if isinstance(delta, ArrayDelta):
        return delta.modality
    if isinstance(delta, SegmentDelta):
        return "segment"
    if isinstance(delta, ProgressDelta):
        return "progress"
    return "image" if delta.fps is None else "video"


class Renderer(abc.ABC):
    """Turns one request's events into deltas. One instance a request, called in order."""

    #: set by :meth:`feed` when the answer is complete before the engine knows (a stop string): the caller then cancels
    #: the request with this finish reason and feeds nothing more.
    finished: str | None = None

    #: set by :meth:`finish`: what is to be asked once this request has ended well, to go on with its answer. A window
    #: of speech whose answer was no good comes again with other knobs (then nothing was told of it), or is followed by
    #: what comes after it in the clip. Honoured for transcriptions.
    follow: Task | None = None

    @abc.abstractmethod
    def feed(self, event: Emit) -> Iterable[Delta]:
        """Deltas that *event* completes; possibly none."""

    def finish(self, done: Done | None) -> Iterable[Delta]:
        """What was held back, once the request has ended (``None``: ended by ``finished``)."""
        return ()


class Processor(abc.ABC):
    """A family's API side. Methods are called from a thread pool: they may take time but must be thread-safe.

    A processor whose model reports log-probabilities also has ``token_bytes(id: int) -> bytes``, the bytes that a token
    stands for; without it a request for log-probabilities is refused. One that has a tokenizer is :class:`Tokenizes`.
    """

    frames: Any = None
    """How a video's frames are resized, a :class:`mstar.processing.pictures.Patcher`, of models whose spec says which
    frames they look at (:attr:`~mstar.spec.model.ModelSpec.frames`): decoders then do it as they choose them, so that
    a long video takes no more memory than what is looked at."""

    def __init__(self, context: ProcessorContext):
        self.context = context

    @property
    def canvas(self) -> Canvas | None:
        """Which pictures and videos this deployment makes: the spec's, unless the operator's options allow less. What
        does not fit is refused before :meth:`prepare`."""
        return self.context.spec.canvas

    @abc.abstractmethod
    def prepare(self, task: Task, request_id: str) -> Prepared:
        """Validate *task* and turn it into arrays. Raises :class:`~mstar.spec.errors.RequestError` for bad input."""

    @abc.abstractmethod
    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        """A fresh renderer for one request."""

    def warm(self) -> None:
        """Load what else the first request of some kind would wait for. Called once, in a thread, while a worker starts
        in a process of its own: never by commands that only look at a model."""

    def voices(self) -> Sequence[Voice]:
        """The voices that the model brings. A request that names none gets the model's default."""
        return ()

    def knows_voice(self, voice: str) -> bool:
        """Whether *voice* is one of :meth:`voices`, or an expression that the model understands (a blend of several).

        A task's ``voice`` is ``None`` or has passed here. May raise :class:`~mstar.spec.errors.RequestError` to say
        what is wrong with an expression.
        """
        return any(known.id == voice for known in self.voices())

    def pieces(self, task: SpeechTask) -> Sequence[SpeechTask]:
        """*task* as tasks whose sounds, one after the other, are its answer; each is a request of its own. For models
        that speak a few sentences well and a page badly (:func:`mstar.processing.sentences.sentence_pieces`)."""
        return (task,)

    def windows(self, task: TranscriptionTask) -> Sequence[TranscriptionTask]:
        """*task* in windows that are heard one by one, at once, and joined: for clips longer than the model can hear.

        Each is *task* with its part of the audio and its ``offset``; they follow each other.
        :func:`mstar.processing.speech.windows.cut` makes them. The default hears the clip whole. A window whose
        request's renderer names a :attr:`~Renderer.follow` goes on with that one. Stretches in which nobody speaks may
        be left out, all of the clip included.
        """
        return (task,)

    def push(self, stream: str, part: Any, request_id: str, end: bool = False) -> Push:
        """Turn what a client sends during a request (a :data:`~mstar.spec.tasks.Part` or an array) into stream items,
        whatever came before; an :class:`Intake` remembers.

        The default passes arrays on as they are, and refuses anything else.
        """
        if isinstance(part, Part):
            raise RequestError(f"stream {stream!r} takes arrays, not {type(part).__name__.lower()}", param=stream)
        return Push(id=request_id, stream=stream, data=part, end=end)


@runtime_checkable
class Tokenizes(Protocol):
    """What a processor with a tokenizer can do beside: for clients that count or cut a prompt themselves."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""

    def tokenize(self, task: ChatTask | CompletionTask, special: bool = True) -> list[int]:
        """Ids of the prompt that *task* becomes. *special*: with what the tokenizer and the family put around a
        completion's text; a chat's template writes its special tokens itself."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of *ids*, special tokens included. Raises :class:`~mstar.spec.errors.RequestError` for others."""

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """How the tokenizer's vocabulary writes each of *ids*."""

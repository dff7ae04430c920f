"""What the miniatures share: an alphabet, a processor, and the description of one miniature."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from mstar.processing.constraints import checked_grammar
from mstar.processing.progress import ProgressReport
from mstar.processing.text import TextRenderer
from mstar.resources.grammars import GrammarCompiler
from mstar.spec.canvas import Canvas
from mstar.spec.errors import RequestError
from mstar.spec.knobs import Knobs, SamplingKnobs
from mstar.spec.model import Ability, Licence, LiveInput, ModelSpec
from mstar.spec.processor import (
    ArrayDelta,
    AudioDelta,
    Delta,
    FramesDelta,
    Prepared,
    Processor,
    ProcessorContext,
    Renderer,
)
from mstar.spec.request import Done, Emit, EngineRequest, SamplingParams
from mstar.spec.tasks import (
    ChatTask,
    CompletionTask,
    EmbeddingTask,
    GenerateTask,
    Image,
    ImageTask,
    SpeechTask,
    Task,
    Text,
    TranscriptionTask,
    VideoTask,
)
from mstar.testing.examples import Example

__all__ = [
    "ALPHABET",
    "VOCAB",
    "Example",
    "MiniKnobs",
    "MiniProcessor",
    "MiniRenderer",
    "Miniature",
    "decode",
    "encode",
    "text_of",
    "vocabulary",
]

ALPHABET = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP<>{}[]":,/0123456789 .'
"""Room for JSON, and for tags around it."""
VOCAB = len(ALPHABET)
RATE = 8000
FPS = 8


def encode(text: str) -> list[int]:
    """One id per character; characters outside the alphabet fold into it."""
    return [ALPHABET.index(c) if c in ALPHABET else ord(c) % VOCAB for c in text]


STOP = ALPHABET.index(".")
"""Ends an answer that has a constraint, unless the request names another; it is not part of the answer then."""


def vocabulary() -> list[bytes]:
    """The bytes of each token."""
    return [c.encode() for c in ALPHABET]


def decode(ids: Iterable[int]) -> str:
    return "".join(ALPHABET[i] for i in ids)


class MiniKnobs(SamplingKnobs):
    """Greedy and short unless asked otherwise."""

    temperature: float = 0.0
    max_tokens: int | None = 16
    stop_token: int | None = Field(None, ge=0, lt=VOCAB, description="End after this token.")


@dataclass(frozen=True)
class Miniature:
    """A tiny model whose right answer can be computed in closed form.

    :param streams: client stream → modality of what it carries. :param feeds: streams that the client feeds.
    :param example: draws a request. :param expected: stream → the whole of what that stream must carry for an example:
        a string for text, else an array. :param tolerance: absolute, for arrays. :param told: further modalities, heard
        only by those who ask.
    """

    key: str
    summary: str
    model: str
    streams: Mapping[str, str]
    example: Callable[[random.Random], Example]
    expected: Callable[[Example], Mapping[str, Any]]
    knobs: type[Knobs] = MiniKnobs
    abilities: tuple[Ability, ...] = ("generate",)
    inputs: tuple[str, ...] = ("text",)
    feeds: tuple[LiveInput, ...] = ()
    prepare: str = ""
    tolerance: float = 0.0
    told: tuple[str, ...] = ()
    canvas: Canvas | None = None
    deployment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def live(self) -> tuple[str, ...]:
        """The names of :attr:`feeds`."""
        return tuple(feed.name for feed in self.feeds)

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            key=self.key,
            family="miniatures",
            summary=self.summary,
            weights=(),
            licence=Licence("Apache-2.0"),
            model=self.model,
            processor=self.prepare or "mstar.testing.miniatures.common:MiniProcessor",
            knobs=self.knobs,
            abilities=self.abilities,
            inputs=self.inputs,
            outputs=tuple(sorted({*self.streams.values(), *self.told})),
            canvas=self.canvas,
            deployment={"device": "cpu", "dtype": "float32", "engine": {"threads": 1}, **self.deployment},
            live=self.feeds,
            examples="mstar.testing.miniatures:draw",
        )


def text_of(task: Task) -> str:
    """The request's text, whatever route it came by."""
    if isinstance(task, GenerateTask | SpeechTask):
        return task.text
    if isinstance(task, ImageTask | VideoTask):
        return task.prompt
    if isinstance(task, EmbeddingTask):
        return task.input if isinstance(task.input, str) else _decode_ids(task.input, "input")
    if isinstance(task, CompletionTask):
        return task.prompt if isinstance(task.prompt, str) else _decode_ids(task.prompt, "prompt")
    if isinstance(task, ChatTask):
        return "".join(p.text for m in task.messages for p in m.content if isinstance(p, Text))
    raise RequestError(f"miniatures take no {type(task).__name__}")


_FIELDS: Mapping[type[Task], str] = {
    ChatTask: "messages",
    CompletionTask: "prompt",
    EmbeddingTask: "input",
    ImageTask: "prompt",
    SpeechTask: "input",
    VideoTask: "prompt",
}
"""Where a task's text stood in the request."""


class MiniProcessor(Processor):
    """Characters in, values out. Subclasses override :meth:`inputs`."""

    reads: ClassVar[tuple[type, ...]] = ()
    """Media that it takes beside images."""

    def __init__(self, context: ProcessorContext):
        super().__init__(context)
        self.grammars = GrammarCompiler(vocabulary, VOCAB)

    def inputs(self, task: Task) -> dict[str, Any]:
        """The graph's inputs."""
        ids = encode(text_of(task))
        if not ids:
            raise RequestError("the text must not be empty", param=_FIELDS.get(type(task), "text"))
        return {"prompt": np.array(ids, dtype=np.int64)}

    def params(self, task: Task) -> dict[str, Any]:
        """What the graph may read of the request."""
        values: dict[str, Any] = task.knobs.model_dump()
        return values

    def prepare(self, task: Task, request_id: str) -> Prepared:
        self._refuse_media(task)
        if isinstance(task, EmbeddingTask) and task.dimensions is not None:
            raise RequestError("dimensions: this model's vectors have one size", param="dimensions")
        knobs = task.knobs
        sampling = {}
        stop, grammar = _stop_ids(knobs), None
        if isinstance(knobs, SamplingKnobs):
            if task.response_format is not None:
                grammar = checked_grammar(task, self.grammars, stop or (STOP,))
                stop = stop if grammar is None else stop or (STOP,)
            sampling["sampler"] = SamplingParams(
                temperature=knobs.temperature,
                top_p=knobs.top_p,
                top_k=knobs.top_k,
                min_p=knobs.min_p,
                repetition_penalty=knobs.repetition_penalty,
                frequency_penalty=knobs.frequency_penalty,
                presence_penalty=knobs.presence_penalty,
                seed=knobs.seed,
                max_tokens=knobs.max_tokens or 16,
                min_tokens=knobs.min_tokens,
                stop_token_ids=stop,
                ignore_eos=knobs.ignore_eos,
                logprobs=task.logprobs,
                logit_bias=dict(task.logit_bias),
                grammar=grammar,
            )
        inputs = self.inputs(task)
        request = EngineRequest(
            id=request_id,
            inputs=inputs,
            params=self.params(task),
            sampling=sampling,
            want=task.want,
            client_streams=task.live,
            session=task.session,
            tenant=task.tenant,
        )
        hidden = stop if grammar is not None else ()
        return Prepared(request, prompt_tokens=self.prompt_tokens(task) if inputs else 0, state=hidden)

    def _refuse_media(self, task: Task) -> None:
        takes = (Text, *self.reads, *((Image,) if "image" in self.context.spec.inputs else ()))
        parts = [(f"parts[{i}]", part) for i, part in enumerate(task.parts)] if isinstance(task, GenerateTask) else []
        for i, message in enumerate(task.messages if isinstance(task, ChatTask) else ()):
            parts += [(f"messages[{i}].content", part) for part in message.content]
        for where, part in parts:
            if not isinstance(part, takes):
                raise RequestError(f"{where}: this miniature reads no {type(part).__name__}", param=where)

    def prompt_tokens(self, task: Task) -> int:
        """What of *task* is text, in tokens."""
        return 0 if isinstance(task, TranscriptionTask) else len(encode(text_of(task)))

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        from mstar.testing.miniatures import miniature

        return MiniRenderer(miniature(self.context.spec.key).streams, task, prepared.state)

    def token_bytes(self, token: int) -> bytes:
        return ALPHABET[token].encode()


def _decode_ids(ids: Sequence[int], field: str) -> str:
    for i, token in enumerate(ids):
        if not 0 <= token < VOCAB:
            raise RequestError(f"{field}[{i}]: {token} is no token id (0 to {VOCAB - 1})", param=f"{field}[{i}]")
    return decode(ids)


def _stop_ids(knobs: SamplingKnobs) -> tuple[int, ...]:
    stop = knobs.stop_token if isinstance(knobs, MiniKnobs) else None
    return () if stop is None else (stop,)


class MiniRenderer(Renderer):
    """*task*'s stop strings end the answer, whichever stream of text they are in.

    :param hidden: tokens that end an answer and are not shown. :param loudness: what samples are multiplied by; routes
        that answer with sound clip it to -1…1.
    """

    def __init__(self, streams: Mapping[str, str], task: Task, hidden: Sequence[int] = (), loudness: float = 1.0):
        self.streams, self.loudness, self.progress = streams, loudness, ProgressReport()
        self._texts = {
            stream: TextRenderer(decode, task.stop, task.include_stop, hidden, stream)
            for stream, modality in streams.items()
            if modality == "text"
        }

    def feed(self, event: Emit) -> Iterable[Delta]:
        if self.progress.hears(event):
            yield from self.progress.feed(event)
            return
        modality = self.streams[event.stream]
        if modality == "text":
            text = self._texts[event.stream]
            yield from text.feed(event)
            self.finished = text.finished
        elif modality == "audio":
            samples = np.asarray(event.data, dtype=np.float32).reshape(-1)
            yield AudioDelta(samples * self.loudness, RATE, event.stream)
        elif modality == "image":
            for frame in np.asarray(event.data):
                yield FramesDelta(frame[None].astype(np.uint8), None, event.stream)
        elif modality == "video":
            yield FramesDelta(np.asarray(event.data, np.uint8), FPS, event.stream)
        else:
            yield ArrayDelta(np.asarray(event.data), modality, event.stream)

    def finish(self, done: Done | None) -> Iterable[Delta]:
        for text in self._texts.values():
            yield from text.finish(done)

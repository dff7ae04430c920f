"""Sample requests: what a conformance run or a test asks a model for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mstar.registry import load_object
from mstar.spec.errors import SetupError
from mstar.spec.knobs import validate_knobs
from mstar.spec.model import ModelSpec
from mstar.spec.tasks import (
    Audio,
    ChatTask,
    CompletionTask,
    EmbeddingTask,
    GenerateTask,
    Image,
    ImageTask,
    Message,
    Part,
    SpeechTask,
    Task,
    Text,
    TranscriptionTask,
    VideoTask,
    VoiceSample,
)

__all__ = ["Example", "draw_examples", "task_for"]

_WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "small", "bird", "fly", "over", "it")


@dataclass(frozen=True)
class Example:
    """One request to a model.

    :param text: the prompt. :param parts: media beside it, decoded (see :mod:`mstar.spec.tasks`).
    :param knobs: request parameters; those left out have their defaults. :param want: modalities asked for.
    :param appends: what the client sends while the request runs, as (stream, part or items).
    :param live: the streams that the client feeds; ``None``: all client streams of the model's graph.
    :param tolerance: how far numbers (not tokens) may be apart when the same request runs in another batch: absolute,
        beside a relative 1e-4.
    """

    text: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    appends: tuple[tuple[str, Any], ...] = ()
    want: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    live: tuple[str, ...] | None = None
    tolerance: float = 1e-5


def draw_examples(spec: ModelSpec, count: int, seed: int) -> list[Example]:
    """*count* requests of mixed lengths that have one right answer: greedy, or with a seed, unless they say otherwise.

    :raises SetupError: ``spec.examples`` does not return an :class:`Example`, or is needed and missing.
    """
    rng = random.Random(seed)
    return [_settled(spec, _draw(spec, rng), rng) for _ in range(count)]


def _draw(spec: ModelSpec, rng: random.Random) -> Example:
    if spec.examples is not None:
        example = load_object(spec.examples)(spec.key, rng)
        if not isinstance(example, Example):
            kind = type(example).__name__
            raise SetupError(f"{spec.examples} must return an mstar.testing.Example, it returned a {kind}")
        return example
    if "text" not in spec.inputs:
        raise SetupError(
            f"the model {spec.key!r} takes {', '.join(spec.inputs) or 'nothing'} and no text, so the suite cannot "
            "guess a request: name a function in ModelSpec.examples"
        )
    text = " ".join(rng.choice(_WORDS) for _ in range(rng.choice((1, 2, 5, 9, 17))))
    knobs = {"max_tokens": rng.randint(2, 8)} if "max_tokens" in spec.knobs.model_fields else {}
    return Example(text, knobs)


def _settled(spec: ModelSpec, example: Example, rng: random.Random) -> Example:
    settled = {"temperature": 0.0, "seed": rng.randrange(1 << 31)}
    missing = {k: v for k, v in settled.items() if k in spec.knobs.model_fields and k not in example.knobs}
    return replace(example, knobs={**example.knobs, **missing})


def task_for(
    spec: ModelSpec, example: Example, ability: str | None = None, live: tuple[str, ...] = (), **more: Any
) -> Task:
    """*example* as the task of *ability* (default: the first of generate, chat and completion that *spec* has, else its
    first ability).

    :param live: the client streams that stay open. :param more: further fields of :class:`~mstar.spec.tasks.Task`.
    :raises RequestError: a knob of the example is not valid.
    """
    known = ("generate", "chat", "completion")
    ability = ability or next((a for a in known if a in spec.abilities), spec.abilities[0])
    knobs = validate_knobs(spec.knobs, dict(example.knobs))
    common: dict[str, Any] = {"knobs": knobs, "want": example.want, "live": live, **more}
    images = tuple(part for part in example.parts if isinstance(part, Image))
    match ability:
        case "chat":
            return ChatTask(messages=(Message("user", (*example.parts, Text(example.text))),), **common)
        case "completion":
            return CompletionTask(prompt=example.text, **common)
        case "embedding":
            return EmbeddingTask(input=example.text, **common)
        case "speech":
            clip = next((part for part in example.parts if isinstance(part, Audio)), None)
            return SpeechTask(text=example.text, sample=_sample(example, clip), **common)
        case "transcription" | "translation":
            audio = next((part for part in example.parts if isinstance(part, Audio)), None)
            return TranscriptionTask(audio=audio, translate=ability == "translation", **common)
        case "image" | "image_edit":
            return ImageTask(prompt=example.text, images=images, **common)
        case "video":
            return VideoTask(prompt=example.text, images=images, **common)
        case _:
            return GenerateTask(text=example.text, parts=example.parts, **common)


def _sample(example: Example, clip: Audio | None) -> VoiceSample | None:
    """A voice to be cloned: the example's clip, and the transcript that its knobs give."""
    return None if clip is None else VoiceSample(clip, str(example.knobs.get("ref_text") or ""))

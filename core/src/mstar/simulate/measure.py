"""Measuring what a language model's steps cost here: a few loads on an otherwise idle engine, timed by its tokens."""

from __future__ import annotations

import asyncio
import random
import statistics
import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mstar.runtime.service import Service
from mstar.simulate.cost import Sample, StepShape
from mstar.spec.errors import SetupError
from mstar.spec.knobs import validate_knobs
from mstar.spec.processor import TextDelta
from mstar.spec.tasks import ChatTask, CompletionTask, Message, Task, Text

__all__ = ["Told", "ask", "measure", "prompt_shapes", "random_text"]

_PROMPTS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_NEW_TOKENS = 33
_CHUNK = 8
"""Steps that are timed together."""
_REPEATS = 3
_WORD = 5


@dataclass(frozen=True)
class Told:
    """An answer's times. *began*: monotonic seconds; *times*: likewise, one for each token. *prompt*: tokens."""

    began: float
    times: Sequence[float]
    prompt: int


async def ask(service: Service, text: str, tokens: int) -> Told:
    """Have exactly *tokens* tokens written after *text*.

    :raises RequestError: what the model says to that.
    """
    task, began = _task(service, text, tokens), time.monotonic()
    times: list[float] = []
    async with await service.generate(task) as answer:
        while deltas := await answer.take():
            now = time.monotonic()
            for delta in deltas:
                times += [now] * len(delta.tokens) if isinstance(delta, TextDelta) else []
    usage = answer.usage
    assert usage is not None
    # text that waited for the rest of a character comes with its tokens' last: their number is right, at least
    return Told(began, times[:tokens], int(usage.input["tokens"]))


def _task(service: Service, text: str, tokens: int) -> Task:
    spec = service.spec
    wanted: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    for name in wanted:
        if name not in spec.knobs.model_fields:
            raise SetupError(f"{spec.key!r} has no {name!r}: only models that write text token by token are measured")
    knobs = validate_knobs(spec.knobs, wanted)
    if "completion" in spec.abilities:
        return CompletionTask(knobs=knobs, prompt=text)
    if "chat" in spec.abilities:
        return ChatTask(knobs=knobs, messages=(Message("user", (Text(text),)),))
    raise SetupError(f"{spec.key!r} neither chats nor completes a text: only models that do are measured")


async def measure(
    service: Service,
    *,
    longest: int,
    streams: int,
    step_tokens: int,
    tell: Callable[[int, int], None],
    first_seed: int = 1 << 32,
) -> list[Sample]:
    """Times of prompts alone, and of decoding by 1 to *streams* requests at once after a short and a longer prompt.

    :param service: started, with nobody else asking. :param longest: most tokens of a prompt.
    :param step_tokens: most tokens of a step. :param tell: how many loads are done, of how many. :param first_seed: of
        the texts; who measures the same service again gives another, a thousand later, or prompts are in its cache.
    """
    texts = _Texts(first_seed)
    await ask(service, texts.of(16), 4)  # whatever is done once
    per_token = await _chars_per_token(service, texts, longest)
    prompts = [n for n in _PROMPTS if n <= longest] or [longest]
    short, long = prompts[0], max([n for n in prompts if n <= max(512, prompts[0])])
    loads = [(n, short) for n in _STREAMS if n <= streams] + [(n, long) for n in (1, 4, 16, 64) if n <= streams]
    done, samples = 0, list[Sample]()
    for prompt in prompts:
        told = [await ask(service, texts.of(int(prompt * per_token)), 1) for _ in range(_REPEATS)]
        chosen = sorted(told, key=lambda one: (one.times[0] - one.began) / one.prompt)[_REPEATS // 2]
        samples.append(Sample(chosen.times[0] - chosen.began, [*prompt_shapes(chosen.prompt, step_tokens)], 1))
        tell(done := done + 1, len(prompts) + len(loads))
    for count, prompt in loads:
        written = _NEW_TOKENS + count  # the first has its tokens while others wait for their prompts
        each = [texts.of(int(prompt * per_token)) for _ in range(count)]
        told = await asyncio.gather(*(ask(service, text, written) for text in each))
        samples += _decoding(told)
        tell(done := done + 1, len(prompts) + len(loads))
    return samples


def prompt_shapes(prompt: int, step_tokens: int) -> Iterator[StepShape]:
    """The steps of one *prompt* alone."""
    for before in range(0, prompt, step_tokens):
        count = min(step_tokens, prompt - before)
        yield StepShape(1, count, before + count, count * (before + (count + 1) / 2))


def _decoding(told: Sequence[Told]) -> list[Sample]:
    """The middle one of the stretches of ``_CHUNK`` steps in which all of *told* wrote."""
    begin = max(one.times[0] for one in told)
    end = min(one.times[-1] for one in told)
    slowest = told[0]
    first = next((n for n, at in enumerate(slowest.times) if at > begin), len(slowest.times))
    stretches = []
    for at in range(first, len(slowest.times) - _CHUNK, _CHUNK):
        if slowest.times[at + _CHUNK] > end:
            break
        context = sum(one.prompt for one in told) + len(told) * at
        shapes = [StepShape(len(told), len(told), context + len(told) * (n + 1)) for n in range(_CHUNK)]
        stretches.append(Sample(slowest.times[at + _CHUNK] - slowest.times[at], shapes))
    if not stretches:
        return []
    middle = statistics.median_low(stretch.seconds for stretch in stretches)
    return [next(stretch for stretch in stretches if stretch.seconds == middle)]


async def _chars_per_token(service: Service, texts: _Texts, longest: int) -> float:
    """Of such texts, what a chat's template adds left out."""
    few, many = [
        await ask(service, texts.of(chars), 1) for chars in (8, 8 + longest)
    ]  # a token has a character, or more
    return longest / max(many.prompt - few.prompt, 1)


def random_text(chars: int, seed: int) -> str:
    """A text of *chars* characters, which begins like no other's, so that nothing of it is found in a cache."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(string.ascii_lowercase, k=_WORD)) for _ in range(chars // (_WORD + 1) + 1)]
    return " ".join(words)[: max(chars, 1)]


class _Texts:
    """Texts one after the other."""

    def __init__(self, first_seed: int) -> None:
        self._seed = first_seed

    def of(self, chars: int) -> str:
        self._seed += 1
        return random_text(chars, self._seed)

"""Checks of what an answer is made of: every declared output, text up to a stop string, a prompt that is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import pytest

from mstar.spec.errors import RequestError
from mstar.spec.model import ModelSpec
from mstar.spec.processor import Delta, Prepared, TextDelta, modality
from mstar.testing.conformance.subject import Subject, fail
from mstar.testing.drive import Driver
from mstar.testing.examples import Example, task_for

__all__ = ["AnswerChecks"]

_DRAWN = 6
_TASKS = ("generate", "chat", "completion")


class AnswerChecks:
    """Outputs, stop strings, usage."""

    def test_every_output_is_made(self, mstar_model: Subject) -> None:
        """Sample requests give each modality that the spec declares, if need be those that ask for it."""
        spec, driver = mstar_model.spec, mstar_model.driver()
        missing = dict.fromkeys(spec.outputs)
        for request, example in mstar_model.examples(_DRAWN, seed=96).items():
            _take_out(missing, mstar_model, driver, request, example)
            for kind in [*missing]:
                wanting = replace(example, want=(kind,))
                _take_out(missing, mstar_model, driver, f"{request}-{kind}", wanting)
            if not missing:
                return
        kinds = " and ".join(map(repr, missing))
        fail(
            f"{spec.key!r}: ModelSpec.outputs declares {kinds}, but none of {_DRAWN} sample requests gave that, not "
            f"even when they asked for it (want): a client that asks waits for nothing. Take it out of outputs; or "
            "emit it to a stream to the client and let the renderer make deltas of it; or, if only some requests give "
            "it, let ModelSpec.examples draw some that do"
        )

    def test_a_stop_string_ends_the_text(self, mstar_model: Subject) -> None:
        """Text ends before the first stop string, or the processor refuses ``stop`` by name."""
        spec, driver = mstar_model.spec, mstar_model.driver()
        if "text" not in spec.outputs:
            pytest.skip(f"{spec.key!r} gives no text that a stop string could end")
        asked = mstar_model.examples(_DRAWN, seed=97)
        texts = {request: _text(_deltas(mstar_model, driver, request, e)[0]) for request, e in asked.items()}
        request = max(texts, key=lambda name: len(texts[name]))
        text = texts[request]
        if len(text) < 2:
            pytest.skip(f"{spec.key!r}: no sample request gave two characters of text; the longest was {text!r}")
        middle = len(text) // 2
        stop = text[middle - 1 : middle + 1]
        try:
            deltas, reason = _deltas(mstar_model, driver, "stopped", asked[request], stop=(stop,))
        except RequestError as error:
            if (error.param or "").startswith("stop"):
                return
            fail(f"{spec.key!r}: a sample request with stop={stop!r} is refused, without naming 'stop': {error}")
        got, want = _text(deltas), text[: text.index(stop)]
        if got != want:
            fail(
                f"{spec.key!r}: with stop={stop!r} the text is {got!r}; it should end before the first {stop!r}, as "
                f"{want!r}. {_MEND_STOP.format(processor=spec.processor)}"
            )
        if spec.outputs == ("text",) and reason != "stop":
            fail(
                f"{spec.key!r}: at a stop string the text ends, but not the request, which goes on until its end by "
                f"{reason!r}: let the renderer set finished = 'stop'. {_MEND_STOP.format(processor=spec.processor)}"
            )

    def test_the_prompt_is_counted(self, mstar_model: Subject) -> None:
        """``prompt_tokens`` of a text is more than nothing, and more for a longer one."""
        spec, driver = mstar_model.spec, mstar_model.driver()
        found = [example for example in mstar_model.examples(_DRAWN, seed=98).values() if example.text]
        if not found:
            pytest.skip(f"{spec.key!r}: its sample requests have no text to count")
        short = min(found, key=lambda example: len(example.text))
        long = replace(short, text=f"{short.text} {short.text}")
        for ability in (ability for ability in _TASKS if ability in spec.abilities):
            count = _count(driver, short, ability)
            if count is None:
                continue  # refused: test_abilities says so
            if count < 1:
                _fail_count(spec, ability, f"a request with the text {short.text!r} has prompt_tokens={count}")
            more = _count(driver, long, ability)
            if more is not None and more <= count:
                both = f"the text {short.text!r} has prompt_tokens={count}, and twice that text has {more}"
                _fail_count(spec, ability, both)


_MEND_STOP = (
    "mstar.processing.text.TextRenderer does it, given task.stop and task.include_stop. If stop strings can mean "
    "nothing here, refuse them in {processor}: RequestError(…, param='stop')"
)


def _take_out(missing: dict[str, None], subject: Subject, driver: Driver, request: str, example: Example) -> None:
    """Run *example*, and take what it gives out of *missing*. One that asks for what cannot be had may be refused."""
    try:
        deltas, _ = _deltas(subject, driver, request, example)
    except RequestError as error:
        if not example.want:
            fail(f"{subject.spec.key!r}: a sample request was refused: {error}\n  {example}")
        return
    for delta in deltas:
        missing.pop(modality(delta), None)


def _deltas(
    subject: Subject, driver: Driver, request: str, example: Example, stop: tuple[str, ...] = ()
) -> tuple[list[Delta], str]:
    """What a client gets of *example*, and why it ended; fails the test if it did not end well."""
    task = task_for(driver.spec, example, live=driver.live(example), stop=stop)
    prepared = driver.processor.prepare(task, request)
    driver.submit_prepared(prepared, example)
    driver.run()
    subject.answer(driver, request, example)
    return subject.rendered(driver, task, prepared)


def _text(deltas: Sequence[Delta]) -> str:
    """The text of the first stream that has some."""
    texts = [delta for delta in deltas if isinstance(delta, TextDelta)]
    return "".join(delta.text for delta in texts if delta.stream == texts[0].stream)


def _count(driver: Driver, example: Example, ability: str) -> int | None:
    """``prompt_tokens``; ``None`` if *example* is refused."""
    live = driver.live(example) if ability == "generate" else ()
    try:
        prepared: Prepared = driver.processor.prepare(task_for(driver.spec, example, ability, live=live), "r0")
    except RequestError:
        return None
    return prepared.prompt_tokens


def _fail_count(spec: ModelSpec, ability: str, what: str) -> NoReturn:
    fail(
        f"{spec.key!r}: {what} ({ability}): clients are told so in usage, and may be charged by it. Give "
        f"Prepared(request, prompt_tokens=…) the number of the prompt's tokens in {spec.processor}"
    )

"""Checks of what a request says: its defaults fit, each of its knobs counts, and a bad one is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from mstar.spec.check import params_of
from mstar.spec.errors import RequestError
from mstar.spec.knobs import Knobs
from mstar.spec.model import ModelSpec
from mstar.spec.processor import Prepared
from mstar.spec.request import Done, Failed
from mstar.spec.tasks import (
    Audio,
    ChatTask,
    CompletionTask,
    File,
    GenerateTask,
    Image,
    Message,
    Part,
    Task,
    Text,
    Video,
)
from mstar.testing.conformance.knob_values import vary
from mstar.testing.conformance.subject import Subject, fail
from mstar.testing.drive import Driver
from mstar.testing.examples import Example, task_for

__all__ = ["RequestChecks"]

_MUCH_TEXT = "so it goes. " * 20_000
_NO_TOKEN = 10**12


class RequestChecks:
    """Defaults, knobs, and requests that cannot be served."""

    def test_defaults_are_admitted(self, mstar_model: Subject) -> None:
        """A request that sets no knob, but those that the model asks for, is admitted by the deployment that ships with
        it."""
        spec, driver = mstar_model.spec, mstar_model.driver()
        for request, example in mstar_model.examples(3, seed=91).items():
            try:
                plain = _plain(driver, example, mstar_model.required(example))
                driver.submit(request, plain)
                driver.worker.step()
                driver.take()
                end = driver.ended.get(request)
                refusal = end.message if isinstance(end, Failed) and end.status < 500 else ""
            except RequestError as error:
                refusal = str(error)
            if refusal:
                budget = {n: f.default for n, f in spec.knobs.model_fields.items() if n.startswith(("max_", "num_"))}
                fail(
                    f"{spec.key!r}: a request with every knob at its default {budget or ''} is refused by the model's "
                    f"own deployment: {refusal}\n  Lower the knob's default in {spec.knobs.__name__}, or give the "
                    "default deployment more room (resources: {kv: {tokens: …}}). If only the tiny checkpoint is too "
                    "small, write the published model's context length into its config."
                )
            driver.cancel(request)
            driver.take()

    def test_every_knob_counts(self, mstar_model: Subject) -> None:
        """Somebody reads each knob: the processor, the graph, a route, a renderer."""
        driver = mstar_model.driver()
        spec = mstar_model.spec
        watched, seen = _watched(spec.knobs)
        driver.spec = replace(spec, knobs=watched)
        seen.update(param.name for _, param in params_of(driver.worker.plan.graph))
        for request, example in mstar_model.examples(4, seed=92).items():
            task = task_for(driver.spec, example, live=driver.live(example))
            seen.update(name for name in spec.knobs.model_fields if _changes(driver, task, name))
            prepared = driver.processor.prepare(task, request)
            prepared.request.params = _Watched(prepared.request.params, seen)
            driver.submit_prepared(prepared, example)
            driver.run()
            if isinstance(driver.ended.get(request), Done):
                mstar_model.rendered(driver, task, prepared)
        unread = [name for name in spec.knobs.model_fields if name not in seen]
        if unread:
            name = unread[0]
            fail(
                f"{spec.key!r}: nothing reads {', '.join(map(repr, unread))}: a client sets it and nothing changes. "
                f"Use it (task.knobs.{name} in the processor, Param({name!r}) in the graph, "
                f"request.params[{name!r}] in a route or demand), or leave it out of {spec.knobs.__name__}"
            )

    def test_every_option_counts(self, mstar_model: Subject) -> None:
        """Somebody reads each option: the processor or the model."""
        spec = mstar_model.spec
        if not spec.options.model_fields:
            pytest.skip(f"{spec.key!r} has no options")
        watched, seen = _watched(spec.options)
        driver = mstar_model.watching(replace(spec, options=watched))
        for request, example in mstar_model.examples(2, seed=94).items():
            driver.submit(request, example)
        driver.run()
        unread = [name for name in spec.options.model_fields if name not in seen]
        if unread:
            fail(
                f"{spec.key!r}: nothing reads the options {', '.join(map(repr, unread))}: an operator sets them under "
                f"model_kwargs and nothing changes. Use context.options.{unread[0]} in {spec.model} or "
                f"{spec.processor}, or leave it out of {spec.options.__name__}"
            )

    def test_knobs_change_something(self, mstar_model: Subject) -> None:
        """A knob that only the graph hands on changes some answer to a sample request."""
        spec, driver = mstar_model.spec, mstar_model.driver()
        examples = list(mstar_model.examples(3, seed=95).values())
        handed = {param.name for _, param in params_of(driver.worker.plan.graph)} - {*spec.knobs.may_change_nothing}
        for name in sorted(handed & spec.knobs.model_fields.keys()):
            tasks = [task_for(spec, example, live=driver.live(example)) for example in examples]
            if any(_changes(driver, task, name) for task in tasks):
                continue  # the processor has its part in it
            values = vary(spec.knobs, name)
            if values and not any(_answers_differ(mstar_model, example, name, values) for example in examples):
                (where, _), *_ = ((w, p) for w, p in params_of(driver.worker.plan.graph) if p.name == name)
                fail(
                    f"{spec.key!r}: knob {name!r} changes nothing: {', '.join(map(repr, values))} give the same "
                    f"answers to {len(examples)} sample requests ({where} has it). Use it in the node; or, if its "
                    f"effect is too small or rare for them, name it in {spec.knobs.__name__}.may_change_nothing"
                )

    def test_what_cannot_be_served_is_refused(self, mstar_model: Subject) -> None:
        """The processor refuses a bad request with an error that names the field, and the next one is answered."""
        spec, driver = mstar_model.spec, mstar_model.driver()
        (example,) = mstar_model.examples(1, seed=93).values()
        for number, odd in enumerate(_odd(spec, task_for(spec, example, live=driver.live(example)))):
            request = f"odd{number}"
            prepared = _refused(spec, driver, odd, request)
            if prepared is None:
                continue
            if odd.wrong:
                fail(
                    f"{spec.key!r}: {odd.what} is accepted, and that can mean nothing to this model: raise a "
                    f"RequestError(…, param={odd.field!r}) in {spec.processor}"
                )
            driver.submit_prepared(prepared, replace(example, appends=example.appends if odd.runs else ()))
            if odd.runs:
                driver.run()
            else:
                driver.cancel(request)
                driver.take()
            end = driver.ended.get(request)
            if isinstance(end, Failed) and end.status >= 500:
                fail(
                    f"{spec.key!r}: {odd.what} fails inside the model ({end.message}): a client gets 500. Refuse it in "
                    f"{spec.processor} with a RequestError that names {odd.field!r}, or let the nodes take it"
                )
        driver.submit("next", example)
        driver.run()
        mstar_model.check_same(driver, {"next": example}, "because requests before it were refused")
        mstar_model.check_empty(driver, "bad requests were refused")


def _plain(driver: Driver, example: Example, knobs: dict[str, Any]) -> Example:
    """*example* without any knobs but *knobs*, and those without which the processor finds something missing."""
    while True:
        plain = replace(example, knobs=knobs)
        try:
            driver.prepare("plain", plain)
        except RequestError as error:
            name = error.param or ""
            if error.code != "missing_input" or name in knobs or name not in example.knobs:
                raise
            knobs = {**knobs, name: example.knobs[name]}
        else:
            return plain


# --- knobs ------------------------------------------------------------------------------------------------------------


def _watched(cls: type[Knobs]) -> tuple[type[Knobs], set[str]]:
    """A subclass of *cls* that notes which of its fields are read as attributes."""
    names, seen = frozenset(cls.model_fields), set[str]()

    class Watched(cls):  # type: ignore[misc,valid-type]
        def __getattribute__(self, name: str) -> Any:
            if name in names:
                seen.add(name)
            return super().__getattribute__(name)

    Watched.__name__ = cls.__name__
    return Watched, seen


class _Watched(dict[str, Any]):
    """A request's params that note which of them are read."""

    def __init__(self, values: dict[str, Any], seen: set[str]):
        super().__init__(values)
        self.seen = seen

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)


def _answers_differ(subject: Subject, example: Example, name: str, values: Sequence[Any]) -> bool:
    """Whether values of knob *name* lead to different answers."""
    first, *others = [replace(example, knobs={**example.knobs, name: value}) for value in values]
    answer = subject.alone(first)
    return any(_differs(answer, subject.alone(other)) for other in others) or _differs(answer, subject.alone(example))


def _differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() != other.keys() or any(not np.array_equal(one[name], other[name]) for name in one)


def _changes(driver: Driver, task: Task, name: str) -> bool:
    """Whether another value of knob *name* changes what the processor prepares, the params apart."""
    before = driver.processor.prepare(task, "r0")
    for value in vary(type(task.knobs), name):
        other = replace(task, knobs=task.knobs.model_copy(update={name: value}))
        try:
            after = driver.processor.prepare(other, "r0")
        except RequestError:
            return True  # it has an opinion about it
        if not _alike(before, after):
            return True
    return False


def _alike(one: Prepared, other: Prepared) -> bool:
    a, b = one.request, other.request
    return (
        a.inputs.keys() == b.inputs.keys()
        and all(np.array_equal(a.inputs[name], b.inputs[name]) for name in a.inputs)
        and (a.sampling, a.want, a.client_streams) == (b.sampling, b.want, b.client_streams)
    )


# --- requests that cannot be served -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Odd:
    """A request that a client may well send. *field*: to name if it is refused. *wrong*: it must be refused. *runs*:
    if it is accepted, it is small enough to be run."""

    what: str
    task: Task
    field: str
    wrong: bool = True
    runs: bool = True


def _odd(spec: ModelSpec, sample: Task) -> Iterator[_Odd]:
    strangers = _strangers(spec)
    knobs = sample.knobs
    if isinstance(sample, GenerateTask):
        if "text" in spec.inputs and not sample.live:
            yield _Odd("an empty text", replace(sample, text="", parts=()), "text", wrong=False)
            yield _Odd("a very long text", replace(sample, text=_MUCH_TEXT), "text", wrong=False, runs=False)
        for part in strangers:
            kind = type(part).__name__.lower()
            where = f"parts[{len(sample.parts)}]"
            yield _Odd(f"a part of kind {kind!r}", replace(sample, parts=(*sample.parts, part)), where)
    if "chat" in spec.abilities:
        yield _Odd("a chat without messages", ChatTask(knobs=knobs, messages=()), "messages")
        for part in strangers:
            message = Message("user", (Text("Hello"), part))
            kind = type(part).__name__.lower()
            yield _Odd(
                f"a message with a part of kind {kind!r}", ChatTask(knobs=knobs, messages=(message,)), "messages"
            )
    if "completion" in spec.abilities:
        yield _Odd("an empty prompt", CompletionTask(knobs=knobs, prompt=""), "prompt", wrong=False)
        for token in (-1, _NO_TOKEN):
            yield _Odd(f"the prompt [{token}]", CompletionTask(knobs=knobs, prompt=[token]), "prompt")


def _strangers(spec: ModelSpec) -> Sequence[Part]:
    """A part of each kind that the model does not declare."""
    parts: dict[str, Part] = {
        "image": Image(np.zeros((4, 4, 3), dtype=np.uint8)),
        "audio": Audio(np.zeros(160, dtype=np.float32), 16_000),
        "video": Video(np.zeros((2, 4, 4, 3), dtype=np.uint8), 2.0),
        "file": File(b"\0conformance", "conformance.bin"),
    }
    return [part for kind, part in parts.items() if kind not in spec.inputs]


def _refused(spec: ModelSpec, driver: Driver, odd: _Odd, request: str) -> Prepared | None:
    """``None`` if the processor refuses *odd*, and in the right way."""
    try:
        prepared: Prepared = driver.processor.prepare(odd.task, request)
        return prepared
    except RequestError as error:
        if not (error.param or "").startswith(odd.field.split("[")[0]):
            fail(
                f"{spec.key!r}: {odd.what} is refused with param {error.param!r}, which should name {odd.field!r}, the "
                f"field at fault: {error}"
            )
        return None
    except Exception as error:
        fail(
            f"{spec.key!r}: {odd.what} makes {spec.processor} raise {type(error).__name__}: {error}. "
            f"A client gets 500: raise a RequestError(…, param={odd.field!r}) instead"
        )

"""Checks of a model's spec: what can be known without weights."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from mstar.nn.model import Model
from mstar.registry import load_object
from mstar.spec.errors import RequestError, nearest
from mstar.spec.knobs import Knobs, validate_knobs
from mstar.spec.model import ModelSpec
from mstar.spec.processor import Processor
from mstar.testing.conformance.knob_values import bad_values, options_of, unbounded
from mstar.testing.conformance.subject import Subject, fail
from mstar.testing.examples import draw_examples, task_for

__all__ = ["SpecChecks"]

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VAGUE = ("", "other", "unknown", "none", "custom", "todo", "tbd")
_NEEDS = {"chat": " (a TextProcessor needs a chat template in the checkpoint's tokenizer_config.json)"}
_TASKS = ("generate", "chat", "completion")


class SpecChecks:
    """Names, licence, knobs, abilities."""

    def test_spec(self, mstar_model: Subject) -> None:
        """Every field of the spec has the type and form that it must have."""
        faults = list(_spec_faults(mstar_model.spec))
        if faults:
            fail(f"the ModelSpec of {mstar_model.spec.key!r} is not right:\n  " + "\n  ".join(faults))

    def test_licence(self, mstar_model: Subject) -> None:
        """The weights' terms have a name and a link, and do not contradict themselves."""
        spec, licence = mstar_model.spec, mstar_model.spec.licence
        if licence.name.strip().lower() in _VAGUE:
            fail(f"{spec.key!r}: licence {licence.name!r} says nothing: name the terms of the weights ('Apache-2.0')")
        if spec.weights and not licence.url.startswith(("https://", "http://")):
            fail(
                f"{spec.key!r}: licence {licence.name!r} has no link (url={licence.url!r}): users are shown where the "
                "terms of the weights stand: Licence(name, url)"
            )
        if licence.permissive and not licence.commercial:
            fail(
                f"{spec.key!r}: licence {licence.name!r} forbids commercial use, so it is not permissive: set "
                "permissive=False, then `mstar license accept` asks the operator"
            )

    def test_knobs_are_described(self, mstar_model: Subject) -> None:
        """Every knob and every option has a help text."""
        for kind, cls in _declared(mstar_model.spec):
            for name, field in cls.model_fields.items():
                if not (field.description or "").strip():
                    fail(
                        f"{mstar_model.spec.key!r}: {kind} {name!r} has no description: give Field(…, description='…')"
                    )

    def test_knob_defaults_are_valid(self, mstar_model: Subject) -> None:
        """A request that sets every knob to its default is a valid request."""
        cls = mstar_model.spec.knobs
        for name, field in cls.model_fields.items():
            default = field.get_default(call_default_factory=True, validated_data={})
            if field.is_required():
                continue
            given = _required(mstar_model.spec) | {name: default}
            try:
                validate_knobs(cls, given)
            except RequestError as error:
                fail(f"{mstar_model.spec.key!r}: the default {default!r} of knob {name!r} is not valid: {error}")

    def test_knobs_have_bounds(self, mstar_model: Subject) -> None:
        """Every number, text and list has a bound, so that nobody can ask for a million steps by mistake."""
        for kind, cls in _declared(mstar_model.spec):
            faults = list(unbounded(cls))
            if faults:
                fail(f"{mstar_model.spec.key!r}: {kind}s without bounds:\n  " + "\n  ".join(faults))

    def test_knob_bounds_are_enforced(self, mstar_model: Subject) -> None:
        """Values out of bounds or of another type are refused with an error that names the knob."""
        spec = mstar_model.spec
        bad = [(b.name, b.value, b.why) for b in bad_values(spec.knobs)]
        floats = [n for n, options in options_of(spec.knobs).items() if any(o.get("type") == "number" for o in options)]
        bad += [(name, value, "not finite") for name in floats for value in (math.nan, math.inf)]
        for name, value, why in bad:
            _check_refused(spec, name, value, why)

    def test_unknown_knob_is_refused(self, mstar_model: Subject) -> None:
        """A misspelled knob is refused with the nearest right name, not ignored."""
        spec = mstar_model.spec
        word = next((name for name in spec.knobs.model_fields if len(name) > 3), "knob")
        wrong = word[:-1] + "qq"
        error = _check_refused(spec, wrong, 1, "unknown")
        if word in spec.knobs.model_fields and nearest(wrong, spec.knobs.model_fields) not in str(error):
            fail(f"{spec.key!r}: the error for unknown knob {wrong!r} does not name the nearest one: {error}")

    def test_abilities(self, mstar_model: Subject) -> None:
        """The processor prepares a task of every ability that the spec declares."""
        mstar_model.require_checkpoint()
        spec = mstar_model.spec
        if list(_target_faults("processor", spec.processor, Processor)):
            pytest.skip(f"{spec.processor} cannot be imported: see test_spec")
        processor: Processor = mstar_model.processor()
        (example,) = draw_examples(spec, 1, seed=21)
        for ability in spec.abilities:
            if ability not in _TASKS:
                continue  # such tasks come from the route's adapter: test_http_round_trip
            fed = tuple(feed.name for feed in spec.live) if ability == "generate" else ()
            live = fed if example.live is None else example.live
            try:
                prepared = processor.prepare(task_for(spec, example, ability, live=live), "r0")
            except RequestError as error:
                fail(
                    f"{spec.key!r} declares the ability {ability!r}, but its processor refuses a sample request of "
                    f"that kind: {error}\n  request: {example}\n  Take {ability!r} out of ModelSpec.abilities or let "
                    f"{spec.processor} prepare it{_NEEDS.get(ability, '')}."
                )
            if prepared.request.id != "r0":
                fail(f"{spec.processor}: prepare() must use the request id that it is given")


def _declared(spec: ModelSpec) -> tuple[tuple[str, type[Knobs]], ...]:
    return ("knob", spec.knobs), ("option", spec.options)


def _spec_faults(spec: ModelSpec) -> Any:
    """What the registry, which has checked the types of all fields, lets pass."""
    if not _KEY.fullmatch(spec.key):
        yield f"key {spec.key!r}: letters, digits, '.', '_' and '-' only; it is typed on command lines"
    if any(ref.source == "hub" and ref.revision is None for ref in spec.weights):
        yield "weights from the hub have no revision: pin the commit, or what is served changes under its users"
    if spec.knobs.model_config.get("extra") != "forbid":
        yield "knobs: the class sets extra to something else than 'forbid', so misspelled knobs would be ignored"
    if not spec.abilities:
        yield "abilities is empty: declare at least 'generate'"
    if not spec.outputs:
        yield "outputs is empty: name the modalities that the model gives"
    if spec.size == 0:
        yield f"size {spec.size}: bytes of the published weights, or None"
    yield from _target_faults("model", spec.model, Model)
    yield from _target_faults("processor", spec.processor, Processor)


def _target_faults(field: str, target: str, base: type) -> Any:
    try:
        found = load_object(target)
    except Exception as error:
        yield f"{field} {target!r} cannot be imported: {type(error).__name__}: {error}"
        return
    if not (isinstance(found, type) and issubclass(found, base)):
        yield f"{field} {target!r} is no subclass of {base.__module__}.{base.__name__}"


def _required(spec: ModelSpec) -> dict[str, Any]:
    """Values for the knobs that have no default, from a sample request."""
    names = [name for name, field in spec.knobs.model_fields.items() if field.is_required()]
    if not names:
        return {}
    (example,) = draw_examples(spec, 1, seed=0)
    return {name: example.knobs[name] for name in names if name in example.knobs}


def _check_refused(spec: ModelSpec, name: str, value: Any, why: str) -> RequestError:
    """That *value* is refused with a RequestError that names *name*."""
    shown = repr(value)[:60]
    try:
        validate_knobs(spec.knobs, _required(spec) | {name: value})
    except RequestError as error:
        if name not in (error.param or ""):
            fail(f"{spec.key!r}: {name}={shown} is refused, but the error's param is {error.param!r}: {error}")
        return error
    except Exception as error:
        pytest.fail(f"{spec.key!r}: {name}={shown} raised {type(error).__name__}: a client would get 500: {error}")
    fail(f"{spec.key!r}: knob {name!r} accepts {shown}, which is {why}. Bounds that are declared must be enforced.")

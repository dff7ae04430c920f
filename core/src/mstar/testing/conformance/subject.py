"""The model under test: its spec, its checkpoint, its workers and the right answers to its sample requests."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from mstar.plugins import Plugin, installed_entries, load_plugins
from mstar.registry import RegisteredModel, Registry, load_object
from mstar.resources.base import IntegrityError
from mstar.runtime.deployment_files import packaged_deployment
from mstar.settings import Settings
from mstar.spec.deployment import merge_deployment
from mstar.spec.errors import PluginError, RequestError, SetupError, nearest
from mstar.spec.knobs import read_options
from mstar.spec.model import ModelSpec
from mstar.spec.processor import Delta, Prepared, Processor, ProcessorContext
from mstar.spec.request import Done, Failed
from mstar.spec.tasks import Task
from mstar.testing.conformance.knob_values import vary
from mstar.testing.drive import Driver, RestlessError
from mstar.testing.examples import Example, draw_examples
from mstar.worker.build import make_model

__all__ = ["Subject", "fail", "find_plugin", "models_of", "open_registry"]

POOL_TOKENS = 4096
"""The least size of pools that the deployment leaves to the machine's memory."""


def fail(message: str) -> NoReturn:
    """End the test with *message* alone: the reader wants what is wrong, not where the suite noticed."""
    pytest.fail(message, pytrace=False)


def open_registry(plugin: str | None) -> Registry:
    """A registry of the installed plugins and of *plugin*, which may also be a module's name."""
    settings = Settings.from_env(os.environ)
    if plugin is not None and not _installed(plugin):
        settings = replace(settings, extra_plugins=(*settings.extra_plugins, plugin))
    return Registry(load_plugins(settings))


def _installed(name: str) -> bool:
    entries = installed_entries()[0]
    return any(name in (entry.name, entry.dist.name if entry.dist else "") for entry in entries)


def find_plugin(registry: Registry, name: str) -> Plugin:
    """The loaded plugin called *name*: its entry point, distribution or module.

    :raises PluginError: it was put aside (with the reason), or there is none.
    """
    entries = installed_entries()[0]
    names = {name} | {e.name for e in entries if name in (e.value, e.dist.name if e.dist else "")}
    for plugin in registry.plugins.loaded:
        if plugin.name in names or plugin.source in names:
            return plugin
    for broken in registry.plugins.broken:
        if broken.name in names:
            raise PluginError(str(broken)) from broken.error
    if name in registry.plugins.blocked:
        raise PluginError(f"plugin {name!r} is blocked by MSTAR_PLUGINS or MSTAR_BLOCK_PLUGINS")
    raise PluginError(
        f"there is no plugin {name!r}{nearest(name, [plugin.name for plugin in registry.plugins.loaded])}"
    )


def models_of(registry: Registry, plugin: Plugin) -> list[str]:
    """The keys of *plugin*'s models."""
    return [key for key, model in registry.models.items() if model.plugin == plugin]


class _Driver(Driver):
    """A driver that tells a leak, which a worker notices whenever it is idle, and a loop without end in words."""

    def run(self, until: Callable[[], bool] = lambda: False, most: int = 20_000) -> None:
        try:
            super().run(until, most)
        except IntegrityError as error:
            fail(_leak(self.spec.key, "requests ended", error))
        except RestlessError as error:
            fail(f"{self.spec.key!r}: {error}. Does every loop end, whatever its request says?")


class Subject:
    """One model under test.

    :param weights: its checkpoint's folder, or ``None``. The model runs on the CPU in float32, where batches change
        nothing (promise P6).
    """

    def __init__(self, registry: Registry, key: str, weights: Path | None):
        self.registry, self.weights = registry, weights
        self.spec, self.plugin = registry.models[registry.model(key).key]
        self._causes: dict[str, str] = {}  # why a request failed → the first test that saw it
        self._drawn: dict[int, list[Example]] = {}
        self._answers: dict[int, tuple[Example, Mapping[str, Any]]] = {}

    @property
    def lacks_checkpoint(self) -> bool:
        return bool(self.spec.weights) and self.weights is None

    def require_checkpoint(self) -> None:
        """Skip the test if the model cannot be loaded for lack of a checkpoint; another test reports that."""
        if self.lacks_checkpoint:
            pytest.skip(f"{self.spec.key!r} has no tiny checkpoint: see test_checkpoint")

    def processor(self) -> Processor:
        """A processor with the model's own deployment; skips the test if that is not valid."""
        try:
            deployment = merge_deployment(self.spec.key, packaged_deployment(self.spec))
            options = read_options(self.spec.options, deployment.model_kwargs)
        except SetupError:
            pytest.skip("the default deployment is not valid: see test_deployment")
        made: Processor = load_object(self.spec.processor)(ProcessorContext(self.spec, self.weights, options))
        return made

    @cached_property
    def overrides(self) -> dict[str, Any]:
        """The deployment of the tests: this CPU, one thread, and pools of a bounded size."""
        deployment = merge_deployment(self.spec.key, packaged_deployment(self.spec))
        model = make_model(self.spec, self.weights, deployment, torch.device("cpu"), torch.float32)
        unsized = {
            name: {"tokens": max(POOL_TOKENS, 2 * getattr(spec, "max_tokens", 0))}  # a whole request, with guidance
            for name, spec in model.resources().items()
            if getattr(spec, "tokens", 0) is None and "tokens" not in deployment.resources.get(name, {})
        }
        return {
            "device": "cpu",
            "dtype": "float32",
            "executor": "inline",
            "engine": {"threads": 1, "runner": "eager"},
            "resources": unsized,
        }

    def required(self, example: Example) -> dict[str, Any]:
        """The knobs of *example* that a request cannot leave out."""
        fields = self.spec.knobs.model_fields
        return {name: value for name, value in example.knobs.items() if name in fields and fields[name].is_required()}

    @cached_property
    def load_fault(self) -> Exception | None:
        """Why the model cannot be loaded, if it cannot."""
        try:
            Driver(self.spec, self.registry, self.weights, **self.overrides)
        except Exception as error:
            return error
        return None

    def driver(self, **overrides: Any) -> Driver:
        """A fresh worker; skips the test if the model does not load (``test_it_loads`` says why)."""
        self.require_checkpoint()
        if self.load_fault is not None:
            pytest.skip(f"{self.spec.key!r} does not load: see test_it_loads")
        return _Driver(self.spec, self.registry, self.weights, **{**self.overrides, **overrides})

    def watching(self, spec: ModelSpec) -> Driver:
        """As :meth:`driver`, but of *spec* in the model's place."""
        self.driver()
        registry = copy(self.registry)
        registry.models = {**registry.models, spec.key: RegisteredModel(spec, self.plugin)}
        return _Driver(spec, registry, self.weights, **self.overrides)

    def examples(self, count: int, seed: int) -> dict[str, Example]:
        """Request id → sample request. Checks that name the same *seed* get the same ones, and so share what each of
        them gives alone."""
        if len(self._drawn.get(seed, ())) < count:
            self._drawn[seed] = draw_examples(self.spec, count, seed)
        return {f"r{i}": example for i, example in enumerate(self._drawn[seed][:count])}

    def mixed(self, count: int, seed: int) -> dict[str, Example]:
        """As :meth:`examples`, but with knobs drawn at random where the example leaves them open."""
        rng = random.Random(seed)
        return {name: self._mixed(example, rng) for name, example in self.examples(count, seed).items()}

    def _mixed(self, example: Example, rng: random.Random) -> Example:
        fields = self.spec.knobs.model_fields
        free = [name for name in fields if name not in example.knobs]
        if {"temperature", "seed"} <= fields.keys():  # an answer that is drawn is one right answer, too
            free.append("temperature")
        for name in free:
            choices = vary(self.spec.knobs, name)
            if choices and rng.random() < 0.7:
                changed = replace(example, knobs={**example.knobs, name: rng.choice(choices)})
                example = changed if self._accepts(changed) else example
        return example

    def _accepts(self, example: Example) -> bool:
        """Whether the processor takes *example*: knobs may exclude each other."""
        try:
            self._preparer.prepare("r0", example)
        except RequestError:
            return False
        return True

    @cached_property
    def _preparer(self) -> Driver:
        return self.driver()

    def alone(self, example: Example) -> Mapping[str, Any]:
        """What *example* gives when it is the only request that a fresh worker ever sees."""
        if id(example) not in self._answers:
            driver = self.driver()
            driver.submit("alone", example)
            driver.run()
            self._answers[id(example)] = example, self.answer(driver, "alone", example)
        return self._answers[id(example)][1]

    def answer(self, driver: Driver, request: str, example: Example) -> Mapping[str, Any]:
        """What *request* came to; fails the test if it did not end well."""
        end = driver.ended.get(request)
        if end is None:
            fail(f"{self.spec.key!r}: the request never ended: {example}. Does every loop end, is every stream fed?")
        if isinstance(end, Failed):
            test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("[")[0].rpartition("::")[2]
            first = self._causes.setdefault(end.message, test)
            same = "" if first == test else f"\n  The cause is that of {first}: mend that first."
            fail(f"{self.spec.key!r}: a sample request failed ({end.code}): {end.message}\n  {example}{same}")
        return driver.result(request)

    def rendered(self, driver: Driver, task: Task, prepared: Prepared) -> tuple[list[Delta], str]:
        """What the client gets of a request that ended well, and why that ended; fails the test if rendering does."""
        done = driver.ended[prepared.request.id]
        assert isinstance(done, Done), done
        deltas: list[Delta] = []
        try:
            renderer = driver.processor.renderer(task, prepared)
            for event in driver.emitted.get(prepared.request.id, ()):
                deltas += renderer.feed(event)
                if renderer.finished is not None:
                    return [*deltas, *renderer.finish(None)], renderer.finished
            return [*deltas, *renderer.finish(done)], done.reason
        except Exception as error:
            fail(f"{self.spec.key!r}: its renderer raised {type(error).__name__}: {error}: the client gets 500")

    def check_same(self, driver: Driver, asked: Mapping[str, Example], what: str) -> None:
        """Each of *asked* that ended on its own has the answer that it has alone."""
        for request, example in asked.items():
            end = driver.ended.get(request)
            if isinstance(end, Done) and end.reason == "cancelled":
                continue
            got, want = self.answer(driver, request, example), self.alone(example)
            for stream in sorted(want.keys() | got.keys()):
                difference = _difference(want.get(stream), got.get(stream), example.tolerance)
                if difference:
                    fail(
                        f"{self.spec.key!r}: stream {stream!r} changed {what}: {difference}\n  request: {example}\n"
                        "  A node must treat each row by itself and keep nothing about a request on itself: state "
                        "belongs in resources (step['…']), randomness in the sampler: a batch may change nothing."
                    )

    def check_empty(self, driver: Driver, what: str) -> None:
        """Every pool of *driver* is empty and its books balance."""
        try:
            driver.assert_empty()
        except (IntegrityError, AssertionError) as error:
            fail(_leak(self.spec.key, what, error))


def _leak(key: str, what: str, error: BaseException) -> str:
    return (
        f"{key!r}: {what}, but something of them is left: {error}\n  A resource's close() must free all that reserve() "
        "and open() took, whatever ended the request."
    )


def _difference(want: Any, got: Any, tolerance: float) -> str:
    """How *got* differs from *want*; empty if it does not."""
    if want is None or got is None:
        silent, other = ("alone", "now") if want is None else ("now", "alone")
        return f"it carried nothing {silent}, and something {other}"
    if isinstance(want, list) or isinstance(got, list):
        return "" if want == got else f"alone {_short(want)}, now {_short(got)}"
    want, got = np.asarray(want), np.asarray(got)
    if want.shape != got.shape:
        return f"alone of shape {want.shape}, now {got.shape}"
    if np.allclose(got, want, rtol=1e-4, atol=tolerance, equal_nan=True):
        return ""
    return f"values differ by up to {np.abs(got.astype(np.float64) - want).max():.3g} (tolerance {tolerance:g})"


def _short(items: Sequence[Any]) -> str:
    return f"{list(items[:12])}{' …' if len(items) > 12 else ''}"


@contextmanager
def quiet() -> Iterator[None]:
    """Without the worker's reports of faults that a test causes on purpose."""
    logger = logging.getLogger("mstar")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)

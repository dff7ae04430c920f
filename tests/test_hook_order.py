"""The observers' documented order: a toy model runs with every observer recorded, for each way to end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest

import mstar
from mstar import hookspecs
from mstar.engine.eager import EagerRunner
from mstar.nn.node import Node, Step
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.spec.request import EngineRequest
from mstar.testing.drive import Driver
from mstar.testing.miniatures import Example, miniature
from mstar.testing.miniatures.common import encode

OBSERVERS = {name for name in vars(hookspecs) if name.startswith(("mstar_request_", "mstar_step_"))}
POISON = "z"
Call = tuple[Any, ...]


class PoisonedRunner(EagerRunner):
    """Fails on a step in which the poison is among the tokens."""

    def run(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        if encode(POISON)[0] in inputs["ids"].tolist():
            raise RuntimeError("poisoned")
        return super().run(node, entry, step, inputs)


def watcher(name: str, calls: list[Call], fails: tuple[str, ...] = ()) -> ModuleType:
    """A plugin that writes down each call of every observer, and raises afterwards in those that *fails* names."""

    def submitted(request: EngineRequest) -> None:
        write("mstar_request_submitted", "submitted", request.id)

    def refused(request: EngineRequest, event: Any) -> None:
        write("mstar_request_refused", "refused", request.id, event.code)

    def started(request: EngineRequest, queued_s: float) -> None:
        assert queued_s >= 0
        write("mstar_request_started", "started", request.id)

    def ended(request: EngineRequest, event: Any) -> None:
        assert event.id == request.id
        write("mstar_request_ended", "ended", request.id, getattr(event, "reason", None) or event.message)

    def step(node: str, entry: str, rows: int, tokens: int, seconds: float) -> None:
        assert seconds > 0
        write("mstar_step_done", "step", node, entry, rows, tokens)

    def write(hook: str, *call: Any) -> None:
        calls.append(call)
        if hook in fails:
            raise OSError(f"{name} cannot write")

    module = ModuleType(name)
    functions: dict[str, Callable[..., None]] = {
        "mstar_request_submitted": submitted,
        "mstar_request_refused": refused,
        "mstar_request_started": started,
        "mstar_request_ended": ended,
        "mstar_step_done": step,
    }
    assert functions.keys() == OBSERVERS, "an observer that this test does not know"
    for hook, function in functions.items():
        setattr(module, hook, mstar.hookimpl(function, specname=hook))
    return module


def drive(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, **overrides: Any) -> Driver:
    """A worker of ``mini_chat`` that *modules* watch and that the poison breaks."""
    engines = ModuleType("poisoned_engine")
    engines.mstar_engines = mstar.hookimpl(lambda: {"poisoned": "poisoned_engine:Runner"}, specname="mstar_engines")  # type: ignore[attr-defined]
    engines.Runner = PoisonedRunner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "poisoned_engine", engines)
    plugins = load_plugins(Settings(plugins=(), extra_plugins=("mstar.testing.miniatures", "poisoned_engine")))
    for module in modules:
        plugins.add(module.__name__, "1.0", module.__name__, lambda module=module: module)  # type: ignore[misc]
    assert plugins.broken == []
    return Driver(miniature("mini_chat"), Registry(plugins), engine={"runner": "poisoned"}, **overrides)


def talk(driver: Driver) -> None:
    """One request that ends well, one that fails, one cancelled while it runs and one while it waits, one refused."""
    driver.submit("well", Example("ab", {"max_tokens": 3}))
    driver.submit("fails", Example(POISON, {"max_tokens": 3}))
    driver.submit("cancelled", Example("cdf", {"max_tokens": 9}))
    driver.submit("waits", Example("f", {"max_tokens": 9}))
    driver.submit("refused", Example("g", {"max_tokens": 9}))
    driver.worker.step()
    driver.cancel("waits")
    driver.worker.step()
    driver.worker.step()
    driver.cancel("cancelled")
    driver.run()
    driver.assert_empty()


LIMITS = {"max_concurrent_requests": 3, "scheduler": {"max_queue": 1}}
ORDER: list[Call] = [
    # One may wait: whoever does starts when the next one comes, until three run.
    ("submitted", "well"),
    ("started", "well"),
    ("submitted", "fails"),
    ("started", "fails"),
    ("submitted", "cancelled"),
    ("started", "cancelled"),
    ("submitted", "waits"),
    ("refused", "refused", "queue_full"),
    # The first step. Its three prompts fail together and are run again in halves, so that one fails alone.
    ("step", "lm", "forward", 1, 2),
    ("step", "lm", "forward", 1, 3),
    ("ended", "fails", "the model failed on this request: RuntimeError: poisoned"),
    ("ended", "waits", "cancelled"),  # it never started
    # Two more steps of two requests: the third token of one ends it.
    ("step", "lm", "forward", 2, 2),
    ("step", "lm", "forward", 2, 2),
    ("ended", "well", "length"),
    ("ended", "cancelled", "cancelled"),
]


def test_the_order_of_the_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Call] = []
    talk(drive(monkeypatch, watcher("watch", calls), **LIMITS))
    assert calls == ORDER


def test_of_several_plugins_the_last_loaded_is_called_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Call] = []
    tagged = [watcher(name, _Tagged(name, calls)) for name in ("early", "late")]
    talk(drive(monkeypatch, *tagged, **LIMITS))
    assert calls == [(name, *call) for call in ORDER for name in ("late", "early")]


class _Tagged(list[Call]):
    """Appends to another list, with a name in front."""

    def __init__(self, name: str, calls: list[Call]):
        super().__init__()
        self.name, self.calls = name, calls

    def append(self, call: Call) -> None:
        self.calls.append((self.name, *call))


def test_observers_that_raise_cost_no_request_and_no_other_observer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Call] = []
    calls: list[Call] = []
    driver = drive(monkeypatch, watcher("watch", calls), watcher("clumsy", seen, tuple(OBSERVERS)), **LIMITS)
    with caplog.at_level(logging.ERROR, "mstar.worker.observers"):
        talk(driver)
    assert calls == ORDER
    assert seen == ORDER
    assert driver.result("well")["text"]
    told = [record for record in caplog.records if record.name == "mstar.worker.observers"]
    assert sorted(record.getMessage() for record in told) == [
        f"plugin 'clumsy' failed in {hook}; further failures there are counted only" for hook in sorted(OBSERVERS)
    ]
    assert all(record.exc_info for record in told)
    assert driver.worker.status()["observer_failures"] == {
        "clumsy mstar_request_submitted": 4,
        "clumsy mstar_request_refused": 1,
        "clumsy mstar_request_started": 3,
        "clumsy mstar_request_ended": 4,
        "clumsy mstar_step_done": 4,
    }


def test_a_step_that_nobody_watches_calls_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = drive(monkeypatch)
    called: list[str] = []
    driver.registry.plugins.manager.add_hookcall_monitoring(
        lambda name, impls, arguments: called.append(name), lambda outcome, name, impls, arguments: None
    )
    driver.submit("one", Example("ab", {"max_tokens": 3}))
    driver.run()
    assert driver.ended["one"]
    assert called == []

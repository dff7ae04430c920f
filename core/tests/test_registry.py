"""The registry, and every hook called the way its user calls it."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from pydantic import Field

import mstar
from mstar import hookspecs
from mstar.plugins import Plugins, load_plugins
from mstar.registry import Registry, load_object
from mstar.settings import Settings
from mstar.spec.errors import PluginError, SetupError
from mstar.spec.knobs import Knobs
from mstar.spec.model import Licence, ModelSpec, WeightsRef
from mstar.spec.request import Done, EngineRequest, Failed
from mstar.worker.observers import Observers


class NoKnobs(Knobs):
    size: int = Field(1, ge=1)


def spec(key: str) -> ModelSpec:
    return ModelSpec(
        key=key,
        family="test",
        summary="A model for tests.",
        weights=(WeightsRef("path", "."),),
        licence=Licence("Apache-2.0"),
        model="nowhere:Model",
        processor="nowhere:Processor",
        knobs=NoKnobs,
    )


def plugin(name: str, **hooks: Any) -> ModuleType:
    """A plugin module whose hooks return the values given, or are the functions given."""
    module = ModuleType(name)
    for hook, value in hooks.items():
        setattr(module, hook, mstar.hookimpl(value if callable(value) else _returning(value), specname=hook))
    return module


def _returning(value: Any) -> Any:
    return lambda: value


def load(*modules: ModuleType) -> Plugins:
    plugins = load_plugins(Settings(plugins=()))
    for module in modules:
        plugins.add(module.__name__, "1.0", module.__name__, _returning(module))
    return plugins


def reasons(plugins: Plugins) -> list[str]:
    return [broken.reason for broken in plugins.broken]


# --- models ------------------------------------------------------------------------------------------------------


def test_hook_mstar_models() -> None:
    registry = Registry(
        load(plugin("one", mstar_models=[spec("a"), spec("b")]), plugin("two", mstar_models=(spec("c"),)))
    )
    assert {key: found.plugin.name for key, found in registry.models.items()} == {"a": "one", "b": "one", "c": "two"}
    assert registry.model("c").key == "c"


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(SetupError, match="no model 'smollm'; did you mean 'smollm2'"):
        Registry(load(plugin("one", mstar_models=[spec("smollm2")]))).model("smollm")


def test_without_models_the_error_says_how_to_get_one() -> None:
    with pytest.raises(SetupError, match="pip install mstar-demo"):
        Registry(load()).model("smollm2")


def test_an_unknown_key_shows_what_a_broken_plugin_might_have_provided() -> None:
    plugins = load(plugin("one", mstar_models=[spec("a")]))
    plugins.add("qwen", "2.0", "qwen_plugin", lambda: load_object("a_library_that_is_not_there:x"))
    with pytest.raises(SetupError) as caught:
        Registry(plugins).model("qwen3")
    assert "plugin 'qwen' (2.0) is not used: importing qwen_plugin failed: ModuleNotFoundError" in str(caught.value)


@pytest.mark.parametrize("wrong", ["a string", 3, [1], {"a": 1}, [spec("a"), "b"]])
def test_models_of_the_wrong_type_are_refused_by_plugin(wrong: Any) -> None:
    plugins = load(plugin("bad", mstar_models=wrong), plugin("good", mstar_models=[spec("ok")]))
    registry = Registry(plugins)
    assert list(registry.models) == ["ok"]
    (reason,) = reasons(plugins)
    assert reason.startswith("mstar_models must return a list of ModelSpec, not ")


def test_a_key_that_is_taken() -> None:
    plugins = load(
        plugin("first", mstar_models=[spec("a")]),
        plugin("second", mstar_models=[spec("b"), spec("a")], mstar_engines={"fast": "x:Y"}),
    )
    registry = Registry(plugins)
    assert list(registry.models) == ["a"]
    assert reasons(plugins) == ["model key 'a' is taken by plugin 'first'"]
    with pytest.raises(SetupError, match="no engine 'fast'"):
        registry.runner("fast")


def test_a_key_that_one_plugin_gives_twice() -> None:
    plugins = load(plugin("first", mstar_models=[spec("a"), spec("a")]))
    assert not Registry(plugins).models
    assert reasons(plugins) == ["mstar_models returned the key 'a' twice"]


def test_a_hook_that_raises_costs_only_its_plugin() -> None:
    def broken() -> list[ModelSpec]:
        raise OSError("no disk")

    plugins = load(plugin("bad", mstar_models=broken), plugin("good", mstar_models=[spec("ok")]))
    assert list(Registry(plugins).models) == ["ok"]
    assert reasons(plugins) == ["mstar_models failed: OSError: no disk"]


def everything(registry: Registry) -> dict[str, Any]:
    """What can be found: models and offers of every kind."""
    return {"models": dict(registry.models), **{hook: dict(t.offers) for hook, t in registry._tables.items()}}


KINDS_OFFERED = {
    "mstar_resources": {"late": "x:Y"},
    "mstar_attention_backends": {"late": "x:Y"},
    "mstar_engines": {"late": "x:Y"},
    "mstar_schedulers": {"late": "x:Y"},
    "mstar_executors": {"late": "x:Y"},
    "mstar_weight_sources": {"late": "x:Y"},
}


@pytest.mark.parametrize("by", ["a later hook", "the server"])
def test_nothing_of_a_plugin_that_is_rejected_late_stays(by: str) -> None:
    def no_routes(registry: Any) -> list[Any]:
        raise OSError("no disk")

    late = plugin("late", mstar_models=[spec("a"), spec("b")], mstar_api=no_routes, **KINDS_OFFERED)
    before = everything(Registry(load(plugin("good", mstar_models=[spec("ok")]))))
    plugins = load(plugin("good", mstar_models=[spec("ok")]), late)
    registry = Registry(plugins)
    assert set(registry.models) == {"ok", "a", "b"}
    if by == "a later hook":
        plugins.call_each("mstar_api", registry=registry)
    else:
        plugins.reject(plugins.loaded[-1], PluginError("mstar_openai must return a dict"))
    after = everything(registry)
    assert {kind: list(found) for kind, found in after.items()} == {kind: list(found) for kind, found in before.items()}
    with pytest.raises(SetupError, match=r"there is no model 'a'.*\n.*plugin 'late'"):
        registry.model("a")
    with pytest.raises(SetupError, match="there is no scheduler 'late'"):
        registry.scheduler("late")


def test_the_name_of_a_rejected_plugin_may_be_taken_by_another() -> None:
    plugins = load(plugin("late", mstar_models=[spec("a")]))
    registry = Registry(plugins)
    plugins.reject(plugins.loaded[-1], PluginError("no"))
    other = plugin("other", mstar_models=[spec("a")])
    plugins.add("other", "1.0", "other", _returning(other))
    assert Registry(plugins).model("a").key == "a"
    assert not registry.models


# --- what is named "module:Class" --------------------------------------------------------------------------------

KINDS = {
    "mstar_resources": ("resource", "resource kind"),
    "mstar_engines": ("runner", "engine"),
    "mstar_schedulers": ("scheduler", "scheduler"),
    "mstar_executors": ("executor", "executor"),
    "mstar_weight_sources": ("weight_source", "weight source"),
}


def check_kind(hook: str) -> None:
    method, kind = KINDS[hook]
    target = "collections:OrderedDict"
    plugins = load(plugin("one", **{hook: {"mine": target, "gone": "not_a_module:X", "less": "collections:Orderdict"}}))
    look_up = getattr(Registry(plugins), method)
    assert look_up("mine") is load_object(target)
    with pytest.raises(SetupError, match=f"no {kind} 'mien'; did you mean 'mine'.*there are: .*mine"):
        look_up("mien")
    with pytest.raises(SetupError, match=f"no {kind} 'zzzzzz'; there are: .*mine"):
        look_up("zzzzzz")
    with pytest.raises(PluginError, match=f"{kind} 'gone' of plugin 'one' .1.0.* No module named") as caught:
        look_up("gone")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(PluginError, match="no 'Orderdict' there; did you mean 'OrderedDict'"):
        look_up("less")


def test_hook_mstar_resources() -> None:
    check_kind("mstar_resources")


def test_hook_mstar_engines() -> None:
    check_kind("mstar_engines")


def test_hook_mstar_schedulers() -> None:
    check_kind("mstar_schedulers")


def test_hook_mstar_executors() -> None:
    check_kind("mstar_executors")


def test_hook_mstar_weight_sources() -> None:
    check_kind("mstar_weight_sources")


def test_hook_mstar_attention_backends(caplog: pytest.LogCaptureFixture) -> None:
    core_blocked = Plugins()
    offers = {"other": "collections:OrderedDict", "gpu": "a_gpu_library:Attention"}
    module = plugin("one", mstar_attention_backends=offers)
    core_blocked.add("one", "1.0", "one", lambda: module)
    assert Registry(core_blocked).attention_backends() == {"other": load_object("collections:OrderedDict")}
    assert "attention backend 'gpu' of plugin 'one'" in caplog.text


@pytest.mark.parametrize("hook", [*KINDS, "mstar_attention_backends"])
@pytest.mark.parametrize("wrong", [["a"], {"name": "no colon"}, {1: "a:b"}, {"name": object}, "text"])
def test_offers_of_the_wrong_type_are_refused_by_plugin(hook: str, wrong: Any) -> None:
    plugins = load(plugin("bad", **{hook: wrong}))
    Registry(plugins)
    (reason,) = reasons(plugins)
    assert reason.startswith(f"{hook} must return a dict of name to 'module:Class', not ")


def test_a_built_in_name_cannot_be_taken() -> None:
    plugins = load(plugin("bold", mstar_executors={"inline": "mine:Executor"}))
    Registry(plugins)
    assert reasons(plugins) == ["executor 'inline' is taken by plugin 'core'"]


@pytest.mark.parametrize("target", ["no_colon", ":Class", "module:", ""])
def test_a_target_that_names_no_object(target: str) -> None:
    with pytest.raises(SetupError, match="write it as 'module:Name'"):
        load_object(target)


def test_a_nested_target() -> None:
    assert load_object("mstar.spec.model:ModelSpec.__init__") is ModelSpec.__init__


# --- hooks that others call --------------------------------------------------------------------------------------


def test_hook_mstar_api() -> None:
    plugins = load(plugin("web", mstar_api=lambda registry: [registry]))
    registry = Registry(plugins)
    assert registry.hook.mstar_api(registry=registry) == [[registry]]


def test_hook_mstar_openai() -> None:
    plugins = load(plugin("web", mstar_openai=lambda spec: {"chat": f"{spec.family}:Adapter"}))
    ((found, adapters),) = plugins.call_each("mstar_openai", spec=spec("a"))
    assert found.name == "web"
    assert adapters == {"chat": "test:Adapter"}


def record(calls: list[tuple[Any, ...]]) -> ModuleType:
    return plugin(
        "watch",
        mstar_request_submitted=lambda request: calls.append(("submitted", request.id)),
        mstar_request_refused=lambda request, event: calls.append(("refused", request.id, event.code)),
        mstar_request_started=lambda request, queued_s: calls.append(("started", request.id, queued_s)),
        mstar_request_ended=lambda request, event: calls.append(("ended", request.id, event.reason)),
        mstar_step_done=lambda node, rows: calls.append(("step", node, rows)),
    )


def observe(hook: str, **arguments: Any) -> list[tuple[Any, ...]]:
    """What an observer sees when a worker calls *hook*."""
    calls: list[tuple[Any, ...]] = []
    Observers(load(record(calls)), hook).call(hook, **arguments)
    return calls


REQUEST = EngineRequest(id="r1")


def test_hook_mstar_request_submitted() -> None:
    assert observe("mstar_request_submitted", request=REQUEST) == [("submitted", "r1")]


def test_hook_mstar_request_refused() -> None:
    event = Failed(id="r1", message="full", code="queue_full", status=429)
    assert observe("mstar_request_refused", request=REQUEST, event=event) == [("refused", "r1", "queue_full")]


def test_hook_mstar_request_started() -> None:
    assert observe("mstar_request_started", request=REQUEST, queued_s=0.5) == [("started", "r1", 0.5)]


def test_hook_mstar_request_ended() -> None:
    event = Done(id="r1", reason="stop")
    assert observe("mstar_request_ended", request=REQUEST, event=event) == [("ended", "r1", "stop")]


def test_hook_mstar_step_done() -> None:
    """An implementation may name fewer arguments than the hook has."""
    assert observe("mstar_step_done", node="lm", entry="forward", rows=3, tokens=3, seconds=0.1) == [("step", "lm", 3)]


def test_every_hook_of_the_specification_is_marked_as_one() -> None:
    assert {name for name in vars(hookspecs) if name.startswith("mstar_")} == set(vars(load().hook))


def test_a_registry_imports_no_torch() -> None:
    code = (
        "import sys; from mstar.registry import Registry; from mstar.plugins import load_plugins; "
        "from mstar.settings import Settings; Registry(load_plugins(Settings())); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

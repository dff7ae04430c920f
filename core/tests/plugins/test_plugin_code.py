"""What plugins' code does to the process: prints, exceptions, Ctrl-C; traced calls; deprecated hooks."""

from __future__ import annotations

import importlib
import re
import signal
import sys
from types import ModuleType

import pytest
from plugin_site import GOOD, HEAD, Site, load, names, the_broken

from mstar import hookspecs
from mstar.plugin_code import Interrupted
from mstar.plugins import BUILTIN, Plugins, load_plugins
from mstar.settings import Settings

NOISY = (
    HEAD
    + """
import io, sys
print("importing")
sys.stdout = io.StringIO()

@mstar.hookimpl
def mstar_engines():
    print("asked")
    sys.stdout = None
    return {}
"""
)


def test_what_a_plugin_prints_is_no_answer(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.module("noisy", NOISY)
    stdout = sys.stdout
    plugins = load("noisy")
    assert sys.stdout is stdout
    plugins.call(plugins.loaded[1], "mstar_engines")
    assert sys.stdout is stdout
    assert capsys.readouterr() == ("", "importing\nasked\n")


@pytest.mark.parametrize("raised", ["BaseException", "KeyboardInterrupt", "GeneratorExit"])
def test_a_hook_that_raises_anything_costs_only_its_plugin(site: Site, raised: str) -> None:
    site.module("wild", f"{HEAD}@mstar.hookimpl\ndef mstar_api(registry):\n    raise {raised}\n")
    plugins = load("wild")
    plugins.call_each("mstar_api", registry=None)
    assert names(plugins) == [BUILTIN]
    assert f"mstar_api failed: {raised}" in the_broken(plugins).reason


def test_the_users_own_interrupt_ends_the_program_and_names_the_plugin(site: Site) -> None:
    site.module("slow", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="while plugin 'slow' was imported"):
        load("slow")
    assert signal.getsignal(signal.SIGINT) is before
    site.module(
        "slow_hook",
        f"{HEAD}import os, signal\n@mstar.hookimpl\ndef mstar_engines():\n    os.kill(os.getpid(), signal.SIGINT)\n",
    )
    plugins = load("slow_hook")
    with pytest.raises(Interrupted, match="in mstar_engines of plugin 'slow_hook'"):
        plugins.call(plugins.loaded[1], "mstar_engines")


# --- the trace ---------------------------------------------------------------------------------------------------


def test_the_trace_shows_each_call(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.module("traced", GOOD + "@mstar.hookimpl\ndef mstar_openai(spec):\n    raise OSError('no disk')\n")
    plugins = load_plugins(Settings(extra_plugins=("traced",), plugins=(), trace_plugins=True))
    plugins.call(plugins.loaded[1], "mstar_engines")
    plugins.call_each("mstar_openai", spec="x" * 1000)
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == ""
    assert re.fullmatch(
        r"hook: mstar_engines\(\) \[traced\] -> \[{'good': 'good_module:Runner'}\], \d+\.\d\d ms", first
    )
    assert re.fullmatch(r"hook: mstar_openai\(spec='x+\.\.\.x+'\) \[traced\] -> raised OSError: no disk, .* ms", second)
    assert len(second) < 200


def test_without_the_setting_nothing_is_traced(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    plugins = load()
    plugins.call_each("mstar_engines")
    assert capsys.readouterr() == ("", "")


# --- deprecation -------------------------------------------------------------------------------------------------


def deprecated_hooks() -> ModuleType:
    specs = ModuleType("specs")

    def mstar_old() -> None: ...

    specs.mstar_old = hookspecs.hookspec(mstar_old, warn_on_impl=FutureWarning("use mstar_new"))  # type: ignore[attr-defined]
    return specs


def load_deprecated(site: Site) -> Plugins:
    site.module("ageing", HEAD + "@mstar.hookimpl\ndef mstar_old():\n    pass\n")
    plugins = Plugins()
    plugins.manager.add_hookspecs(deprecated_hooks())
    plugins.add("ageing", "1.0", "ageing", lambda: importlib.import_module("ageing"))
    return plugins


def test_a_plugin_with_a_deprecated_hook_is_used_and_warned_about(site: Site) -> None:
    with pytest.warns(FutureWarning, match="use mstar_new"):
        plugins = load_deprecated(site)
    assert names(plugins) == ["ageing"]


def test_where_warnings_are_errors_a_deprecated_hook_costs_only_its_plugin(site: Site) -> None:
    broken = the_broken(load_deprecated(site))
    assert broken.reason == "FutureWarning: use mstar_new"

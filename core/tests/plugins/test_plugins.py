"""Discovery: what is loaded in which order, and what a plugin that does not work costs the others."""

from __future__ import annotations

import importlib
import re
import signal
import sys
from types import ModuleType

import pytest
from plugin_site import GOOD, HEAD, Site, load

from mstar import hookspecs
from mstar.plugin_code import Interrupted
from mstar.plugins import BUILTIN, BrokenPlugin, Plugins, load_plugins
from mstar.settings import Settings
from mstar.spec.errors import PluginError

HOOKED = HEAD + "@mstar.hookimpl\ndef mstar_models():\n    return []\n"


def names(plugins: Plugins) -> list[str]:
    return [plugin.name for plugin in plugins.loaded]


def the_broken(plugins: Plugins) -> BrokenPlugin:
    (broken,) = plugins.broken
    return broken


def test_the_core_is_its_own_first_plugin() -> None:
    plugins = load()
    assert names(plugins) == [BUILTIN]
    assert plugins.broken == []
    assert "mstar_resources" in plugins.hooks(plugins.loaded[0])


def test_installed_plugins_load_by_name_then_extra_modules(site: Site) -> None:
    for name in ("zeta", "alpha"):
        site.module(f"{name}_mod", HOOKED)
    site.module("extra_one_mod", GOOD)
    site.distribution("mstar-zeta", "1.2", "zeta", "zeta_mod")
    site.distribution("mstar-alpha", "0.3", "alpha", "alpha_mod")
    plugins = load("extra_one_mod", plugins=("zeta", "alpha"))
    assert names(plugins) == [BUILTIN, "alpha", "zeta", "extra_one_mod"]
    assert [plugin.version for plugin in plugins.loaded[1:3]] == ["0.3", "1.2"]


@pytest.mark.parametrize("name", ["blocked", "mstar-blocked", "MSTAR_Blocked"])
def test_a_blocked_plugin_is_not_imported(site: Site, name: str) -> None:
    site.module("blocked_mod", "raise AssertionError('imported')\n")
    site.distribution("mstar-blocked", "1.0", "blocked", "blocked_mod")
    plugins = load(plugins=("blocked",), block_plugins=(name,))
    assert names(plugins) == [BUILTIN]
    assert plugins.blocked.count("blocked") == 1
    assert plugins.broken == []
    assert "blocked_mod" not in sys.modules


def test_a_plugin_outside_the_allow_list_is_not_imported(site: Site) -> None:
    site.module("other_mod", "raise AssertionError('imported')\n")
    site.distribution("mstar-other", "1.0", "other", "other_mod")
    assert "other" in load().blocked
    assert "other_mod" not in sys.modules


def test_a_blocked_extra_module_is_not_imported(site: Site) -> None:
    site.module("extra_blocked", "raise AssertionError('imported')\n")
    assert load("extra_blocked", block_plugins=("extra-blocked",)).blocked[-1] == "extra_blocked"


def test_the_core_cannot_be_blocked() -> None:
    with pytest.raises(PluginError, match="cannot be blocked"):
        load(block_plugins=("core",))


def test_an_allowed_plugin_that_is_not_installed_is_reported(site: Site) -> None:
    site.module("present_mod", HOOKED)
    site.distribution("mstar-present", "1.0", "present", "present_mod")
    broken = the_broken(load(plugins=("presant",)))
    assert broken.name == "presant"
    assert "not installed; did you mean 'present'?" in broken.reason


def test_a_module_that_is_installed_and_named_as_extra_loads_once(site: Site) -> None:
    site.module("twice_mod", GOOD)
    site.distribution("mstar-twice", "1.0", "twice", "twice_mod")
    plugins = load("twice_mod", plugins=("twice",))
    assert names(plugins) == [BUILTIN, "twice"]
    assert plugins.broken == []


def test_two_plugins_of_one_name(site: Site) -> None:
    for number in ("1", "2"):
        site.module(f"same_mod{number}", HOOKED)
        site.distribution(f"mstar-same{number}", "1.0", "same", f"same_mod{number}")
    plugins = load(plugins=("same",))
    assert names(plugins) == [BUILTIN, "same"]
    assert "another plugin is named 'same'" in the_broken(plugins).reason


BROKEN = {
    "raises": ("1/0\n", "ZeroDivisionError"),
    "exits_for_good": ("class Mine(BaseException):\n    pass\nraise Mine('boo')\n", "Mine: boo"),
    "cancels": ("import asyncio\nraise asyncio.CancelledError\n", "CancelledError"),
    "interrupts": ("raise KeyboardInterrupt\n", "KeyboardInterrupt"),
    "unspeakable": (
        "class Mine(Exception):\n    def __str__(self):\n        return 1 / 0\nraise Mine\n",
        "Mine: (its __str__ raises ZeroDivisionError)",
    ),
    "hookless": (HEAD, "module 'broken_hookless' has no mstar_… hook"),
    "exits": ("import sys\nsys.exit('no licence key')\n", "SystemExit: no licence key"),
    "needs_more": ("import a_library_that_is_not_there\n", "No module named 'a_library_that_is_not_there'"),
    "syntax": ("def (:\n", "SyntaxError"),
    "typo": (
        HEAD + "@mstar.hookimpl\ndef mstar_model():\n    return []\n",
        "there is no hook 'mstar_model'; did you mean 'mstar_models'?",
    ),
    "signature": (HEAD + "@mstar.hookimpl\ndef mstar_openai(spek):\n    return {}\n", "spek"),
    "unmarked": ("def mstar_models():\n    return []\n", "lacks its @mstar.hookimpl"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_put_aside_and_the_others_serve(site: Site, case: str) -> None:
    code, reason = BROKEN[case]
    site.module(f"broken_{case}", code)
    site.module("good_mod", GOOD)
    site.distribution("mstar-broken", "3.1", "broken", f"broken_{case}")
    plugins = load("good_mod", plugins=("broken",))
    assert names(plugins) == [BUILTIN, "good_mod"]
    broken = the_broken(plugins)
    assert (broken.name, broken.version) == ("broken", "3.1")
    assert reason in broken.reason
    assert isinstance(broken.error, BaseException)
    assert str(broken).startswith("plugin 'broken' (3.1) is not used: ")
    assert broken.remedy
    assert str(broken).endswith(f" To mend it: {broken.remedy}")
    assert {"good": "good_module:Runner"} in plugins.hook.mstar_engines()


def test_nothing_of_a_broken_plugin_stays_registered(site: Site) -> None:
    site.module("half", GOOD + "\n@mstar.hookimpl\ndef mstar_typo():\n    pass\n")
    plugins = load("half")
    assert {"good": "good_module:Runner"} not in plugins.hook.mstar_engines()
    assert plugins.manager.get_plugin("half") is None


def test_an_optional_hook_may_be_unknown(site: Site) -> None:
    site.module("newer", HEAD + "@mstar.hookimpl(optionalhook=True)\ndef mstar_of_a_later_version():\n    pass\n")
    assert names(load("newer")) == [BUILTIN, "newer"]


def test_calling_each_plugin_survives_one_that_raises(site: Site) -> None:
    site.module("raiser", HEAD + "@mstar.hookimpl\ndef mstar_api(registry):\n    raise OSError('no disk')\n")
    site.module("router", HEAD + "@mstar.hookimpl\ndef mstar_api(registry):\n    return [registry]\n")
    plugins = load("raiser", "router")
    (answer,) = [found for found in plugins.call_each("mstar_api", registry="R") if found[0].name != "server"]
    assert answer[0].name == "router"
    assert answer[1] == ["R"]
    broken = the_broken(plugins)
    assert broken.reason.startswith("mstar_api failed: OSError: no disk (at ")
    assert broken.reason.endswith("raiser.py:4)"), "the plugin's own line"
    assert isinstance(broken.error, PluginError)
    assert isinstance(broken.error.__cause__, OSError)
    assert plugins.hook.mstar_api(registry="R") == [["R"]]


# --- versions ----------------------------------------------------------------------------------------------------


def broken_by(site: Site, *requires: str, code: str = GOOD) -> list[BrokenPlugin]:
    """What is broken when a plugin with these requirements is installed."""
    site.module("bound_mod", code)
    site.distribution("mstar-bound", "1.4", "bound", "bound_mod", *requires)
    return load(plugins=("bound",)).broken


@pytest.mark.parametrize(
    ("core", "requires"),
    [
        ("0.1.0", "mstar-core>=0.1"),
        ("0.1.0", "MStar_Core >=0.1,<0.2"),
        ("0.1.0", "mstar-core"),
        ("0.1.0", "mstar-core>=9; extra == 'future'"),
        ("0.1.0", "mstar-core>=9; python_version < '3'"),
        ("0.1.0", "mstar-core-extras>=9"),
        ("0.3.0rc1", "mstar-core>=0.3"),
        ("0.3.0.dev4", "mstar-core>=0.2,<0.4"),
        ("0.3.0+cu128", "mstar-core==0.3.0"),
    ],
)
def test_a_plugin_for_this_core_is_used(site: Site, monkeypatch: pytest.MonkeyPatch, core: str, requires: str) -> None:
    monkeypatch.setattr("mstar.__version__", core)
    assert broken_by(site, "numpy>=99", requires) == []


@pytest.mark.parametrize(
    ("core", "requires"),
    [
        ("0.1.0", "mstar-core>=0.2"),
        ("0.3.0", "mstar-core<0.3"),
        ("0.3.0rc1", "mstar-core<0.3"),
        ("0.3.0rc1", "mstar-core>=0.4"),
        ("0.2.9", "mstar-core>=0.3rc1"),
        ("0.1.0", "mstar-core>=0.2; python_version >= '3'"),
    ],
)
def test_a_plugin_for_another_core_is_refused_and_not_imported(
    site: Site, monkeypatch: pytest.MonkeyPatch, core: str, requires: str
) -> None:
    monkeypatch.setattr("mstar.__version__", core)
    (broken,) = broken_by(site, requires, code="raise AssertionError('imported')\n")
    assert (broken.name, broken.version, broken.distribution) == ("bound", "1.4", "mstar-bound")
    assert broken.reason.startswith("it requires mstar-core ")
    assert broken.reason.endswith(f", and this is mstar-core {core}")
    assert "`pip install --upgrade mstar-core mstar-bound`" in broken.remedy
    assert "bound_mod" not in sys.modules


def test_metadata_that_do_not_parse_are_reported(site: Site) -> None:
    (broken,) = broken_by(site, "mstar-core >= one")
    assert "it requires 'mstar-core >= one', which does not parse" in broken.reason


@pytest.mark.parametrize("wanted", ["2", "'1'"])
def test_a_plugin_for_later_hooks_is_refused(site: Site, wanted: str) -> None:
    (broken,) = broken_by(site, code=f"MSTAR_HOOK_API = {wanted}\n" + GOOD)
    assert broken.reason.startswith(f"it is written for version {wanted} of the hooks; mstar-core ")
    assert "pip install --upgrade mstar-core" in broken.remedy


def test_a_plugin_for_these_hooks_is_used(site: Site) -> None:
    assert broken_by(site, code="MSTAR_HOOK_API = 1\n" + GOOD) == []


# --- what to do --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("import a_library_that_is_not_there\n", "run `pip install mstar-bound`, which also installs what it lacks"),
        ("from mstar import a_later_name\n", "run `pip install --upgrade mstar-core mstar-bound`"),
        ("import mstar.a_later_module\n", "run `pip install --upgrade mstar-core mstar-bound`"),
        ("1/0\n", "`pip install --upgrade mstar-bound`, or report it to its authors"),
    ],
)
def test_a_broken_plugin_says_what_to_type(site: Site, code: str, remedy: str) -> None:
    (broken,) = broken_by(site, code=code)
    assert remedy in broken.remedy


def test_a_missing_extra_module_points_at_its_setting() -> None:
    assert "MSTAR_EXTRA_PLUGINS" in the_broken(load("a_module_that_is_not_there")).remedy


def test_an_extra_module_without_a_hook_is_reported(site: Site) -> None:
    site.module("forgotten", "def models():\n    return []\n")
    plugins = load("forgotten")
    assert names(plugins) == [BUILTIN]
    broken = the_broken(plugins)
    assert broken.reason == "module 'forgotten' has no mstar_… hook"
    assert "@mstar.hookimpl" in broken.remedy
    assert plugins.manager.get_plugin("forgotten") is None


def test_a_package_named_for_its_plugin_module_gets_the_hint(site: Site) -> None:
    package = site.folder / "nested_family"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(GOOD)
    site.modules += ["nested_family", "nested_family.plugin"]
    assert the_broken(load("nested_family")).reason.endswith("; did you mean 'nested_family.plugin'?")
    assert names(load("nested_family.plugin")) == [BUILTIN, "nested_family.plugin"]


def test_a_hook_under_another_name_is_a_hook(site: Site) -> None:
    site.module("renamed", HEAD + '@mstar.hookimpl(specname="mstar_models")\ndef models():\n    return []\n')
    assert names(load("renamed")) == [BUILTIN, "renamed"]


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


# --- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entries",
    [
        b"[mstar.plugins]\nhalf\n",
        b"[console_scripts]\nnothing to do with plugins\n",
        b"[mstar.plugins]\nhalf = h\xff\xfe\n",
    ],
)
def test_damaged_entry_points_of_one_distribution_cost_no_other(site: Site, entries: bytes) -> None:
    site.module("good_mod", GOOD)
    site.distribution("mstar-good", "1.0", "good", "good_mod")
    site.distribution("some-half", "1.0", "half", "half_mod")
    (site.folder / "some_half-1.0.dist-info" / "entry_points.txt").write_bytes(entries)
    plugins = load(plugins=("good",))
    assert names(plugins) == [BUILTIN, "good"]
    broken = the_broken(plugins)
    assert (broken.name, broken.distribution) == ("some-half", "some-half")
    assert "some_half-1.0.dist-info, cannot be read: " in broken.reason
    assert "pip install --force-reinstall some-half" in broken.remedy


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nothing", "is None, which has no hooks"),
        ("number", "is of type int and has no hooks"),
        ("Plugin", "is a class, which has no hooks"),
    ],
)
def test_an_entry_point_that_names_no_object_with_hooks(site: Site, name: str, reason: str) -> None:
    hook = "    @mstar.hookimpl\n    def mstar_models(self):\n        return []\n"
    site.module("odd_mod", f"{HEAD}nothing = None\nnumber = 3\nclass Plugin:\n{hook}\ngood = Plugin()\n")
    site.distribution("mstar-odd", "1.0", "odd", f"odd_mod:{name}")
    site.distribution("mstar-right", "1.0", "right", "odd_mod:good")
    plugins = load(plugins=("odd", "right"))
    assert names(plugins) == [BUILTIN, "right"]
    assert the_broken(plugins).reason == f"'odd_mod:{name}' {reason}"
    assert "name the module with the hooks" in the_broken(plugins).remedy


def test_of_two_entry_points_of_one_module_the_second_is_reported(site: Site) -> None:
    site.module("shared_mod", GOOD)
    site.distribution("mstar-first", "1.0", "first", "shared_mod")
    site.distribution("mstar-second", "1.0", "second", "shared_mod")
    plugins = load(plugins=("first", "second"))
    assert names(plugins) == [BUILTIN, "first"]
    assert (the_broken(plugins).name, the_broken(plugins).reason) == (
        "second",
        "plugin 'first' is the same module, shared_mod",
    )


# --- what a plugin's code does to the process ---------------------------------------------------------------------


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


@pytest.mark.parametrize("value", ["", "not a module", "a:b:c", "1module"])
def test_an_entry_point_that_names_no_module(site: Site, value: str) -> None:
    site.module("good_mod", GOOD)
    site.distribution("mstar-good", "1.0", "good", "good_mod")
    site.distribution("mstar-half", "1.0", "half", value)
    plugins = load(plugins=("good", "half"))
    assert names(plugins) == [BUILTIN, "good"]
    assert (the_broken(plugins).name, the_broken(plugins).distribution) == ("half", "mstar-half")


def test_of_two_installations_of_one_distribution_the_first_counts(
    site: Site, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Site(tmp_path_factory.mktemp("older"))
    monkeypatch.syspath_prepend(str(older.folder))
    monkeypatch.syspath_prepend(str(site.folder))
    site.module("new_mod", GOOD)
    site.distribution("mstar-twofold", "2.0", "twofold", "new_mod")
    older.distribution("Mstar.Twofold", "1.0", "twofold", "old_mod")
    plugins = load(plugins=("twofold",))
    assert [(plugin.name, plugin.version) for plugin in plugins.loaded[1:]] == [("twofold", "2.0")]
    assert plugins.broken == []


@pytest.mark.parametrize("metadata", [None, "", "Metadata-Version: 2.1\n"])
def test_a_damaged_installation_costs_only_its_plugin(site: Site, metadata: str | None) -> None:
    site.module("half_mod", GOOD)
    site.distribution("mstar-half", "1.0", "half", "half_mod")
    file = site.folder / "mstar_half-1.0.dist-info" / "METADATA"
    file.unlink()
    if metadata is not None:
        file.write_text(metadata)
    plugins = load_plugins(Settings(plugins=("half",)))
    assert names(plugins) == [BUILTIN]
    broken = the_broken(plugins)
    assert (broken.name, broken.version) == ("half", "unknown version")
    assert "mstar_half-1.0.dist-info is damaged" in broken.reason
    assert "delete that folder" in broken.remedy


def test_a_plugin_whose_code_is_gone_is_installed_again(site: Site) -> None:
    site.distribution("mstar-gone", "1.0", "gone", "mstar_gone.plugin")
    broken = the_broken(load_plugins(Settings(plugins=("gone",))))
    assert broken.remedy == "run `pip install --force-reinstall mstar-gone`"

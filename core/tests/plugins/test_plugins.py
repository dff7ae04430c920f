"""Discovery: what is loaded in which order, and what a plugin that does not work costs the others."""

from __future__ import annotations

import sys

import pytest
from plugin_site import GOOD, HEAD, Site, load, names, the_broken

from mstar.plugins import BUILTIN
from mstar.spec.errors import PluginError

HOOKED = HEAD + "@mstar.hookimpl\ndef mstar_models():\n    return []\n"


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

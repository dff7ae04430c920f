"""Plugins for other versions of the core, and what a plugin that is not used says to type."""

from __future__ import annotations

import sys

import pytest
from plugin_site import GOOD, Site, broken_by, load, the_broken

from mstar.plugins import load_plugins
from mstar.settings import Settings


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


def test_a_plugin_whose_code_is_gone_is_installed_again(site: Site) -> None:
    site.distribution("mstar-gone", "1.0", "gone", "mstar_gone.plugin")
    broken = the_broken(load_plugins(Settings(plugins=("gone",))))
    assert broken.remedy == "run `pip install --force-reinstall mstar-gone`"

"""Damaged and doubled installations, and entry points that name nothing with hooks."""

from __future__ import annotations

import pytest
from plugin_site import GOOD, HEAD, Site, load, names, the_broken

from mstar.plugins import BUILTIN, load_plugins
from mstar.settings import Settings


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

"""Names of a new family: which are taken, which are not valid."""

from __future__ import annotations

import pytest

from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.scaffold.names import Names, choose_names
from mstar.settings import Settings
from mstar.spec.errors import SetupError


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(load_plugins(Settings(plugins=(), extra_plugins=("mstar.testing.miniatures",))))


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("mstar-my-tts", None, Names("mstar-my-tts", "mstar_my_tts", "my-tts", "my-tts", "MyTts")),
        ("Nightjar", None, Names("Nightjar", "nightjar", "nightjar", "nightjar", "Nightjar")),
        ("mstar.own_model", "own-1.5", Names("mstar.own_model", "mstar_own_model", "own-model", "own-1.5", "OwnModel")),
        ("mstar-3d", None, Names("mstar-3d", "mstar_3d", "3d", "3d", "Model3d")),
    ],
)
def test_names_follow_from_the_distribution(registry: Registry, name: str, key: str | None, expected: Names) -> None:
    assert choose_names(name, key, registry) == expected


@pytest.mark.parametrize(
    ("name", "key", "sentence"),
    [
        ("my tts", None, "no name for a package"),
        ("-x", None, "no name for a package"),
        ("../x", None, "no name for a package"),
        ("3d", None, "begin with a letter"),
        ("class", None, "begin with a letter"),
        ("tests", None, "a folder of the package has that name; try mstar-tests"),
        ("x" * 300, None, "more than 80 letters"),
        ("json", None, "there is a package of that name already"),
        ("mstar", None, "there is a package of that name already"),
        ("mstar-core", None, "a plugin 'core' is installed already"),
        ("mstar-new", "A B", "a key is small letters"),
        ("mstar-new", "mini_chat", "a key is small letters"),
        ("mstar-new", "a/b", "a key is small letters"),
    ],
)
def test_a_name_that_cannot_be_is_refused(registry: Registry, name: str, key: str | None, sentence: str) -> None:
    with pytest.raises(SetupError, match=sentence):
        choose_names(name, key, registry)


def test_a_key_that_is_taken_is_refused(registry: Registry) -> None:
    spec = registry.models["mini_chat"]
    registry.models["taken"] = spec
    try:
        with pytest.raises(SetupError, match="'taken' is taken by plugin"):
            choose_names("mstar-new", "taken", registry)
    finally:
        del registry.models["taken"]

"""Plugins that are missed: whose model it was, and what a deployment requires."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pluggy
import pytest
from plugin_site import GOOD, Site, load

from mstar.plugin_memory import recall, remember
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.requirements import require_plugins
from mstar.runtime.opening import find_model
from mstar.settings import Settings
from mstar.spec.deployment import merge_deployment
from mstar.spec.errors import PluginError, SetupError

# --- whose model was it ------------------------------------------------------------------------------------------

MODEL = """
import mstar
from mstar.spec.knobs import Knobs
from mstar.spec.model import Licence, ModelSpec

@mstar.hookimpl
def mstar_models():
    return [ModelSpec(key="owl-large", family="owl", summary="An owl.", weights=(), licence=Licence("Apache-2.0"),
        model="nowhere:Model", processor="nowhere:Processor", knobs=Knobs)]
"""


@pytest.fixture
def birds(site: Site, tmp_path: Path) -> Callable[..., Registry]:
    """Builds registries as the command line does, with the plugin ``birds``, which offers the model ``owl-large``."""
    site.module("birds_mod", MODEL)
    site.distribution("mstar-birds", "0.7", "birds", "birds_mod")

    def build(plugins: tuple[str, ...] = ("birds",), block: tuple[str, ...] = ()) -> Registry:
        sys.modules.pop("birds_mod", None)
        settings = Settings(cache=tmp_path / "cache", plugins=plugins, block_plugins=block)
        return Registry(load_plugins(settings, remember=True))

    build()
    return build


def test_the_model_of_a_plugin_that_broke_shows_why(birds: Callable[..., Registry], site: Site) -> None:
    site.module("birds_mod", "raise OSError('a very special fault')\n")
    importlib.invalidate_caches()
    with pytest.raises(PluginError) as caught:
        birds().model("owl-large")
    assert str(caught.value).startswith(
        "model 'owl-large' is not available: plugin 'birds' (0.7) is not used: "
        "importing birds_mod failed: OSError: a very special fault (at "
    )
    assert "birds_mod.py:1). To mend it: `pip install --upgrade mstar-birds`" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_the_model_of_a_blocked_plugin_names_the_setting(birds: Callable[..., Registry]) -> None:
    with pytest.raises(PluginError, match="it belongs to plugin 'birds', which MSTAR_PLUGINS or MSTAR_BLOCK_PLUGINS"):
        birds(block=("birds",)).model("owl-large")


def test_the_model_of_an_uninstalled_plugin_says_what_to_install(birds: Callable[..., Registry], site: Site) -> None:
    shutil.rmtree(site.folder / "mstar_birds-0.7.dist-info")
    importlib.invalidate_caches()
    with pytest.raises(PluginError, match="not installed any more; run `pip install mstar-birds`"):
        birds(plugins=()).model("owl-large")


def test_a_key_that_nobody_ever_had_is_nobodys(birds: Callable[..., Registry]) -> None:
    with pytest.raises(SetupError, match="no model 'owl-lrage'; did you mean 'owl-large'"):
        birds().model("owl-lrage")


@pytest.mark.parametrize(
    ("key", "blamed"), [("owl", True), ("owl2-small", True), ("owl-xl", True), ("owlet", False), ("ow", False)]
)
def test_a_plugin_that_never_worked_is_known_by_its_name(site: Site, key: str, blamed: bool) -> None:
    site.module("owl_mod", "1/0\n")
    site.distribution("mstar-owl", "0.1", "owl", "owl_mod")
    with pytest.raises(SetupError) as caught:
        Registry(load(plugins=("owl",))).model(key)
    assert isinstance(caught.value, PluginError) == blamed
    assert "plugin 'owl' (0.1) is not used: importing owl_mod failed: ZeroDivisionError" in str(caught.value)


@pytest.mark.parametrize("damage", ["{", "[]", '{"birds": 3}', '{"birds": {"keys": []}}', "\x00"])
def test_a_damaged_memory_costs_nothing_but_the_better_sentence(
    birds: Callable[..., Registry], tmp_path: Path, damage: str
) -> None:
    file = tmp_path / "cache" / "plugins.json"
    before = file.read_text()
    file.write_text(damage)
    with pytest.raises(SetupError, match="no model 'owl-large'"):
        Registry(load_plugins(Settings(cache=tmp_path / "cache", plugins=()), remember=True)).model("owl-large")
    birds()
    assert file.read_text() == before


def test_a_memory_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remember(tmp_path / "file" / "plugins.json", {"birds": {"distribution": "mstar-birds", "keys": []}})
    assert recall(tmp_path / "file" / "plugins.json") == {}


# --- what a deployment requires ----------------------------------------------------------------------------------


def test_required_plugins_that_are_there(site: Site) -> None:
    site.module("there_mod", GOOD)
    site.distribution("mstar-there", "0.2.1", "there", "there_mod")
    require_plugins(("mstar-there>=0.2", "MStar.There"), load(plugins=("there",)))


def test_every_required_plugin_that_is_missing_is_named(site: Site) -> None:
    site.module("old_mod", GOOD)
    site.distribution("mstar-old", "0.1", "old", "old_mod")
    site.module("bad_mod", "1/0\n")
    site.distribution("mstar-bad", "0.3", "bad", "bad_mod")
    site.module("hidden_mod", "import mstar\n")
    site.distribution("mstar-hidden", "0.3", "hidden", "hidden_mod")
    required = ("mstar-old>=0.2", "mstar-nowhere", "mstar-bad", "mstar-hidden", "pluggy")
    with pytest.raises(SetupError) as caught:
        require_plugins(required, load(plugins=("old", "bad")))
    head, *lines = str(caught.value).splitlines()
    assert head == "the deployment requires plugins that are not there:"
    assert lines[0] == "  mstar-old>=0.2: version 0.1 is installed"
    assert lines[1] == "  mstar-nowhere: it is not installed"
    assert "plugin 'bad' (0.3) is not used: importing bad_mod failed: ZeroDivisionError" in lines[2]
    assert "MSTAR_BLOCK_PLUGINS leaves it out" in lines[3]
    assert lines[4] == "  pluggy: it is installed but is no plugin of M*"
    assert lines[5:] == ["Run `pip install 'mstar-old>=0.2' 'mstar-nowhere'`."]


def test_the_deployment_file_names_what_it_requires_before_its_model_is_missed(tmp_path: Path) -> None:
    file = tmp_path / "tts.yaml"
    file.write_text("model: a-voice\nrequired_plugins: [mstar-nowhere>=2]\n")
    with pytest.raises(SetupError, match="Run `pip install 'mstar-nowhere>=2'`"):
        find_model("a-voice", Registry(load()), file)
    file.write_text("model: a-voice\nrequired_plugins: ['not a requirement']\n")
    with pytest.raises(SetupError, match=r"not a requirement such as 'mstar-tts>=0.2'"):
        find_model("a-voice", Registry(load()), file)
    for nothing in ("", "required_plugins: 3\n"):
        file.write_text("model: a-voice\n" + nothing)
        with pytest.raises(SetupError, match="no model 'a-voice'"):
            find_model("a-voice", Registry(load()), file)


def test_a_requirement_that_is_none_is_refused_in_the_deployment() -> None:
    with pytest.raises(SetupError, match=r"required_plugins: .*'mstar tts' is not a requirement"):
        merge_deployment("m", {"required_plugins": ["mstar tts"]})


# --- each fault, reported to who asks for the model --------------------------------------------------------------

HOOK = "import mstar\n@mstar.hookimpl\ndef "
FAULTS = {
    "import": ("1/0\n", "importing birds_mod failed: ZeroDivisionError: division by zero", ZeroDivisionError),
    "typo": (HOOK + "mstar_modles():\n    return []\n", "there is no hook 'mstar_modles'; did you mean", PluginError),
    "argument": (HOOK + "mstar_models(key):\n    return []\n", "hookspec", pluggy.PluginValidationError),
    "raise": (HOOK + "mstar_models():\n    return {}['x']\n", "mstar_models failed: KeyError: 'x'", PluginError),
    "type": (HOOK + "mstar_models():\n    return 3\n", "mstar_models must return a list of ModelSpec", PluginError),
    "unspeakable": (
        "class Mine:\n    def __repr__(self):\n        return 1 / 0\n" + HOOK + "mstar_models():\n    return Mine()\n",
        "not Mine (its __repr__ raises ZeroDivisionError)",
        PluginError,
    ),
    "field": (
        MODEL.replace('summary="An owl."', 'summary="An owl.", abilities=("chta",)'),
        "mstar_models: abilities of ModelSpec str 'owl-large': 'chta' is none; did you mean 'chat'?",
        PluginError,
    ),
    "offer": (HOOK + "mstar_engines():\n    return {'x': 1}\n", "mstar_engines must return a dict of", PluginError),
    "taken": (HOOK + "mstar_engines():\n    return {'eager': 'a:B'}\n", "engine 'eager' is taken by", PluginError),
    "hooks": ("MSTAR_HOOK_API = 99\n", "it is written for version 99 of the hooks", PluginError),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_reported_with_plugin_version_reason_remedy_and_cause(
    birds: Callable[..., Registry], site: Site, fault: str
) -> None:
    code, reason, kind = FAULTS[fault]
    site.module("birds_mod", code)
    importlib.invalidate_caches()
    registry = birds()
    with pytest.raises(PluginError) as caught:
        registry.model("owl-large")
    said = str(caught.value)
    assert said.startswith("model 'owl-large' is not available: plugin 'birds' (0.7) is not used: ")
    assert reason in said
    assert re.search(r"To mend it: .*(pip install|MSTAR_BLOCK_PLUGINS=birds)", said)
    assert isinstance(caught.value.__cause__, kind)
    assert [plugin.name for plugin in registry.plugins.loaded] == ["core"]

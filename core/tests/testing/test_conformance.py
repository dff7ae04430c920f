"""The conformance suite passes on every miniature, and its parts do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from mstar.spec.knobs import Knobs, SamplingKnobs
from mstar.testing import FamilyConformance, PluginConformance
from mstar.testing.conformance.knob_values import bad_values, unbounded, vary
from mstar.testing.miniatures import MINIATURES

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("mstar_key", [mini.key for mini in MINIATURES], scope="class")
class TestMiniatures(FamilyConformance):
    plugin = "mstar.testing.miniatures"


class TestWatcher(FamilyConformance):
    """Its sample requests have videos, which go over HTTP as files."""

    plugin, key = "watching", "watcher"


class TestPlugin(PluginConformance):
    plugin = "mstar.testing.miniatures"


class Strange(Knobs):
    mode: Literal["fast", "good"] = "fast"
    note: str = Field("", max_length=3)
    free: str = ""
    count: int | None = Field(None, ge=2, lt=9)
    share: float = Field(0.5, gt=0, le=1)
    shares: list[float] = []
    flag: bool = False


def test_bad_values_are_just_outside_of_what_is_declared() -> None:
    found = {(b.name, str(b.value)) for b in bad_values(Strange)}
    assert {("mode", "no-such-word"), ("note", "xxxx"), ("count", "1"), ("count", "9")} <= found
    assert {("share", "0"), ("share", "2"), ("count", "5"), ("count", "1.5"), ("flag", "yes"), ("flag", "1")} <= found
    assert ("count", "None") not in found


@pytest.mark.parametrize("cls", [Strange, SamplingKnobs])
def test_all_bad_values_are_refused_by_pydantic(cls: type[Knobs]) -> None:
    for bad in bad_values(cls):
        with pytest.raises(ValueError, match=bad.name):
            cls.model_validate({bad.name: bad.value})


@pytest.mark.parametrize("cls", [Strange, SamplingKnobs])
def test_varied_values_are_valid_and_new(cls: type[Knobs]) -> None:
    for name, field in cls.model_fields.items():
        values = vary(cls, name)
        assert values or name == "shares"
        for value in values:
            assert value != field.default
            cls.model_validate({name: value})


def test_what_nothing_bounds() -> None:
    assert [fault.split(":")[0] for fault in unbounded(Strange)] == ["'free'", "'shares'"]


def test_the_suite_runs_from_the_command_line_and_takes_a_checkpoint(pytester: pytest.Pytester, tmp_path: Path) -> None:
    from broken_plugins.defects import write_scale

    write_scale(tmp_path)
    run = ["-p", "no:asyncio", "-q", "--mstar-plugin", "broken_plugins.defects", "-k", "loads or checkpoint or Plugin"]
    model = ["--mstar-model", "no_tiny", "--mstar-weights", f"no_tiny={tmp_path}"]
    pytester.runpytest_inprocess(*run, *model).assert_outcomes(passed=5, deselected=43)
    other = pytester.runpytest_inprocess(*run, "--mstar-model", "no_tini")
    other.stdout.fnmatch_lines(["*plugin 'broken_plugins.defects' has no such model; did you mean 'no_tiny'?*"])
    wrong = pytester.runpytest_inprocess(*run, "--mstar-weights", "no_tiny")
    wrong.stderr.fnmatch_lines(["*--mstar-weights 'no_tiny': write KEY=DIR*"])


def test_the_pytest_plugin_is_light() -> None:
    code = "import sys, mstar.testing.plugin; print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr

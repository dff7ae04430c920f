"""A family whose weights are not published yet: what each command says to its author."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mstar.scaffold.names import Names
from mstar.scaffold.write import write_package

Run = Callable[..., tuple[int, str, str]]
NAMES = Names("mstar-unpublished", "mstar_unpublished", "unpublished", "unpublished", "Unpublished")
PLUGIN = {"MSTAR_EXTRA_PLUGINS": "mstar_unpublished.plugin"}
NAME_THEM = "this model needs weights; name a folder or a Hub id with --weights"


@pytest.fixture
def author(mstar: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    write_package(tmp_path / "package", NAMES, "causal-lm")
    monkeypatch.syspath_prepend(str(tmp_path / "package" / "src"))
    return mstar


def test_models_asks_for_weights(author: Run) -> None:
    (model,) = json.loads(author("models", "--json", **PLUGIN)[1])
    assert (model["weights"], model["weights_present"]) == ([], False)
    assert "  give --weights  " in author("models", **PLUGIN)[1]


def test_a_model_without_weights_needs_none(author: Run) -> None:
    _, out, _ = author("models", MSTAR_EXTRA_PLUGINS="mstar.testing.miniatures")
    assert "  none needed  " in out
    assert "give --weights" not in out


def test_check_does_not_send_its_author_to_download(author: Run) -> None:
    status, out, err = author("check", "unpublished", **PLUGIN)
    assert status == 1
    assert NAME_THEM in out + err
    assert "mstar download" not in out + err


def test_download_says_that_nothing_is_published(author: Run) -> None:
    status, out, err = author("download", "unpublished", **PLUGIN)
    assert (status, out) == (0, "")
    assert "'unpublished' has no published weights to fetch; name a folder or a Hub id with --weights" in err


def test_run_asks_for_weights(author: Run) -> None:
    status, _, err = author("run", "unpublished", "Hello", **PLUGIN)
    assert status == 2
    assert NAME_THEM in err

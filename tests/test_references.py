"""The references: generated parts are current, names exist, examples are valid."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from mstar.settings import Settings
from mstar.spec.deployment import Deployment, merge_deployment

ROOT = Path(__file__).parent.parent
PAGES = ("hooks", "knobs", "deployment", "versioning")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_references_are_current(generate: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status = generate.main(["--check"])
    assert status == 0, capsys.readouterr().out + "\nrun `python docs/generate.py`"


def test_a_stale_reference_is_found(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "By hand.\n\n<!-- generated: settings -->\nold\n<!-- end -->\n\nAlso by hand.\n"
    (tmp_path / "page.md").write_text(page)
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "PAGES", ("page.md",))
    assert generate.main(["--check"]) == 1
    assert (tmp_path / "page.md").read_text() == page
    assert "-old" in capsys.readouterr().out
    assert generate.main([]) == 0
    written = (tmp_path / "page.md").read_text()
    assert "| `MSTAR_CACHE` | Folder for weights" in written
    assert written.startswith("By hand.\n")
    assert written.endswith("\nAlso by hand.\n")
    assert generate.main(["--check"]) == 0


@pytest.mark.parametrize("part", ["hooks", "knobs", "deployment", "settings"])
def test_every_part_stands_on_a_page(generate: ModuleType, part: str) -> None:
    assert part in generate.PARTS
    assert any(f"<!-- generated: {part} -->" in (ROOT / page).read_text(encoding="utf-8") for page in generate.PAGES)


class _Watched(Mapping[str, str]):
    """An empty environment that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return default

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return False

    def __getitem__(self, key: str) -> str:
        self.asked.add(key)
        raise KeyError(key)

    def __iter__(self) -> Any:
        raise AssertionError("settings are read by name")

    def __len__(self) -> int:
        return 0


def test_every_setting_is_documented(generate: ModuleType) -> None:
    environment = _Watched()
    Settings.from_env(environment)
    assert environment.asked == {name for name, _ in generate.variables()}


@pytest.mark.parametrize("page", PAGES)
def test_every_name_on_a_page_exists(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(mstar(?:\.\w+)+)`", text)) - {"mstar.plugins"}  # an entry-point group
    for name in names:
        assert pkgutil.resolve_name(name) is not None


def test_the_deployment_example_is_one() -> None:
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    written = yaml.safe_load(example)
    merged = merge_deployment("smollm2", written)
    assert isinstance(merged, Deployment)
    assert merged.model_dump(exclude_unset=True, mode="json") == written
    assert set(written["resources"]) == {"kv"}

"""What an installation gets: names, requirements, versions and the content of the wheels."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .installing import build_wheel

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "mstar-core": ("core", "mstar"),
    "mstar-server": ("server", "mstar_server"),
    "mstar-demo": ("plugins/mstar-demo", "mstar_demo"),
    "mstar-asr": ("plugins/mstar-asr", "mstar_asr"),
    "mstar-diffusion": ("plugins/mstar-diffusion", "mstar_diffusion"),
    "mstar-tts": ("plugins/mstar-tts", "mstar_tts"),
    "mstar-qwen3": ("plugins/mstar-qwen3", "mstar_qwen3"),
}


def requirements(name: str) -> set[str]:
    return {Requirement(line).name for line in importlib.metadata.requires(name) or ()}


def test_core_and_demo_pull_the_server() -> None:
    assert "mstar-server" in requirements("mstar-core")
    assert "mstar-core" in requirements("mstar-server")
    assert "mstar-core" in requirements("mstar-demo")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_distribution_has_its_own_version(name: str) -> None:
    assert importlib.import_module(PACKAGES[name][1]).__version__ == importlib.metadata.version(name)


def test_the_command_and_the_plugins_are_entry_points() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="mstar")
    assert callable(command.load())
    plugins = {entry.name: entry.value for entry in importlib.metadata.entry_points(group="mstar.plugins")}
    assert plugins.items() >= {"server": "mstar_server.plugin", "demo": "mstar_demo.plugin"}.items()


KEPT = (".py", ".yaml", ".typed", ".txt", ".md", ".js", ".css", ".html", ".svg")


@pytest.mark.parametrize("name", PACKAGES)
def test_the_wheel_is_complete(name: str, tmp_path: Path) -> None:
    folder, module = PACKAGES[name]
    wheel = build_wheel(name, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        held = {path for path in archive.namelist() if path.startswith(f"{module}/")}
    wanted = {
        str(path.relative_to(ROOT / folder / "src"))
        for path in (ROOT / folder / "src" / module).rglob("*")
        if path.suffix in KEPT and "__pycache__" not in path.parts
    }
    assert held == wanted


@pytest.mark.parametrize("name", PACKAGES)
def test_every_distribution_has_a_readme_and_a_licence(name: str) -> None:
    folder = ROOT / PACKAGES[name][0]
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"
    assert len((folder / project["readme"]).read_text(encoding="utf-8")) > 200


def test_links_of_the_readme_lead_somewhere() -> None:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / p[0] / "README.md" for p in PACKAGES.values())]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"

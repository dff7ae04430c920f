"""What may import what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

WITHOUT_TORCH = """
import importlib, pkgutil, sys
sys.modules["torch"] = sys.modules["transformers"] = sys.modules["mstar_server"] = None
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), name + "."):
        importlib.import_module(found.name)
"""

LIGHT = [
    "mstar.spec",
    "mstar.scheduler",
    "mstar.cli",
    "mstar.client",
    "mstar.builtin",
    "mstar.registry",
    "mstar.resources.base",
    "mstar.cluster.base",
]


@pytest.mark.parametrize("name", LIGHT)
def test_imports_where_torch_and_the_server_are_not_installed(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "plugin",
    [
        f"{package}.plugin"
        for package in ("mstar_server", "mstar_demo", "mstar_asr", "mstar_diffusion", "mstar_tts", "mstar_qwen3")
    ],
)
def test_plugin_modules_are_light(plugin: str) -> None:
    code = f"import sys, {plugin}; print(sorted({{'torch', 'transformers', 'fastapi', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def lint(config: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    words = ["--no-cache", "--config", str(config)]
    return subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=False)


def test_imports_point_down() -> None:
    done = lint(ROOT / "pyproject.toml")
    assert done.returncode == 0, done.stdout


def test_the_contract_can_fail(tmp_path: Path) -> None:
    """The layers upside down are broken, so the contract does look at our modules."""
    config = tmp_path / "importlinter.toml"
    config.write_text(
        '[tool.importlinter]\nroot_packages = ["mstar"]\n[[tool.importlinter.contracts]]\nname = "upside down"\n'
        'type = "layers"\ncontainers = ["mstar"]\nlayers = ["spec", "registry", "cli"]\n'
    )
    done = lint(config)
    assert done.returncode == 1, done.stderr
    assert "upside down BROKEN" in done.stdout

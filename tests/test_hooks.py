"""The hooks are held to their documentation: each says what it is for, and each has a test that is named after it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from mstar import hookspecs

ROOT = Path(__file__).parent.parent
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("mstar_")}


@pytest.fixture(scope="module")
def test_names() -> set[str]:
    files = [path for folder in ("core", "server", "plugins", "tests") for path in (ROOT / folder).rglob("test_*.py")]
    return {name for path in files for name in re.findall(r"def (test_hook_\w+)\(", path.read_text(encoding="utf-8"))}


def test_there_are_hooks() -> None:
    assert {"mstar_models", "mstar_resources", "mstar_api", "mstar_step_done"} <= HOOKS.keys()


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented(name: str) -> None:
    text = inspect.getdoc(HOOKS[name]) or ""
    assert len(text) > 40, f"{name} needs a docstring that a plugin author can work from"
    returns = inspect.signature(HOOKS[name]).return_annotation
    assert returns is not inspect.Signature.empty, f"{name} does not say what it returns"


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_says_in_which_process_or_by_whom_it_is_called(name: str) -> None:
    assert re.search(r"called|process", inspect.getdoc(HOOKS[name]) or "", re.IGNORECASE)


@pytest.mark.parametrize("name", HOOKS)
def test_the_reference_has_every_hook_with_its_exact_arguments(name: str) -> None:
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    assert f"\n### {name}({', '.join(inspect.signature(HOOKS[name]).parameters)})\n" in page


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_a_test(name: str, test_names: set[str]) -> None:
    assert f"test_hook_{name}" in test_names


@pytest.mark.parametrize("name", HOOKS)
def test_every_argument_is_typed(name: str) -> None:
    parameters: Any = inspect.signature(HOOKS[name]).parameters.values()
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters)


def test_no_test_is_named_after_a_hook_that_does_not_exist(test_names: set[str]) -> None:
    assert test_names <= {f"test_hook_{name}" for name in HOOKS}

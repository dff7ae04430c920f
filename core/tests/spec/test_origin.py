"""Naming the line of a family's own code in what people read."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mstar.spec.errors import FaultFound
from mstar.spec.origin import describe, family_fault, origin

CODE = """\
import json

def calls_a_library():
    return json.loads("{")

def calls_back(function):
    return function()

class Model:
    def __init__(self):
        helper()

def helper():
    raise ValueError("two\\n  lines")
"""


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "origin_family").mkdir()
    (tmp_path / "origin_family" / "__init__.py").write_text("")
    (tmp_path / "origin_family" / "nodes.py").write_text(CODE)
    (tmp_path / "origin_family" / "half.py").write_text("x = 1\nx = = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("origin_family.nodes")
    for name in [name for name in sys.modules if name.startswith("origin_family")]:
        del sys.modules[name]


def caught(function: object, *arguments: object) -> BaseException:
    with pytest.raises(BaseException) as info:  # noqa: PT011 - any
        function(*arguments)  # type: ignore[operator]
    return info.value


TARGETS = ("origin_family.model:Model",)


def test_the_innermost_line_of_the_family(family: ModuleType) -> None:
    error = caught(family.Model)
    assert origin(error, TARGETS) == f"{family.__file__}:14"
    assert describe(error, TARGETS) == f"ValueError: two lines (at {family.__file__}:14)"


def test_lines_of_libraries_below_it_do_not_count(family: ModuleType) -> None:
    assert origin(caught(family.calls_a_library), TARGETS) == f"{family.__file__}:4"


def test_a_file_that_does_not_parse(family: ModuleType) -> None:
    error = caught(importlib.import_module, "origin_family.half")
    assert str(origin(error, TARGETS)).endswith("half.py:2")


def test_code_of_others_is_no_ones_fault(family: ModuleType) -> None:
    error = caught(int, "x")
    assert origin(error, TARGETS) is None
    assert family_fault("it failed", error, TARGETS) is None
    assert describe(error) == "ValueError: invalid literal for int() with base 10: 'x'"
    other = caught(family.calls_back, lambda: int("x"))
    assert origin(other, ("origin_fam:Model",)) is None, "a package whose name only begins alike"


def test_a_fault_says_what_to_do(family: ModuleType) -> None:
    fault = family_fault("the worker could not be built", caught(family.Model), TARGETS)
    assert isinstance(fault, FaultFound)
    assert str(fault).startswith(
        f"the worker could not be built: ValueError: two lines (at {family.__file__}:14). Mend"
    )
    assert "MSTAR_LOG_LEVEL=debug" in str(fault)

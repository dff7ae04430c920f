"""Sentences about errors: where a family's code failed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from mstar.spec.errors import FamilyError, RequestError, family_code, pinpoint, sentence

FAMILY = "def build(call):\n    return call()\n\ndef fail(x):\n    return {}[x]\n"


def family(name: str = "owl.nodes") -> Any:
    module = ModuleType(name)
    exec(compile(FAMILY, "/somewhere/owl/nodes.py", "exec"), module.__dict__)
    return module


def caught(function: Any, *arguments: Any) -> Exception:
    with pytest.raises(Exception) as info:  # noqa: PT011 - any: what matters is where it was raised
        function(*arguments)
    return info.value


def test_the_innermost_frame_of_the_family_is_named() -> None:
    owl = family()
    assert pinpoint(caught(owl.build, lambda: owl.fail("x")), "owl.model:Owl") == (
        "KeyError: 'x' (/somewhere/owl/nodes.py:5, in fail)"
    )


def test_what_a_library_raises_is_the_familys_line() -> None:
    error = caught(family().build, lambda: int("no number"))
    assert pinpoint(error, "owl.model:Owl").endswith("(/somewhere/owl/nodes.py:2, in build)")
    assert pinpoint(error, "owlet.model:Owl").startswith(
        f"ValueError: invalid literal for int() with base 10: 'no number' ({__file__}:"
    )
    assert pinpoint(error) == pinpoint(error, "owlet.model:Owl")


def test_an_error_that_was_never_raised_has_no_place() -> None:
    assert pinpoint(ValueError("no")) == "ValueError: no"


def test_a_sentence_is_one_line() -> None:
    assert sentence(RuntimeError("CUDA error: lost\nCompile with …")) == "RuntimeError: CUDA error: lost"
    assert sentence(ValueError()) == "ValueError"
    assert sentence(RequestError("no such voice")) == "no such voice"


def test_family_code_lets_deliberate_errors_through() -> None:
    with pytest.raises(RequestError), family_code("owl", "prepare", "owl:Owl"):
        raise RequestError("no")
    with pytest.raises(FamilyError, match=r"^the code of model 'owl' failed to prepare: StopIteration \(") as info:  # noqa: SIM117
        with family_code("owl", "prepare", "owl:Owl"):
            next(iter(()))
    assert isinstance(info.value.__cause__, StopIteration)

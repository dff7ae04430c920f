"""Knobs that are a choice between values: the error names the nearest one."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from mstar.spec.errors import DeploymentError, RequestError
from mstar.spec.fields import describe_fields
from mstar.spec.knobs import Finite, Knobs, TextOptions, read_options, validate_knobs


class Style(Enum):
    PLAIN = "plain"
    FORMAL = "formal"


class Choices(Knobs):
    language: Literal["de", "fr", "gsw"] = "de"
    rate: Literal[16000, 24000] | None = None
    style: Style = Style.PLAIN


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("language", "frr", "'language': 'frr' is none of its values; did you mean 'fr'?"),
        ("language", "it", "'language': 'it' is none of its values; known: de, fr, gsw"),
        ("language", None, "'language': 'None' is none of its values; known: de, fr, gsw"),
        ("rate", 8000, "'rate': '8000' is none of its values; the nearest valid value is 16000"),
        ("language", "GSV", "'language': 'GSV' is none of its values; did you mean 'gsw'?"),
        ("style", "former", "'style': 'former' is none of its values; did you mean 'formal'?"),
    ],
)
def test_a_wrong_choice_is_answered_with_the_nearest(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        validate_knobs(Choices, {name: value}, where="model_kwargs.")
    assert str(caught.value) == sentence
    assert (caught.value.param, caught.value.code) == (f"model_kwargs.{name}", "invalid_value")


class Letters(Knobs):
    language: Literal["a", "e", "fr"] = "a"


@pytest.mark.parametrize(("value", "hint"), [("de", "known: a, e, fr"), ("E", "did you mean 'e'?")])
def test_a_letter_is_near_itself_alone(value: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        validate_knobs(Letters, {"language": value})
    assert str(caught.value) == f"'language': {value!r} is none of its values; {hint}"


def test_true_is_no_number_among_choices() -> None:
    class Lengths(Knobs):
        frames: Literal[0, 1, 5] = 5
        loud: Literal[True] = True

    assert validate_knobs(Lengths, {"frames": 1, "loud": True}).frames == 1
    for value in (True, False):
        with pytest.raises(RequestError, match="must be a number, not a boolean"):
            validate_knobs(Lengths, {"frames": value})


def test_right_choices_are_taken() -> None:
    knobs = validate_knobs(Choices, {"language": "gsw", "rate": 24000, "style": "formal"})
    assert (knobs.language, knobs.rate, knobs.style) == ("gsw", 24000, Style.FORMAL)


class Drawn(Knobs):
    share: Annotated[float, Field(ge=0, le=1)] | None = None


@pytest.mark.parametrize("value", ["0.5", True])
def test_a_number_that_may_be_left_out_is_not_coerced(value: object) -> None:
    with pytest.raises(RequestError, match="must be a number") as caught:
        validate_knobs(Drawn, {"share": value})
    assert caught.value.param == "share"
    assert validate_knobs(Drawn, {"share": 1}).share == 1.0


class Window(Knobs):
    window: int = Field(8, ge=1, le=64)
    share: Finite = 0.5


def test_options_are_read_with_their_defaults_or_refused_all_at_once() -> None:
    assert read_options(Window, {"window": 9}) == Window(window=9, share=0.5)
    with pytest.raises(DeploymentError) as caught:
        read_options(Window, {"window": 0, "share": "much"})
    assert [key for key, _ in caught.value.faults] == ["model_kwargs.window", "model_kwargs.share"]
    assert caught.value.faults[1][1] == "'share': must be a number, not a text, got 'much'"


def test_text_options_of_a_model_that_has_none_are_the_defaults() -> None:
    assert TextOptions.of(Knobs()) == TextOptions()
    assert TextOptions.of(TextOptions(max_tokens=7)).max_tokens == 7


def test_fields_in_words() -> None:
    rows = {row.name: (row.value, row.default) for row in describe_fields(Choices)}
    assert rows == {
        "`language`": ("`de`, `fr`, `gsw`", "`de`"),
        "`rate`": ("`16000`, `24000` or `null`", "none"),
        "`style`": ("`plain`, `formal`", "`plain`"),
    }


class Glazed(Knobs):
    window: Window = Field(Window(), description="How it is cut.")
    clean: bool = True


def test_fields_of_sections_in_words() -> None:
    assert [row.name for row in describe_fields(Glazed)] == ["`window`", "`clean`"]
    rows = describe_fields(Glazed, inside=True)
    assert [row.name for row in rows] == ["`window`", "`window.window`", "`window.share`", "`clean`"]
    assert rows[1].value == "whole number ≥ 1, ≤ 64"


def test_what_a_deployment_sets_is_the_default_in_words() -> None:
    rows = describe_fields(Glazed, inside=True, defaults={"window": {"window": 7}, "clean": False})
    said = {row.name: row.default for row in rows}
    assert (said["`window`"], said["`window.window`"], said["`clean`"]) == ("", "`7`", "`false`")
    assert said["`window.share`"] == describe_fields(Window)[1].default


def test_faults_inside_of_sections_name_the_nearest_there() -> None:
    with pytest.raises(DeploymentError) as caught:
        read_options(Glazed, {"window": {"windw": 3, "share": "much"}, "cleen": True})
    faults = dict(caught.value.faults)
    assert faults["model_kwargs.window.windw"].endswith("did you mean 'window.window'?")
    assert faults["model_kwargs.cleen"].endswith("did you mean 'clean'?")
    assert faults["model_kwargs.window.share"].startswith("'window.share': must be a number")


class Grid(Knobs):
    width: int | None = Field(None, ge=64, le=8192, multiple_of=16)
    odd: int = Field(7, multiple_of=7)


@pytest.mark.parametrize(
    ("name", "value", "near"), [("width", 100, 96), ("width", 8, 64), ("width", 10**9 + 1, 8192), ("odd", -8, -7)]
)
def test_what_is_no_multiple_is_answered_with_the_nearest(name: str, value: int, near: int) -> None:
    with pytest.raises(RequestError, match=f"'{name}': must be a multiple of .* nearest valid value is {near}$"):
        validate_knobs(Grid, {name: value})


class Open(Knobs):
    seed: int = Field(1, gt=0, lt=2**63)
    share: Finite = Field(0.5, gt=0)


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [("seed", 2**63, str(2**63 - 1)), ("seed", 0, "1"), ("seed", -9, "1"), ("share", 0, "just above 0.0")],
)
def test_beyond_an_open_bound_the_nearest_is_named(name: str, value: int, near: str) -> None:
    with pytest.raises(RequestError, match=f"nearest valid value is {near}$"):
        validate_knobs(Open, {name: value})


class Lists(Knobs):
    rows: tuple[Annotated[int, Field(ge=1)], ...] = Field((1,), min_length=1, max_length=2)


@pytest.mark.parametrize(
    ("value", "faults"),
    [
        ((), {"model_kwargs.rows": "'rows': must have at least 1 entry, and has none"}),
        ((1, 2, 3), {"model_kwargs.rows": "'rows': must have at most 2 entries, and has 3"}),
        # of the list itself nothing is said: it is as long as it should be
        (
            (None,),
            {"model_kwargs.rows.0": "'rows.0': input should be a valid integer, got 'None'"},
        ),
    ],
)
def test_lists_at_fault_in_words(value: tuple[int, ...], faults: dict[str, str]) -> None:
    with pytest.raises(DeploymentError) as caught:
        read_options(Lists, {"rows": value})
    assert dict(caught.value.faults) == faults

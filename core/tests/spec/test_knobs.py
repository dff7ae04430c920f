"""Knobs that are a choice between values: the error names the nearest one."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import pytest

from mstar.spec.errors import RequestError
from mstar.spec.knobs import Knobs, validate_knobs


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
        ("style", "former", "'style': 'former' is none of its values; did you mean 'formal'?"),
    ],
)
def test_a_wrong_choice_is_answered_with_the_nearest(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        validate_knobs(Choices, {name: value}, where="model_kwargs.")
    assert str(caught.value) == sentence
    assert (caught.value.param, caught.value.code) == (f"model_kwargs.{name}", "invalid_value")


def test_right_choices_are_taken() -> None:
    knobs = validate_knobs(Choices, {"language": "gsw", "rate": 24000, "style": "formal"})
    assert (knobs.language, knobs.rate, knobs.style) == ("gsw", 24000, Style.FORMAL)

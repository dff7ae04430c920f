"""Languages by any name."""

from __future__ import annotations

import pytest

from mstar.processing.speech.languages import LANGUAGES, among, find_language, name_of
from mstar.spec.errors import RequestError


@pytest.mark.parametrize("text", ["de", "DEU", "ger", "German", " german ", "de-AT", "de_AT", "deu_Latn"])
def test_any_spelling(text: str) -> None:
    assert find_language(text) == LANGUAGES["de"]


def test_codes_are_each_anothers() -> None:
    codes = [c for language in LANGUAGES.values() for c in {language.code, language.code3}]
    assert len(codes) == len(set(codes)) == 2 * 183 + 5
    assert all(len(language.code3) == 3 and language.code.islower() for language in LANGUAGES.values())
    assert len({language.name for language in LANGUAGES.values()}) == len(LANGUAGES)


@pytest.mark.parametrize(
    ("text", "known", "found"),
    [
        ("en", ["de-DE", "en-US", "en-GB"], "en-US"),
        ("en_gb", ["en-US", "en-GB"], "en-GB"),
        ("en-AU", ["en-US"], "en-US"),
        ("english", ["en"], "en"),
        ("en", ["English", "German"], "English"),
        ("eng_Latn", ["eng_Latn"], "eng_Latn"),
        ("klingon", ["klingon"], "klingon"),
    ],
)
def test_among_a_familys_own(text: str, known: list[str], found: str) -> None:
    assert among(text, known) == found


@pytest.mark.parametrize(
    ("text", "near"), [("germn", "did you mean 'German'"), ("zu", "known: de, en"), ("x" * 999, "known: de, en")]
)
def test_a_language_that_is_not_known(text: str, near: str) -> None:
    with pytest.raises(RequestError, match=near) as caught:
        among(text, ["en", "de"])
    assert (caught.value.param, caught.value.status) == ("language", 400)


def test_names() -> None:
    assert (name_of("yue"), name_of("klingon"), name_of("pt-BR")) == ("Cantonese", "klingon", "Portuguese")

"""The languages that Kokoro speaks, by the letter that its voices' names begin with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["LANGUAGES", "LangCode", "Language", "language_of"]

LangCode = Literal[
    "a", "b", "e", "f", "h", "i", "p", "j", "z",
    "en-us", "en-gb", "es", "fr-fr", "hi", "it", "pt-br", "ja", "zh",
]  # fmt: skip


@dataclass(frozen=True)
class Language:
    """:param code: as BCP 47 spells it. :param alias: as ``kokoro`` spells it beside the letter.
    :param espeak: espeak-ng's voice, where it is a way to pronounce the language. :param extra: of this package, with
        which it can be pronounced."""

    letter: str
    name: str
    code: str
    alias: str
    espeak: str | None
    extra: str


_ALL = (
    Language("a", "American English", "en-US", "en-us", "en-us", "g2p"),
    Language("b", "British English", "en-GB", "en-gb", "en-gb", "g2p"),
    Language("e", "Spanish", "es", "es", "es", "espeak"),
    Language("f", "French", "fr-FR", "fr-fr", "fr-fr", "espeak"),
    Language("h", "Hindi", "hi", "hi", "hi", "espeak"),
    Language("i", "Italian", "it", "it", "it", "espeak"),
    Language("p", "Brazilian Portuguese", "pt-BR", "pt-br", "pt-br", "espeak"),
    Language("j", "Japanese", "ja", "ja", None, "ja"),
    Language("z", "Mandarin Chinese", "zh", "zh", None, "zh"),
)
LANGUAGES = {language.letter: language for language in _ALL}

_BY_CODE = LANGUAGES | {language.alias: language for language in _ALL}
assert set(_BY_CODE) == set(get_args(LangCode))


def language_of(code: str) -> Language:
    """The language whose letter or alias *code* is (a :data:`LangCode`)."""
    return _BY_CODE[code]

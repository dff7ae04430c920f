"""Text to the phonemes that Kokoro knows: by misaki where it is installed, else by espeak-ng.

``[word](/phonemes/)`` says how a word is pronounced. What comes out holds misaki's letters: ``A I O Q W Y`` for
diphthongs, ``ʤ ʧ`` and so on for affricates.

Sources: ``misaki`` 0.9.4 (its alphabet, and how it reads espeak-ng's), ``kokoro`` 0.9.4 (``pipeline.py``).
"""

from __future__ import annotations

import importlib.util
import logging
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mstar.spec.errors import RequestError
from mstar.spec.finding import Finding
from mstar_tts.espeak import TIE, Espeak, espeak, in_turn
from mstar_tts.kokoro.languages import LANGUAGES, Language

__all__ = ["can_pronounce", "findings", "phonemes"]

_SPOKEN = re.compile(r"\[[^\[\]]+\]\(/([^()]+)/\)")
_STRESSED = re.compile(r"\[([^\[\]]+)\]\((?![/(])[^()]*\)")
"""misaki's wishes about stress, which espeak-ng takes no notice of."""
_PUNCTUATION = re.compile(r"\s*(?:[;!?—…\"()“”]|(?<!\w)[.,:]|[.,:](?!\w))[\s;:,.!?—…\"()“”]*")
"""Marks that end a word; those within one (``3.14``, ``10:30``) are left for the language to read."""
_PLAIN = str.maketrans({"‘": "'", "’": "'", "«": "“", "»": "”", "–": "—", "―": "—", "¿": None, "¡": None})

_SILENT = ("So", "Sk", "Cs", "Co", "Cn")
_JOINERS = "\u200d\ufe0e\ufe0f"

# espeak-ng's letters → misaki's, longest first. In English only one of "e" and "r" is ever meant.
_ENGLISH = {
    "ʔˌn\u0329": "ʔn", "ʔn\u0329": "ʔn",
    f"a{TIE}ɪ": "I", f"a{TIE}ʊ": "W", f"e{TIE}ɪ": "A", f"ɔ{TIE}ɪ": "Y", f"d{TIE}ʒ": "ʤ", f"t{TIE}ʃ": "ʧ",
    f"ə{TIE}l": "ᵊl",
    "ʲo": "jo", "ʲə": "jə",
    "e": "A", "ʲ": "", "ɚ": "əɹ", "r": "ɹ", "x": "k", "ç": "k", "ɐ": "ə", "ɬ": "l", "\u0303": "",
}  # fmt: skip
_AMERICAN = {f"o{TIE}ʊ": "O", "ɜːɹ": "ɜɹ", "ɜː": "ɜɹ", "ɪə": "iə", "ː": ""}
_BRITISH = {f"e{TIE}ə": "ɛː", "iə": "ɪə", f"i{TIE}ə": "ɪə", f"ə{TIE}ʊ": "Q"}
_OTHERS = {
    f"a{TIE}ɪ": "I", f"a{TIE}ʊ": "W", f"d{TIE}z": "ʣ", f"d{TIE}ʒ": "ʤ", f"e{TIE}ɪ": "A", f"o{TIE}ʊ": "O",
    f"ə{TIE}ʊ": "Q", f"s{TIE}s": "S", f"t{TIE}s": "ʦ", f"t{TIE}ʃ": "ʧ", f"ɔ{TIE}ɪ": "Y",
}  # fmt: skip

_TABLES = {
    letter: sorted(table.items(), key=lambda pair: -len(pair[0]))
    for letter, table in (("a", _ENGLISH | _AMERICAN), ("b", _ENGLISH | _BRITISH), ("", _OTHERS))
}


def phonemes(texts: Sequence[str], language: Language, fallback: bool) -> list[str]:
    """The phonemes of each of *texts*; empty for one without anything to say.

    :param fallback: whether espeak-ng may pronounce English words that misaki does not know.
    :raises RequestError: the language cannot be pronounced with what is installed; it names the extra.
    """
    engine = _engine(language, fallback)
    if engine is None:
        raise RequestError(_hint(language), param="lang_code", code="language_not_installed")
    return [" ".join(engine(_plain(text)).split()) for text in texts]


def can_pronounce(language: Language) -> bool:
    """Whether what is installed can pronounce *language*; cheap."""
    if language.espeak is not None and espeak() is not None:
        return True
    if language.letter in "ab":
        return _has_misaki_english()
    if language.espeak is not None or not _installed("misaki", *_NEEDS[language.letter]):
        return False
    return language.letter != "j" or _has_japanese_words()


def findings() -> list[Finding]:
    """Which languages can be pronounced on this machine, and what the others need."""
    able = [language.name for language in LANGUAGES.values() if can_pronounce(language)]
    found = [Finding("kokoro's languages", "ok", ", ".join(able))] if able else []
    unable: dict[str, list[Language]] = {}
    for language in LANGUAGES.values():
        if language.name not in able:
            unable.setdefault(language.extra, []).append(language)
    for languages in unable.values():
        names = ", ".join(language.name for language in languages)
        found.append(
            Finding("kokoro's languages", "missing", f"{names}: without {_what(languages[0])}", _remedy(languages[0]))
        )
    return found


def _hint(language: Language) -> str:
    return (
        f"'lang_code': {language.name} ({language.letter!r}) needs {_what(language)} on the server: "
        f"{_remedy(language)}; with 'phonemes' no such thing is needed"
    )


def _what(language: Language) -> str:
    """With which *language* can be pronounced."""
    return "misaki or espeak-ng" if language.letter in "ab" else "espeak-ng" if language.espeak else "misaki"


def _remedy(language: Language) -> str:
    return f"pip install 'mstar-tts[{language.extra}]'{_THEN.get(language.extra, '')}"


_THEN = {
    "g2p": " (then python -m spacy download en_core_web_sm), or 'mstar-tts[espeak]'",
    "espeak": ", or the system's (Debian: apt install espeak-ng)",
    "ja": " (then python -m unidic download)",
}
_NEEDS = {"j": ("pyopenjtalk", "fugashi"), "z": ("jieba", "pypinyin")}


def _installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def _has_japanese_words() -> bool:
    # unidic is installed without its dictionary, which fugashi does not start without; unidic-lite has one
    found = importlib.util.find_spec("unidic")
    if found is None:
        return _installed("unidic_lite")
    return any(Path(place, "dicdir", "mecabrc").is_file() for place in found.submodule_search_locations or ())


def _has_misaki_english() -> bool:
    # without the tagger misaki would download it on its own
    return _installed("misaki", "spacy", "num2words", "en_core_web_sm")


@in_turn
@cache
def _engine(language: Language, fallback: bool) -> Callable[[str], str] | None:
    """A way to pronounce *language*. misaki's objects are not made for several threads."""
    found = espeak()
    if language.letter in "ab" and _has_misaki_english():
        return in_turn(_english(language, found if fallback else None))
    if language.espeak is None:
        return in_turn(_east_asian(language)) if can_pronounce(language) else None
    return None if found is None else _EspeakWords(found, language)


def _english(language: Language, found: Espeak | None) -> Callable[[str], str]:
    from misaki import en

    def unknown(token: Any) -> tuple[str | None, int | None]:
        assert found is not None
        spoken = _from_espeak(found.phonemes(token.text, language.espeak or "en-us"), language)
        return (spoken, 2) if spoken else (None, None)

    engine = en.G2P(trf=False, british=language.letter == "b", fallback=None if found is None else unknown, unk="")
    return lambda text: str(engine(text)[0])


def _east_asian(language: Language) -> Callable[[str], str]:
    if language.letter == "j":
        from misaki import ja

        engine: Any = ja.JAG2P()
    else:
        from misaki import zh

        logging.getLogger("jieba").setLevel(logging.WARNING)  # it tells of its dictionary, twice
        engine = zh.ZHG2P()
    return lambda text: str(engine(text)[0])


class _EspeakWords:
    """A language by espeak-ng, which loses punctuation: it is given what lies between, and the marks are put back."""

    def __init__(self, library: Espeak, language: Language):
        self._library, self._language = library, language

    def __call__(self, text: str) -> str:
        return " ".join("".join(self._parts(text)).split())

    def _parts(self, text: str) -> Iterator[str]:
        text, at = _STRESSED.sub(r"\1", text), 0
        for match in _SPOKEN.finditer(text):
            yield from self._clauses(text[at : match.start()])
            yield match[1]
            at = match.end()
        yield from self._clauses(text[at:])

    def _clauses(self, text: str) -> Iterator[str]:
        at = 0
        for match in _PUNCTUATION.finditer(text):
            yield self._words(text[at : match.start()])
            yield match[0]
            at = match.end()
        yield self._words(text[at:])

    def _words(self, text: str) -> str:
        if not any(c.isalnum() for c in text):
            return " " if text else ""
        spoken = _from_espeak(self._library.phonemes(text, self._language.espeak or ""), self._language)
        return " " * text[0].isspace() + spoken + " " * text[-1].isspace()


def _from_espeak(spoken: str, language: Language) -> str:
    english = language.letter in "ab"
    for old, new in _TABLES[language.letter if english else ""]:
        spoken = spoken.replace(old, new)
    if english:
        # a syllable that is a consonant alone: a short vowel before it
        spoken = re.sub(r"(\S)\u0329", r"ᵊ\1", spoken).replace("\u0329", "")
        spoken = spoken.replace("o", "ɔ").replace("ɾ", "T").replace("ʔ", "t")
    else:
        spoken = spoken.replace("-", "")
    return spoken.replace(TIE, "")


def _plain(text: str) -> str:
    """*text* with one kind of quotes and dashes, and without what is not spoken: emoji and what joins them."""
    text = text.replace("...", "…").translate(_PLAIN)
    return "".join(c for c in text if unicodedata.category(c) not in _SILENT and c not in _JOINERS)

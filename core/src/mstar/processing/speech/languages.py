"""Spoken languages by code, name and locale: how clients spell them, and how a family does.

Codes of ISO 639-1 (``en``) with those of ISO 639-3 (``eng``), and the languages without a short code that speech models
name often. The older bibliographic codes (``ger``) are understood too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mstar.spec.errors import RequestError, nearest

__all__ = ["LANGUAGES", "Language", "among", "find_language", "name_of"]


@dataclass(frozen=True)
class Language:
    """:param code: of ISO 639-1, or of 639-3 where there is no shorter one. :param code3: of ISO 639-3."""

    code: str
    code3: str
    name: str


_TWO_LETTERS = """\
aa aar Afar; ab abk Abkhazian; ae ave Avestan; af afr Afrikaans; ak aka Akan; am amh Amharic; an arg Aragonese;
ar ara Arabic; as asm Assamese; av ava Avaric; ay aym Aymara; az aze Azerbaijani; ba bak Bashkir;
be bel Belarusian; bg bul Bulgarian; bi bis Bislama; bm bam Bambara; bn ben Bengali; bo bod Tibetan;
br bre Breton; bs bos Bosnian; ca cat Catalan; ce che Chechen; ch cha Chamorro; co cos Corsican; cr cre Cree;
cs ces Czech; cu chu Church Slavic; cv chv Chuvash; cy cym Welsh; da dan Danish; de deu German; dv div Dhivehi;
dz dzo Dzongkha; ee ewe Ewe; el ell Greek; en eng English; eo epo Esperanto; es spa Spanish; et est Estonian;
eu eus Basque; fa fas Persian; ff ful Fulah; fi fin Finnish; fj fij Fijian; fo fao Faroese; fr fra French;
fy fry Western Frisian; ga gle Irish; gd gla Scottish Gaelic; gl glg Galician; gn grn Guarani; gu guj Gujarati;
gv glv Manx; ha hau Hausa; he heb Hebrew; hi hin Hindi; ho hmo Hiri Motu; hr hrv Croatian;
ht hat Haitian Creole; hu hun Hungarian; hy hye Armenian; hz her Herero; ia ina Interlingua; id ind Indonesian;
ie ile Interlingue; ig ibo Igbo; ii iii Sichuan Yi; ik ipk Inupiaq; io ido Ido; is isl Icelandic;
it ita Italian; iu iku Inuktitut; ja jpn Japanese; jv jav Javanese; ka kat Georgian; kg kon Kongo;
ki kik Kikuyu; kj kua Kuanyama; kk kaz Kazakh; kl kal Kalaallisut; km khm Khmer; kn kan Kannada; ko kor Korean;
kr kau Kanuri; ks kas Kashmiri; ku kur Kurdish; kv kom Komi; kw cor Cornish; ky kir Kyrgyz; la lat Latin;
lb ltz Luxembourgish; lg lug Ganda; li lim Limburgish; ln lin Lingala; lo lao Lao; lt lit Lithuanian;
lu lub Luba-Katanga; lv lav Latvian; mg mlg Malagasy; mh mah Marshallese; mi mri Maori; mk mkd Macedonian;
ml mal Malayalam; mn mon Mongolian; mr mar Marathi; ms msa Malay; mt mlt Maltese; my mya Burmese; na nau Nauru;
nb nob Norwegian Bokmål; nd nde North Ndebele; ne nep Nepali; ng ndo Ndonga; nl nld Dutch;
nn nno Norwegian Nynorsk; no nor Norwegian; nr nbl South Ndebele; nv nav Navajo; ny nya Chichewa;
oc oci Occitan; oj oji Ojibwa; om orm Oromo; or ori Odia; os oss Ossetian; pa pan Punjabi; pi pli Pali;
pl pol Polish; ps pus Pashto; pt por Portuguese; qu que Quechua; rm roh Romansh; rn run Rundi; ro ron Romanian;
ru rus Russian; rw kin Kinyarwanda; sa san Sanskrit; sc srd Sardinian; sd snd Sindhi; se sme Northern Sami;
sg sag Sango; si sin Sinhala; sk slk Slovak; sl slv Slovenian; sm smo Samoan; sn sna Shona; so som Somali;
sq sqi Albanian; sr srp Serbian; ss ssw Swati; st sot Southern Sotho; su sun Sundanese; sv swe Swedish;
sw swa Swahili; ta tam Tamil; te tel Telugu; tg tgk Tajik; th tha Thai; ti tir Tigrinya; tk tuk Turkmen;
tl tgl Tagalog; tn tsn Tswana; to ton Tongan; tr tur Turkish; ts tso Tsonga; tt tat Tatar; tw twi Twi;
ty tah Tahitian; ug uig Uyghur; uk ukr Ukrainian; ur urd Urdu; uz uzb Uzbek; ve ven Venda; vi vie Vietnamese;
vo vol Volapük; wa wln Walloon; wo wol Wolof; xh xho Xhosa; yi yid Yiddish; yo yor Yoruba; za zha Zhuang;
zh zho Chinese; zu zul Zulu"""
_THREE_LETTERS = "ast Asturian; ceb Cebuano; fil Filipino; haw Hawaiian; yue Cantonese"
_BIBLIOGRAPHIC = {
    "alb": "sq", "arm": "hy", "baq": "eu", "bur": "my", "chi": "zh", "cze": "cs", "dut": "nl", "fre": "fr", "geo": "ka",
    "ger": "de", "gre": "el", "ice": "is", "mac": "mk", "mao": "mi", "may": "ms", "per": "fa", "rum": "ro", "slo": "sk",
    "tib": "bo", "wel": "cy",
}  # fmt: skip
_OTHER_NAMES = {
    "bokmål": "nb", "castilian": "es", "farsi": "fa", "flemish": "nl", "frisian": "fy", "gaelic": "gd", "haitian": "ht",
    "letzeburgesch": "lb", "mandarin": "zh", "moldavian": "ro", "moldovan": "ro", "myanmar": "my", "nynorsk": "nn",
    "oriya": "or", "panjabi": "pa", "pushto": "ps", "sinhalese": "si", "slovene": "sl", "uighur": "ug",
    "valencian": "ca",
}  # fmt: skip


def _table() -> dict[str, Language]:
    rows = [entry.split(" ", 2) for line in _TWO_LETTERS.splitlines() for entry in line.rstrip(";").split("; ")]
    rows += [[code, code, name] for code, name in (entry.split(" ", 1) for entry in _THREE_LETTERS.split("; "))]
    return {code: Language(code, code3, name) for code, code3, name in rows}


LANGUAGES = _table()
"""Code → language."""

_SPELLINGS = (
    LANGUAGES
    | {language.code3: language for language in LANGUAGES.values()}
    | {language.name.lower(): language for language in LANGUAGES.values()}
    | {spelling: LANGUAGES[code] for spelling, code in (_BIBLIOGRAPHIC | _OTHER_NAMES).items()}
)


def find_language(text: str) -> Language | None:
    """The language that *text* means: a code, an English name in any case, or a locale (``en-US``, ``zh_Hant_TW``)."""
    word = text.strip().lower()
    return _SPELLINGS.get(word) or _SPELLINGS.get(word.replace("_", "-").partition("-")[0])


def name_of(code: str) -> str:
    """English name of *code*; *code* itself where it is none that is known here."""
    language = find_language(code)
    return code if language is None else language.name


def among(text: str, known: Iterable[str], param: str = "language") -> str:
    """The one of *known* (a family's own spellings: codes, locales, names) that *text* means.

    A locale matches as it is, else by its language, and the first of *known* with that language wins. Raises
    :class:`RequestError` that names *param* and the nearest of *known*.
    """
    spellings = list(known)
    wanted = _plain(text)
    for spelling in spellings:
        if _plain(spelling) == wanted:
            return spelling
    language = find_language(text)
    if language is not None:
        for spelling in spellings:
            if find_language(spelling) == language:
                return spelling
    names = {*spellings, *(name_of(spelling) for spelling in spellings)}
    near = nearest(text, names)
    if near.startswith("; known"):
        near = nearest(text, spellings)
    message = f"{param!r}: the model does not know the language {text[:40]!r}{near}"
    raise RequestError(message, param=param, code="unsupported_language")


def _plain(text: str) -> str:
    return text.strip().lower().replace("_", "-")

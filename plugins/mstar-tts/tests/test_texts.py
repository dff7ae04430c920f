"""Texts to phonemes, phonemes to pieces, and voices: without a model."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mstar.spec.errors import RequestError, WeightsError
from mstar_tts.espeak import espeak
from mstar_tts.kokoro import g2p
from mstar_tts.kokoro.g2p import can_pronounce, phonemes
from mstar_tts.kokoro.languages import language_of
from mstar_tts.kokoro.pieces import pieces
from mstar_tts.kokoro.tiny import CONFIG
from mstar_tts.kokoro.voices import Voices, parse_blend
from mstar_tts.plugin import mstar_doctor

needs_espeak = pytest.mark.skipif(espeak() is None, reason="espeak-ng is not installed")


# --- pronouncing ---------------------------------------------------------------------------------------------------


@needs_espeak
@pytest.mark.parametrize(
    ("code", "text", "spoken"),
    [
        ("a", "Hello, world!", "həlˈO, wˈɜɹld!"),
        ("a", "The judge — a boy — sings...", "ðə ʤˈʌʤ — ə bˈY — sˈɪŋz…"),
        ("a", '"Church," he said.', '"ʧˈɜɹʧ," hi sˈɛd.'),
        ("a", "Say [Kokoro](/kˈOkəɹO/)!", "sˈA kˈOkəɹO!"),
        ("a", "A [word](+1) today.", "ə wˈɜɹd tədˈA."),
        ("a", "At 3.14", "æt θɹˈi pYnt wˈʌn fˈɔɹ"),
        ("a", "😀 👍🏽", ""),
        ("a", "", ""),
        ("b", "Go home.", "ɡˌQ hˈQm."),
        ("e", "¿Cómo estás? ¡Hola!", "kˈomo estˈas? ˈola!"),
        ("f", "Bonjour, le week-end.", "bɔ̃ʒˈuʁ, lə wˈiːkˈɛnd."),
        ("i", "Ciao, zio.", "ʧˈao, ʣˈio."),
    ],
)
def test_espeak_is_read_in_the_letters_that_the_model_knows(
    code: str, text: str, spoken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(g2p, "_has_misaki_english", lambda: False)
    g2p._engine.__wrapped__.cache_clear()
    (found,) = phonemes([text], language_of(code), True)
    g2p._engine.__wrapped__.cache_clear()
    assert found == spoken
    assert set(found) <= CONFIG["vocab"].keys()


FIRST_CALLERS = """
import threading
from mstar_tts.kokoro.g2p import phonemes
from mstar_tts.kokoro.languages import language_of

together, said = threading.Barrier(8), []

def call():
    together.wait()
    said.extend(phonemes(["Hello, world!"], language_of("f"), True))

threads = [threading.Thread(target=call) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(said) == 8 and len(set(said)) == 1, said
"""


@needs_espeak
def test_the_first_callers_may_come_together() -> None:
    """A server's first requests do; the library aborts the process when two threads start it."""
    ran = subprocess.run([sys.executable, "-c", FIRST_CALLERS], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]


@needs_espeak
@given(st.text(max_size=80))
def test_any_text_becomes_phonemes(text: str) -> None:
    (found,) = phonemes([text], language_of("a"), True)
    assert found == found.strip()


def test_japanese_needs_the_dictionary_that_comes_by_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``pip install unidic`` brings none."""
    for package in ("misaki", "pyopenjtalk", "fugashi", "unidic"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    japanese = language_of("j")
    g2p._engine.__wrapped__.cache_clear()
    assert not can_pronounce(japanese)
    with pytest.raises(RequestError, match="then python -m unidic download"):
        phonemes(["x"], japanese, True)
    g2p._engine.__wrapped__.cache_clear()
    (tmp_path / "unidic" / "dicdir").mkdir()
    (tmp_path / "unidic" / "dicdir" / "mecabrc").touch()
    assert can_pronounce(japanese)


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(g2p, "espeak", lambda: None)
    monkeypatch.setattr(g2p, "_has_misaki_english", lambda: False)
    g2p._engine.__wrapped__.cache_clear()
    for code, extra in (("a", "g2p"), ("en-gb", "espeak"), ("f", "espeak"), ("j", "ja"), ("zh", "zh")):
        language = language_of(code)
        if code in ("j", "zh") and can_pronounce(language):
            continue
        assert not can_pronounce(language)
        with pytest.raises(RequestError, match=rf"mstar-tts\[{extra}\]") as caught:
            phonemes(["x"], language, True)
        assert (caught.value.param, caught.value.code) == ("lang_code", "language_not_installed")
    g2p._engine.__wrapped__.cache_clear()


def test_doctor_says_which_languages_can_be_pronounced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `mstar doctor` says of a machine without espeak-ng and misaki, and of one that has espeak-ng."""
    monkeypatch.setattr(g2p, "_has_misaki_english", lambda: False)
    monkeypatch.setattr(g2p, "_installed", lambda *modules: False)
    monkeypatch.setattr(g2p, "espeak", lambda: None)
    found = {finding.advice: finding for finding in mstar_doctor()}
    assert {finding.state for finding in found.values()} == {"missing"}
    (espeak_advice,) = (advice for advice in found if "apt install espeak-ng" in advice)
    assert found[espeak_advice].detail.endswith("Brazilian Portuguese: without espeak-ng")
    monkeypatch.setattr(g2p, "espeak", object)
    able, *unable = mstar_doctor()
    assert (able.state, "American English, British English, Spanish" in able.detail) == ("ok", True)
    assert [finding.detail.partition(":")[0] for finding in unable] == ["Japanese", "Mandarin Chinese"]


# --- pieces --------------------------------------------------------------------------------------------------------


def test_sentences_are_joined_up_to_the_target_and_the_first_piece_is_short() -> None:
    sentences = ["abcd efgh.", "ij kl.", "mn op.", "qr st."]
    assert pieces(sentences, 14, 10, 50) == ["abcd efgh.", "ij kl. mn op.", "qr st."]
    assert pieces(sentences, 100, 10, 510) == ["abcd efgh.", "ij kl. mn op. qr st."]
    assert pieces(["ab cd ef, gh ij kl mn op."], 100, 12, 510) == ["ab cd ef,", "gh ij kl mn op."]
    assert pieces(["ab cd ef gh ij kl mn op."], 100, 12, 510) == ["ab cd ef gh ij kl mn op."]  # no break to hear
    assert pieces([], 10, 10, 10) == pieces(["", ""], 10, 10, 10) == []


@given(st.lists(st.text("ab ,.;", max_size=60)), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_nothing_but_blanks_is_lost_and_nothing_is_too_long(
    sentences: list[str], target: int, first: int, longest: int
) -> None:
    found = pieces(sentences, min(target, longest), min(first, longest), longest)
    assert all(0 < len(piece) <= longest for piece in found)
    assert "".join("".join(found).split()) == "".join("".join(sentences).split())


# --- voices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "shares"),
    [
        ("a", {"a": 1.0}),
        ("a+b", {"a": 0.5, "b": 0.5}),
        ("a,b", {"a": 0.5, "b": 0.5}),
        (" a (2) + b(1) ", {"a": 2 / 3, "b": 1 / 3}),
        ("a(3)+b", {"a": 0.75, "b": 0.25}),
        ("a+b+a", {"a": 2 / 3, "b": 1 / 3}),
    ],
)
def test_blends(expression: str, shares: Mapping[str, float]) -> None:
    assert parse_blend(expression) == pytest.approx(shares)


@pytest.mark.parametrize(
    "expression", ["", "+", "a+", "a(x)", "a(0)", "a(-1)", "a(inf)", "a(nan)", "a(1e9)", "a b", "a()", "a(1)(2)", "((a"]
)
def test_what_is_no_blend_is_refused(expression: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_blend(expression)
    assert caught.value.param == "voice"


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("a++", "part 2 of the blend 'a++' is empty; did you mean 'a'?"),
        ("a(2)++ b", "part 2 of the blend 'a(2)++ b' is empty; did you mean 'a(2)+b'?"),
        (",a", "part 1 of the blend ',a' is empty; did you mean 'a'?"),
        ("+", "part 1 of the blend '+' is empty"),
    ],
)
def test_an_empty_part_of_a_blend_is_named(expression: str, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words) + "$"):
        parse_blend(expression)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.arange(40, dtype="<f4").tofile(tmp_path / "af_one.bin")
    torch.save(torch.full((10, 1, 4), 100.0), tmp_path / "bm_two.pt")
    return tmp_path


def test_styles_are_rows_by_the_number_of_phonemes_and_blends_are_their_means(folder: Path) -> None:
    voices = Voices(folder, 4)
    assert voices.names == ["af_one", "bm_two"]
    assert voices.style({"af_one": 1.0}, 3).tolist() == [8, 9, 10, 11]
    assert voices.style({"af_one": 1.0}, 99).tolist() == [36, 37, 38, 39]  # the longest that there is
    assert voices.style(voices.blend("af_one(1)+bm_two(3)"), 1).tolist() == [75, 75.25, 75.5, 75.75]
    assert voices.language(voices.blend("bm_two+af_one")).letter == "b"
    assert voices.describe("bm_two").gender == "male"
    with pytest.raises(RequestError, match="did you mean 'af_one'"):
        voices.blend("af_on")


def test_a_voice_that_is_a_pickle_is_not_unpickled(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> object:
            return (folder / "sprung").touch, ()

    for name in ("af_evil.pt", "af_old.bin"):
        (folder / name).write_bytes(pickle.dumps(Trap(), protocol=2) + b"\0" * 3)
    torch.save(Trap(), folder / "af_zip.pt")
    voices = Voices(folder, 4)
    for name in ("af_evil", "af_old", "af_zip"):
        with pytest.raises(WeightsError, match=name):
            voices.style({name: 1.0}, 1)
    assert not (folder / "sprung").exists()


def test_a_default_voice_that_is_not_there_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("af_alloy", "am_adam"):
        (tmp_path / f"{name}.bin").touch()
    voices = Voices(tmp_path, 4)
    for there in ("am_adam", "am_adam(2)+af_alloy"):
        assert voices.default(there) == there
    assert not caplog.records
    assert voices.default("am_adm") == "af_alloy"
    assert (
        "'default_voice': there is no voice 'am_adm'; did you mean 'am_adam'?; 'af_alloy' speaks instead" in caplog.text
    )

"""Incremental decoding, stop strings and rendering, on real tokenizers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mstar.processing.stops import StopStrings
from mstar.processing.text import Decode, Detokenizer, TextRenderer
from mstar.processing.token_bytes import token_speller
from mstar.spec.processor import TextDelta
from mstar.spec.request import Done, Emit, TokenLogprob
from mstar.testing.tiny_tokenizers import EOS, byte_level, id_of, sentencepiece

BYTES, PIECES = byte_level(), sentencepiece()

TEXTS = [
    "Hello there",
    " leading and  double  spaces ",
    "😀 family 👩‍👩‍👧‍👦 flag 🇫🇷!",
    "你好,世界。日本語",
    "naïve é\u0301 ñ\n\ttabs",
    "real \N{REPLACEMENT CHARACTER} character",
]


def decode(tokenizer: Tokenizer) -> Decode:
    return functools.partial(tokenizer.decode, skip_special_tokens=True)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode(tokenizer))
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "sentencepiece"])
@pytest.mark.parametrize("text", TEXTS)
def test_joined_pieces_are_the_decoded_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
        assert parts[-1] == ""


def test_text_is_passed_on_as_soon_as_it_is_whole() -> None:
    ids = BYTES.encode("a😀b").ids
    parts = pieces(BYTES, ids)
    assert parts[0] == "a"
    assert parts[len(ids) - 1] == "b"
    assert [p for p in parts if p] == ["a", "😀", "b"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=150))
def test_any_ids_of_a_byte_level_model(ids: list[int]) -> None:
    assert "".join(pieces(BYTES, ids)) == BYTES.decode(ids)


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=40))
def test_any_text_with_byte_fallback(text: str) -> None:
    ids = PIECES.encode(text).ids
    assert "".join(pieces(PIECES, ids)) == PIECES.decode(ids)


def test_special_tokens_in_the_middle_do_not_eat_spaces() -> None:
    ids = [*PIECES.encode("Hello").ids, id_of(PIECES, "</s>"), *PIECES.encode("the", add_special_tokens=False).ids]
    assert "".join(pieces(PIECES, ids)) == PIECES.decode(ids) == "Hello the"


def test_endless_broken_bytes_are_decoded_in_bounded_windows() -> None:
    sizes: list[int] = []

    def counting(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return str(BYTES.decode(ids))

    broken = id_of(BYTES, "Ģ")  # byte 0x80, which begins no character
    detokenizer = Detokenizer(counting)
    text = "".join([*(detokenizer.push(broken) for _ in range(1000)), detokenizer.finish()])
    assert text == BYTES.decode([broken] * 1000)
    assert max(sizes) < 100


def run(stops: StopStrings, parts: Sequence[str]) -> tuple[str, bool]:
    out = ""
    for part in parts:
        text, found = stops.push(part)
        out += text
        if found:
            return out, True
    return out + stops.finish(), False


@settings(max_examples=200, deadline=None)
@given(
    st.text("abc", max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 12), max_size=5),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if ends:
        end, begin = min(ends)
        expected = (text[: end if include else begin], True)
    else:
        expected = (text, False)
    assert run(StopStrings(stops, include), parts) == expected


def test_exactly_what_could_become_a_stop_string_is_held() -> None:
    stops = StopStrings(["END", "\n\n"])
    assert stops.push("an E") == ("an ", False)
    assert stops.push("N") == ("", False)
    assert stops.push("E") == ("EN", False)
    assert stops.push("x\n") == ("Ex", False)
    assert stops.push("yEN") == ("\ny", False)
    assert stops.finish() == "EN"


def emit(ids: Sequence[int], logprobs: bool = False, stream: str = "text") -> Emit:
    reports = [TokenLogprob(token=i, logprob=-float(i)) for i in ids] if logprobs else None
    return Emit(id="r", stream=stream, seq=0, data=list(ids), logprobs=reports)


def render(renderer: TextRenderer, ids: Sequence[int], size: int, logprobs: bool = True) -> list[TextDelta]:
    deltas: list[TextDelta] = []
    for begin in range(0, len(ids), size):
        if renderer.finished is None:
            deltas += renderer.feed(emit(ids[begin : begin + size], logprobs))
    return [*deltas, *renderer.finish(None if renderer.finished else Done(id="r", reason="length"))]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=60), st.integers(1, 7))
def test_an_answer_without_stop_strings_is_rendered_like_one_whose_stop_string_never_comes(
    ids: list[int], size: int
) -> None:
    hidden = ids[:1]
    free = TextRenderer(decode(BYTES), hidden=hidden)
    watched = TextRenderer(decode(BYTES), stop=("\0 never \0",), hidden=hidden)
    # a stop string's first character would be held back
    whole = [i for i in ids if "\0" not in BYTES.decode([i])]
    assert render(free, whole, size) == render(watched, whole, size)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_rendering_passes_on_all_text_tokens_and_logprobs(size: int) -> None:
    ids = BYTES.encode("".join(TEXTS)).ids
    deltas = render(TextRenderer(decode(BYTES)), ids, size)
    assert "".join(d.text for d in deltas) == "".join(TEXTS)
    assert [t for d in deltas for t in d.tokens] == ids
    assert [r.token for d in deltas for r in d.logprobs] == ids
    for end in range(len(deltas)):
        tokens = [t for d in deltas[: end + 1] for t in d.tokens]
        assert "".join(d.text for d in deltas[: end + 1]).startswith(BYTES.decode(tokens))


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_answer(size: int, include: bool) -> None:
    renderer = TextRenderer(decode(BYTES), stop=["世界", "zzz"], include_stop=include)
    ids = BYTES.encode("你好,世界。今天").ids
    deltas = render(renderer, ids, size)
    shown = "你好,世界" if include else "你好,"
    assert renderer.finished == "stop"
    assert "".join(d.text for d in deltas) == shown
    tokens = [t for d in deltas for t in d.tokens]
    assert tokens == ids[: len(tokens)]
    assert BYTES.decode(tokens) == shown
    assert list(renderer.feed(emit(ids))) == []


def test_tokens_are_held_with_their_text() -> None:
    renderer = TextRenderer(decode(BYTES), stop=["abX"])
    a, b, c = (BYTES.encode(letter).ids[0] for letter in "abc")
    assert list(renderer.feed(emit([a, b], True))) == []
    (delta,) = renderer.feed(emit([c], True))
    assert (delta.text, delta.tokens) == ("abc", (a, b, c))
    assert [r.token for r in delta.logprobs] == [a, b, c]
    assert list(renderer.feed(emit([a]))) == []
    (rest,) = renderer.finish(Done(id="r", reason="length"))
    assert (rest.text, rest.tokens) == ("a", (a,))


def test_stop_tokens_and_other_streams_are_not_shown() -> None:
    eos, a = id_of(BYTES, EOS), BYTES.encode("a").ids[0]
    renderer = TextRenderer(decode(BYTES), hidden=[eos, a])
    assert list(renderer.feed(emit([a], stream="audio"))) == []
    assert list(renderer.feed(emit([a, eos], True))) == []
    assert list(renderer.finish(Done(id="r", reason="stop"))) == []


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_token_bytes_join_to_the_text(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    spell = token_speller(tokenizer)
    text = "Hello there 你好 😀 é"
    joined = b"".join(spell(i) for i in tokenizer.encode(text, add_special_tokens=False).ids)
    assert joined.decode().lstrip(" ") == text
    assert spell(10**6) == b""

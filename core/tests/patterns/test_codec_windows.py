"""Speech on the LM-to-codec pattern is that of the whole answer, however it is cut and in whatever company."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from wide_codec import FRAME, SAMPLES, VARIANTS, sound

from mstar.patterns.lm_codec import most_new, window_sizes
from mstar.plugins import load_plugins
from mstar.processing.crossfade import Crossfade
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.spec.graph import Fixed, Ramp
from mstar.testing.drive import Driver
from mstar.testing.examples import Example
from mstar.testing.miniatures.catalog import continue_sum, encode

ASKED = {"a": ("one", 40, 5), "b": ("two words", 23, 11), "c": ("x", 2, 3), "d": ("three", 40, 17)}


def driver(model: str) -> Driver:
    return Driver(model, Registry(load_plugins(Settings(extra_plugins=("wide_codec",)))))


def ask(driver: Driver, name: str) -> None:
    text, count, seed = ASKED[name]
    driver.submit(name, Example(text, {"max_tokens": count, "seed": seed}))


def heard(driver: Driver, name: str, overlap: int = 0) -> np.ndarray:
    fade = Crossfade(overlap)
    events = sorted(driver.emitted.get(name, []), key=lambda event: event.seq)
    return np.concatenate([*(fade.feed(event.data) for event in events), fade.finish()])


def whole(name: str) -> np.ndarray:
    text, count, seed = ASKED[name]
    codes = continue_sum(encode(text), count)
    codes = codes[: len(codes) - len(codes) % FRAME]
    if not codes:
        return np.zeros(0, np.float32)
    return sound(torch.tensor([codes]), torch.tensor([seed]), torch.tensor([0]))[0].numpy()


@pytest.mark.parametrize("model", ["exact", "ramp", "overlap"])
def test_the_pieces_are_the_whole(model: str) -> None:
    one = driver(model)
    for name in ASKED:
        ask(one, name)
    one.run()
    for name in ASKED:
        np.testing.assert_array_equal(heard(one, name, VARIANTS[model].overlap), whole(name))
    one.assert_empty()


@pytest.mark.parametrize("model", ["exact", "ramp", "overlap"])
def test_the_pieces_are_the_whole_where_the_first_ones_are_held(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 4 ms, a frame of three codes plays 40."""
    one, now, at = driver(model), [1000.0], dict[str, list[float]]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for name in ASKED:
        ask(one, name)
    while len(one.ended) < len(ASKED):
        one.worker.step()
        one.take()
        now[0] += 0.004
        for name, events in one.emitted.items():
            times = at.setdefault(name, [])
            times += [now[0]] * (len(events) - len(times))
    for name in ASKED:
        np.testing.assert_array_equal(heard(one, name, VARIANTS[model].overlap), whole(name))
        assert [event.seq for event in one.emitted.get(name, ())] == list(range(len(at.get(name, ()))))
    assert at["a"][0] == at["a"][1] < at["a"][-1]  # begun with two pieces or more
    one.assert_empty()


def test_windows_without_what_the_codec_needs_sound_different() -> None:
    one = driver("short")
    ask(one, "a")
    one.run()
    assert len(heard(one, "a")) == len(whole("a"))
    assert (heard(one, "a") != whole("a")).any()


def test_windows_of_one_size_share_a_step() -> None:
    one = driver("exact")
    for name in ("a", "d"):  # of one length: they go side by side
        ask(one, name)
    one.run()
    steps = one.worker.engine.nodes["codec"].steps
    assert {rows for rows, _ in steps} == {2}
    assert [codes // FRAME for _, codes in steps] == [3, 4, *[5] * 9, 4, 3]


def test_sound_begins_with_the_first_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)  # or the first piece may be held, if this machine is slow
    one = driver("exact")
    ask(one, "a")
    one.run(until=lambda: bool(one.emitted.get("a")))
    assert one.worker.engine.nodes["codec"].steps == [(1, 3 * FRAME)]
    one.cancel("a")
    one.run()
    one.assert_empty()


def test_only_codes_of_the_position_that_comes_next_are_heard() -> None:
    one = driver("picky")
    ask(one, "a")
    one.run()
    kept: list[int] = []
    for token in continue_sum(encode("one"), 40):
        low, high = VARIANTS["picky"].codes[len(kept) % FRAME]
        if low <= token < high:
            kept.append(token)
    assert 2 * FRAME < len(kept) < 40
    kept = kept[: len(kept) - len(kept) % FRAME]
    expected = sound(torch.tensor([kept]), torch.tensor([5]), torch.tensor([0]))[0].numpy()
    np.testing.assert_array_equal(heard(one, "a"), expected)


def test_a_token_that_ends_the_answer_is_a_code_like_any_other_here() -> None:
    """The pattern goes by the ids that are codes, not by what ends an answer."""
    one, codes = driver("exact"), continue_sum(encode("one"), 40)
    stop = codes[8]
    one.submit("a", Example("one", {"max_tokens": 40, "seed": 5, "stop_token": stop}))
    one.run()
    assert len(heard(one, "a")) == (codes.index(stop) + 1) // FRAME * SAMPLES


@pytest.mark.parametrize(
    ("chunk", "sizes"),
    [
        (Fixed(1, 1, 2, 7), [21, 28, 14]),
        (Ramp((1, 2, 4), left=1, ahead=2), [3, 5, 7, 4, 2]),
        (Fixed(4), [4]),
        (Ramp((1, 3, 8), left=9), [1, 4, 12, 17]),
        (Ramp((1, 3, 8), left=9, padded=(4, 20)), [4, 20]),
    ],
)
def test_window_sizes(chunk: Fixed | Ramp, sizes: list[int]) -> None:
    assert window_sizes(chunk) == sizes
    assert all(a != b for a, b in pairwise(sizes))


def test_windows_of_one_size_have_as_much_that_is_new() -> None:
    """Ends included: a codec may then compute what is new of a window by its size."""
    assert most_new(Ramp((1, 1, 2, 2, 4), left=1, ahead=2)) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 7: 4}
    assert most_new(Fixed(3, left=1)) == {1: 1, 2: 2, 3: 3, 4: 3}

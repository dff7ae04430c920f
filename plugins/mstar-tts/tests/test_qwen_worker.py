"""Qwen3-TTS in a worker: recorded steps and look-ahead change nothing, clips are heard once, answers are bounded."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.spec.errors import RequestError
from mstar.spec.request import Done
from mstar.spec.tasks import Audio
from mstar.testing import Driver, Example
from mstar_tts.qwen3_tts import tiny

sys.path.insert(0, str(Path(__file__).parents[3] / "core/tests/engine"))
from recording import record_steps

ENGINE = {"threads": 1, "runner": "eager"}
Make = Callable[..., Driver]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A worker of a key, with fields of the deployment."""
    registry = Registry(load_plugins(Settings(extra_plugins=("mstar_tts.plugin",))))
    folders: dict[str, Path] = {}

    def made(key: str, **more: Any) -> Driver:
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(key)
            getattr(tiny, f"write_{key}")(folders[key])
        fields = {"engine": ENGINE, "resources": {"kv": {"tokens": 8192}}, "max_concurrent_requests": 8, **more}
        return Driver(key, registry, folders[key], device="cpu", dtype="float32", executor="inline", **fields)

    return made


def clip(seed: int = 0, samples: int = 13_000) -> Audio:
    return Audio(np.random.default_rng(seed).normal(0, 0.1, samples).astype(np.float32), 24_000)


def requests(key: str) -> dict[str, Example]:
    """Five requests of different lengths, ways and draws."""
    found = {}
    for number, text in enumerate(("one", "a cat sat on a mat", "the bird", "mat and cat and mat", "saw it")):
        knobs: dict[str, Any] = {"seed": number, "max_new_tokens": 6 + number, "non_streaming_mode": number % 2 == 0}
        parts: tuple[Audio, ...] = ()
        if key == "qwen3_tts_base":
            knobs |= {"ref_text": "so it goes", "x_vector_only_mode": number % 3 == 0}
            parts = (clip(number),)
        found[f"r{number}"] = Example(text, knobs, parts=parts)
    return found


def alone(make: Make, key: str) -> dict[str, Any]:
    sounds = {}
    for name, example in requests(key).items():
        driver = make(key)
        driver.submit(name, example)
        driver.run()
        sounds[name] = driver.result(name)["audio"]
    return sounds


@pytest.fixture(scope="module", params=["qwen3_tts", "qwen3_tts_base"])
def wanted(request: pytest.FixtureRequest, make: Make) -> tuple[str, dict[str, Any]]:
    return request.param, alone(make, request.param)


def check(driver: Driver, want: dict[str, Any]) -> None:
    for name, sound in want.items():
        got = driver.result(name)["audio"]
        assert got.shape == sound.shape
        assert len(got) > 1920
        np.testing.assert_allclose(got, sound, atol=1e-4)
    driver.assert_empty()


def test_recorded_steps_change_nothing(
    wanted: tuple[str, dict[str, Any]], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, want = wanted
    driver = make(key)
    runner, recorder = record_steps(monkeypatch, driver, rows=4)
    talkers = [dict(place[4]) for place in runner._lanes if place[:2] == ("talker", "forward")]
    assert {(v["sampler"].filters, v["sampler"].edits, v["subtalker"].filters) for v in talkers} == {(True, True, True)}
    for name, example in requests(key).items():
        driver.submit(name, example)
    driver.run()
    check(driver, want)
    assert recorder.replays > 20
    assert runner.lanes, "no step with a prompt was recorded"
    assert [fault for place, fault in runner.faults.items() if place[0] == "talker"] == []
    assert any(place[:2] == ("talker", "prepare") for place in runner._lanes)


def test_look_ahead_changes_nothing(wanted: tuple[str, dict[str, Any]], make: Make) -> None:
    key, want = wanted
    driver = make(key, engine={**ENGINE, "lookahead": True})
    for name, example in requests(key).items():
        driver.submit(name, example)
        driver.worker.step()
        driver.take()
    driver.run()
    check(driver, want)


class Heard:
    """How often clips were heard."""

    def __init__(self, driver: Driver):
        self.voices = self.frames = 0
        nodes: dict[str, Any] = driver.worker.engine.nodes
        speaker, encoder = nodes["speaker"].forward, nodes["encoder"].forward

        def voice(step: Any, clip: Any) -> Any:
            self.voices += step.rows
            return speaker(step, clip)

        def frames(step: Any, clip: Any) -> Any:
            self.frames += step.rows
            return encoder(step, clip)

        nodes["speaker"].forward, nodes["encoder"].forward = voice, frames


def test_a_clip_is_heard_once(make: Make) -> None:
    driver = make("qwen3_tts_base")
    heard = Heard(driver)
    timbre = Example("one", {"x_vector_only_mode": True, "max_new_tokens": 4, "seed": 1}, parts=(clip(),))
    clone = replace(timbre, knobs={"ref_text": "so it goes", "max_new_tokens": 4, "seed": 1})
    for number, (example, voices, frames) in enumerate(
        ((timbre, 1, 0), (clone, 1, 1), (clone, 1, 1), (timbre, 1, 1), (replace(clone, parts=(clip(1),)), 2, 2))
    ):
        driver.submit(f"r{number}", example)
        driver.run()
        assert isinstance(driver.ended[f"r{number}"], Done)
        assert (heard.voices, heard.frames) == (voices, frames)
    np.testing.assert_array_equal(driver.result("r1")["audio"], driver.result("r2")["audio"])
    assert not np.array_equal(driver.result("r1")["audio"], driver.result("r4")["audio"])


@pytest.mark.parametrize(("text", "said", "field"), [("one", "on " * 3000, "ref_text"), ("on " * 3000, "one", "text")])
def test_of_two_texts_the_one_that_is_too_long_is_named(make: Make, text: str, said: str, field: str) -> None:
    driver = make("qwen3_tts_base")
    with pytest.raises(RequestError, match=f"^'{field}': [0-9]{{4}} tokens are to be read") as caught:
        driver.submit("r", Example(text, {"ref_text": said, "max_new_tokens": 4}, parts=(clip(),)))
    assert (caught.value.param, caught.value.code) == (field, "text_too_long")


def test_what_was_heard_is_bounded(make: Make) -> None:
    driver = make("qwen3_tts_base", model_kwargs={"cached_clips": 2})
    heard = Heard(driver)
    for number, seed in enumerate((0, 1, 0, 2, 0, 1)):
        example = Example("one", {"x_vector_only_mode": True, "max_new_tokens": 3}, parts=(clip(seed),))
        driver.submit(f"r{number}", example)
        driver.run()
    assert heard.voices == 4  # of the third clip 1 was forgotten, of which the sixth request wants to hear again


def test_an_answer_is_bound_by_its_text(make: Make) -> None:
    driver = make("qwen3_tts", model_kwargs={"max_frames_per_token": 1.0})
    for name, knobs in {"bound": {}, "asked": {"max_new_tokens": 70}, "endless": {"ignore_eos": True}}.items():
        prepared = driver.prepare(name, Example("a", {"seed": 3, **knobs}))
        assert prepared.request.sampling["sampler"].max_tokens == {"bound": 51, "asked": 69, "endless": 2047}[name]


def test_frames_are_one_less_than_tokens(make: Make) -> None:
    driver = make("qwen3_tts")
    driver.submit("r", Example("one", {"max_new_tokens": 5, "ignore_eos": True}))
    driver.run()
    end = driver.ended["r"]
    assert isinstance(end, Done)
    assert end.reason == "length"
    assert driver.result("r")["audio"].shape == (4 * 1920,)


def test_sound_comes_after_the_first_frame_and_in_growing_pieces(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)  # or the first piece may be held, if this machine is slow
    driver = make("qwen3_tts_1p7b")
    driver.submit("r", Example("one", {"max_new_tokens": 40, "ignore_eos": True, "seed": 5}))
    steps: list[int] = []
    while "r" not in driver.ended:
        driver.worker.step()
        driver.take()
        steps.append(len(driver.emitted.get("r", ())))
    assert [len(event.data) / 1920 for event in driver.emitted["r"]] == [1, 3, 8, 16, 11]
    assert steps.index(1) <= 2  # the prompt, perhaps one more frame, then the codec


def test_the_last_piece_is_one_of_few_sizes_and_as_long_as_its_frames(make: Make) -> None:
    """Six frames are pieces of 1, 3 and 2, of which the last is filled up to 3."""
    driver = make("qwen3_tts")
    sizes, plain = [], driver.worker.engine.launch

    def launch(work: Any) -> Any:
        sizes.extend(w.call.inputs["codes"].length for w in work if w.call.op.call.node == "codec")
        return plain(work)

    driver.worker.engine.launch = launch  # type: ignore[method-assign]
    driver.submit("r", Example("a cat sat", {"seed": 1, "max_new_tokens": 7, "ignore_eos": True}))
    driver.run()
    assert sizes == [1, 3, 3]
    sound = driver.result("r")["audio"].reshape(-1)
    codec = driver.worker._model.codec  # type: ignore[attr-defined]
    assert len(sound) == 6 * codec.samples_per_frame
    driver.assert_empty()

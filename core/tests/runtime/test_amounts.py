"""What usage tells: amounts of input and output, in units that people know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mstar.runtime.amounts import Made, brought
from mstar.runtime.local import load
from mstar.runtime.result import Result
from mstar.settings import Settings
from mstar.spec.processor import ArrayDelta, AudioDelta, FramesDelta, TextDelta
from mstar.spec.tasks import Audio, ChatTask, CompletionTask, GenerateTask, Image, Message, Text, Video

SOUND = Audio(np.zeros(12_000, np.float32), 16_000)
PICTURE = Image(np.zeros((4, 6, 3), np.uint8))
FILM = Video(np.zeros((5, 2, 2, 3), np.uint8), 25.0, SOUND)


def test_what_a_task_brings() -> None:
    parts = (PICTURE, SOUND, Text("x"), PICTURE, FILM)
    amounts = {"tokens": 7, "pixels": 48, "audio_seconds": 1.5, "frames": 5}
    assert brought(GenerateTask(knobs=None, parts=parts), 7) == amounts
    messages = (Message("user", parts[:2]), Message("assistant", (Text("y"),)), Message("user", parts[2:]))
    assert brought(ChatTask(knobs=None, messages=messages), 7) == amounts
    assert brought(CompletionTask(knobs=None, prompt="x"), 3) == {"tokens": 3}
    assert brought(GenerateTask(knobs=None), 0) == {}


def test_what_is_made_has_a_unit() -> None:
    made = Made()
    frames = np.zeros((2, 4, 4, 3), np.uint8)
    for delta in (
        TextDelta("a", (1,)),
        AudioDelta(np.zeros(800, np.float32), 16_000),
        AudioDelta(np.zeros((800, 2), np.float32), 16_000),
        FramesDelta(frames),
        FramesDelta(frames, 8.0, "video"),
        ArrayDelta(np.zeros(3)),
    ):
        made.add(delta)
    counted = {"tokens": 9, "audio": 1600, "image": 2, "video": 2, "action": 3}
    assert made.of(counted) == {"tokens": 9, "audio_seconds": 0.1, "images": 2, "frames": 2, "action": 3}


def test_items_without_a_delta_stay_as_they_are_counted() -> None:
    assert Made().of({"audio": 1600}) == {"audio": 1600}


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    settings = Settings(plugins=(), extra_plugins=("mstar.testing.miniatures",))
    opened: dict[str, Any] = {}

    def run(key: str, text: str, **knobs: Any) -> Result:
        model = opened.get(key) or opened.setdefault(key, load(key, settings=settings))
        return model.generate(text, **knobs)  # type: ignore[no-any-return]

    yield run
    for model in opened.values():
        model.close()


def test_a_speaking_models_tokens_are_those_of_its_language_model(run: Any) -> None:
    result = run("mini_tts", "hello", max_tokens=6)
    assert result.audio is not None
    seconds = len(result.audio.samples) / result.audio.rate
    assert result.usage.input == {"tokens": 5}
    assert result.usage.output == {"tokens": 6, "audio_seconds": pytest.approx(seconds)}


def test_a_models_text_is_counted_once(run: Any) -> None:
    assert run("mini_chat", "hello", max_tokens=6).usage.output == {"tokens": 6}


def test_tokens_without_a_sampler_are_those_that_went_out(run: Any) -> None:
    result = run("mini_transducer", "hello")
    assert result.usage.output == {"tokens": len(result.tokens)}
    assert result.tokens


def test_images_are_counted(run: Any) -> None:
    result = run("mini_denoise", "hello")
    assert result.images
    assert result.usage.output == {"images": len(result.images)}

"""The real Whisper: fetched, checked, converted, and held against CTranslate2 on real speech."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hearing import Ears
from real_speech import RECORDED, speech, weights

from mstar.spec.knobs import validate_knobs
from mstar.spec.processor import ProcessorContext, TextDelta
from mstar.spec.request import Emit
from mstar.spec.tasks import Audio, GenerateTask
from mstar_asr.whisper.processor import WhisperProcessor
from mstar_asr.whisper.spec import WHISPER_BASE, WHISPER_TINY_EN, WhisperKnobs

pytestmark = pytest.mark.real_weights

RECORDS: list[dict[str, Any]] = json.loads(RECORDED.read_text())
SPECS = {spec.key: spec for spec in (WHISPER_BASE, WHISPER_TINY_EN)}


@pytest.fixture(scope="module", params=list(SPECS))
def ears(request: pytest.FixtureRequest) -> Ears:
    spec = SPECS[request.param]
    return Ears(weights(spec), spec.key)


def test_greedy_ids_are_those_of_ctranslate2(ears: Ears) -> None:
    """All clips at once, with and without timestamps; the multilingual model finds the language out."""
    records = [one for one in RECORDS if one["model"] == ears.key]
    assert records
    requests = [
        ears.request(str(number), speech(one["clip"]), how={"timestamps": one["timestamps"]}, logprobs=0)
        for number, one in enumerate(records)
    ]
    for one, got in zip(records, ears.hear(*requests), strict=True):
        said = got["text"][:-1] if got["text"][-1] == ears.tokens.eot else got["text"]
        assert said == one["ids"], (one["clip"], one["timestamps"])
        assert got["no_speech"][0] == pytest.approx(one["no_speech"], abs=1e-3)
        if "language" in one:
            assert got["language"][0, 0] == one["language"]
            assert got["language"][0, 1] == pytest.approx(one["probability"], abs=1e-3)


def test_a_native_request_hears_what_comes_after_pauses() -> None:
    """Asked for no times, Whisper base ends after the second sentence."""
    folder = weights(WHISPER_BASE)
    model = WhisperProcessor(ProcessorContext(WHISPER_BASE, folder, WHISPER_BASE.options()))
    pause = np.zeros(2 * 16_000, np.float32)
    sound = np.concatenate((speech("counting"), pause, speech("quick_brown_fox"), pause, speech("jfk")))
    knobs = validate_knobs(WhisperKnobs, {"language": "en"})
    task = GenerateTask(knobs=knobs, parts=(Audio(sound, 16_000),))
    prepared = model.prepare(task, "r")
    renderer = model.renderer(task, prepared)
    (got,) = Ears(folder, WHISPER_BASE.key).hear(prepared.request)
    deltas = [*renderer.feed(Emit(id="r", stream="text", seq=0, data=got["text"])), *renderer.finish(None)]
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    assert text.startswith("1")
    assert "lazy dog" in text
    assert "my fellow Americans" in text
    assert "<|" not in text


def test_words_follow_the_sound(ears: Ears) -> None:
    """Each token looks later than the one before, on the whole, and none beyond the clip."""
    how = {"language": "en"} if ears.tokens.multilingual else {}
    frames = len(speech("beckett")) // 160
    (got,) = ears.hear(ears.request("r", speech("beckett"), how=how, words=True, frames=frames))
    places = got["alignment"].argmax(1)
    steps = places[1:] - places[:-1]
    assert (steps >= 0).mean() > 0.85
    assert places.max() < frames // 2
    assert not got["alignment"][:, frames // 2 :].any()
    assert got["aligned_probability"].mean() > 0.7

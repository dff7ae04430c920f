"""What requests become, and what is refused, before anything runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.registry import Registry
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.processor import ProcessorContext, SegmentDelta, TextDelta
from mstar.spec.request import Done, Emit
from mstar.spec.tasks import Audio, ChatTask, GenerateTask, Image, Task, TranscriptionTask
from mstar_asr.qwen3_asr.processor import Qwen3ASRProcessor
from mstar_asr.qwen3_asr.spec import LANGUAGES, Qwen3ASRKnobs, Qwen3ASROptions
from mstar_asr.qwen3_asr.tiny import tones, write

RATE = 16_000
CLIP = Audio(tones(random.Random(1), 1.5), RATE)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory, asr: Registry) -> Qwen3ASRProcessor:
    folder = tmp_path_factory.mktemp("qwen3")
    write(folder)
    return Qwen3ASRProcessor(ProcessorContext(asr.model("qwen3_asr"), folder, Qwen3ASROptions()))


def clip(**fields: Any) -> TranscriptionTask:
    return TranscriptionTask(**{"knobs": Qwen3ASRKnobs(), "audio": CLIP, **fields})


def prompt(processor: Qwen3ASRProcessor, task: Task) -> str:
    ids = list(processor.prepare(task, "r").request.inputs["prompt"])
    return processor.tokenizer.decode(ids, skip_special=False)


@pytest.mark.parametrize("spelling", ["de", "German", "GERMAN", "deu", "de-AT", " german "])
def test_a_language_has_many_spellings(processor: Qwen3ASRProcessor, spelling: str) -> None:
    end = "<|im_start|>assistant\nlanguage German<asr_text>"
    assert prompt(processor, clip(language=spelling)).endswith(end)
    assert prompt(processor, clip(knobs=Qwen3ASRKnobs(language=spelling))).endswith(end)


def test_every_language_has_a_code(processor: Qwen3ASRProcessor) -> None:
    from mstar.processing.speech.languages import find_language

    codes = {name: found.code for name in LANGUAGES if (found := find_language(name)) is not None}
    assert len(codes) == 30
    for name, code in codes.items():
        assert f"language {name}<asr_text>" in prompt(processor, clip(language=code))
    assert (codes["Cantonese"], codes["Filipino"], codes["Persian"]) == ("yue", "fil", "fa")


def test_a_native_request_says_the_same(processor: Qwen3ASRProcessor) -> None:
    native = GenerateTask(knobs=Qwen3ASRKnobs(language="fr"), text="Ada, Grace", parts=(CLIP,))
    assert prompt(processor, native) == prompt(processor, clip(language="fr", prompt="Ada, Grace"))
    assert "<|im_start|>system\nAda, Grace<|im_end|>" in prompt(processor, native)


@pytest.mark.parametrize(
    ("task", "param"),
    [
        (clip(language="Germn"), "language"),
        (clip(translate=True), "task"),
        (clip(timestamps=("segment", "word")), "timestamp_granularities"),
        (clip(stop=("x",)), "stop"),
        (clip(audio=None), "file"),
        (clip(live=("audio",)), "file"),
        (clip(prompt="word " * 40_000), "prompt"),
        (clip(knobs=Qwen3ASRKnobs(max_tokens=40_000)), "max_tokens"),
        (GenerateTask(knobs=Qwen3ASRKnobs()), "files"),
        (GenerateTask(knobs=Qwen3ASRKnobs(), text="word " * 40_000, parts=(CLIP,)), "text"),
        (GenerateTask(knobs=Qwen3ASRKnobs(), parts=(CLIP, CLIP)), "parts"),
        (GenerateTask(knobs=Qwen3ASRKnobs(), parts=(Image(np.zeros((2, 2, 3), np.uint8)),)), "parts[0]"),
        (GenerateTask(knobs=Qwen3ASRKnobs(), parts=(Audio(np.zeros(8000 * 1201, np.float32), 8000),)), "files"),
        (ChatTask(knobs=Qwen3ASRKnobs(), messages=()), None),
    ],
)
def test_what_is_refused(processor: Qwen3ASRProcessor, task: Task, param: str | None) -> None:
    with pytest.raises(RequestError) as error:
        processor.prepare(task, "r")
    assert (error.value.status, error.value.param) == (400, param)


def test_any_rate_becomes_the_models(processor: Qwen3ASRProcessor) -> None:
    samples = np.sin(np.arange(48_000) / 30).astype(np.float32) * 0.3
    sound = processor.prepare(clip(audio=Audio(samples, 48_000)), "r").request.inputs["sound"]
    np.testing.assert_allclose(sound[0, 1201:15201], np.sin(np.arange(1000, 15000) / 10) * 0.3, atol=1e-3)


def test_long_uploads_are_cut_where_it_is_quiet(processor: Qwen3ASRProcessor) -> None:
    rate, seconds = 8000, 2000
    samples = np.tile(tones(random.Random(2), 1.0)[:rate], seconds) + np.float32(0.2)
    quiet = slice(1003 * rate, 1003 * rate + rate // 5)
    samples[quiet] = 0.0
    samples[5] = 4.0  # too loud: all of it is divided by this
    first, second = processor.windows(clip(audio=Audio(samples, rate)))
    assert first.audio is not None
    assert second.audio is not None
    assert len(first.audio.samples) + len(second.audio.samples) == seconds * RATE
    assert 1003 <= second.offset <= 1003.2
    assert np.abs(second.audio.samples).max() < 0.2
    assert processor.windows(clip(live=("audio",), audio=None)) == (clip(live=("audio",), audio=None),)


def test_longer_clips_may_have_longer_answers(processor: Qwen3ASRProcessor) -> None:
    lengths = {
        seconds: processor.prepare(clip(audio=Audio(np.zeros(seconds * RATE, np.float32), RATE)), "r")
        .request.sampling["sampler"]
        .max_tokens
        for seconds in (1, 51, 100, 1200)
    }
    assert lengths == {1: 512, 51: 512, 100: 1000, 1200: 12_000}


def test_an_answer_becomes_text_and_one_segment(processor: Qwen3ASRProcessor) -> None:
    task = clip()
    prepared = processor.prepare(task, "r")
    renderer = processor.renderer(task, prepared)
    head = processor.tokenizer.encode("language Japanese<asr_text>", special=False)
    words = processor.tokenizer.encode("世界 says hello.", special=False)
    deltas = []
    for seq, token in enumerate([*head, *words, processor.stop_ids[0]]):
        deltas += renderer.feed(Emit(id="r", stream="text", seq=seq, data=[token]))
    deltas += renderer.finish(Done(id="r", reason="stop"))
    *texts, segment = deltas
    assert all(isinstance(delta, TextDelta) for delta in texts)
    assert "".join(delta.text for delta in texts) == "世界 says hello."
    assert [token for delta in texts for token in delta.tokens] == words
    assert segment == SegmentDelta(0.0, 1.5, "世界 says hello.", language="ja", tokens=tuple(words))


def test_silence_gives_nothing(processor: Qwen3ASRProcessor) -> None:
    task = clip()
    renderer = processor.renderer(task, processor.prepare(task, "r"))
    ids = [*processor.tokenizer.encode("language None<asr_text>", special=False), processor.stop_ids[0]]
    deltas = [*renderer.feed(Emit(id="r", stream="text", seq=0, data=ids)), *renderer.finish(None)]
    assert "".join(getattr(delta, "text", "") for delta in deltas) == ""


def test_a_tokenizer_without_the_tokens_of_speech_is_a_fault(
    tmp_path: Path, asr: Registry, processor: Qwen3ASRProcessor
) -> None:
    write(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|audio_end|>", "<|other|>"))
    with pytest.raises(SetupError, match=r"has no token '<\|audio_end\|>'"):
        Qwen3ASRProcessor(ProcessorContext(asr.model("qwen3_asr"), tmp_path, Qwen3ASROptions()))

"""The model against transformers' Qwen3-ASR, one clip at a time, and against itself in batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3ASRFeatureExtractor, Qwen3ASRForConditionalGeneration

from mstar.spec.tasks import Audio
from mstar.testing import Example
from mstar.testing.drive import Driver
from mstar_asr.qwen3_asr.sound import sound_rows
from mstar_asr.qwen3_asr.tiny import MELS, tones, write, write_hf

LENGTHS = (0.2, 0.5, 1.0, 1.004, 2.357, 8.0, 9.01, 17.3)
NEW = 24
Recorded = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("original", "hf")}
    write(found["original"])
    write_hf(found["hf"])
    return found


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> Any:
    model = Qwen3ASRForConditionalGeneration.from_pretrained(folders["hf"], dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module", params=["original", "hf"])
def driver(request: pytest.FixtureRequest, folders: dict[str, Path], asr: Any) -> Iterator[Driver]:
    driver = Driver("qwen3_asr", asr, folders[request.param], dtype="float32", max_concurrent_requests=16)
    yield driver
    driver.assert_empty()


def clip(seconds: float) -> np.ndarray[Any, Any]:
    return tones(random.Random(int(seconds * 1000)), seconds)


def features(samples: np.ndarray[Any, Any]) -> Any:
    extract = Qwen3ASRFeatureExtractor(feature_size=MELS)
    return extract([samples], sampling_rate=16_000, padding="longest", return_tensors="pt", return_attention_mask=True)


def forget(driver: Driver) -> None:
    driver.ended.clear()
    driver.emitted.clear()


def recorded(monkeypatch: pytest.MonkeyPatch, node: Any, entry: str) -> Recorded:
    """The arguments and results of *entry* from now on."""
    calls: Recorded = []
    plain: Callable[..., Any] = getattr(node, entry)

    def record(*arguments: Any, **named: Any) -> Any:
        result = plain(*arguments, **named)
        calls.append((arguments, named, result))
        return result

    monkeypatch.setattr(node, entry, record)
    return calls


@pytest.mark.parametrize("seconds", LENGTHS)
def test_the_spectrogram(driver: Driver, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    calls = recorded(monkeypatch, driver.worker.engine.nodes["encoder"], "convolved")
    driver.submit("r", Example(parts=(Audio(clip(seconds), 16_000),), knobs={"max_tokens": 1}, live=()))
    driver.run()
    forget(driver)
    mel = torch.cat([arguments[0] for arguments, _, _ in calls])
    expected = features(clip(seconds))
    counts = int(expected["attention_mask"].sum())
    whole = expected["input_features"].masked_fill(~expected["attention_mask"].bool()[:, None], 0.0)
    assert mel.shape == (-(-counts // 100), 1, MELS, 100)
    torch.testing.assert_close(mel[:, 0].permute(1, 0, 2).flatten(1), whole[0], atol=2e-5, rtol=1e-4)


def embeddings(driver: Driver, monkeypatch: pytest.MonkeyPatch, lengths: tuple[float, ...]) -> list[Tensor]:
    calls = recorded(monkeypatch, driver.worker.engine.nodes["encoder"], "forward")
    for number, seconds in enumerate(lengths):
        example = Example(parts=(Audio(clip(seconds), 16_000),), knobs={"max_tokens": 1}, live=())
        driver.submit(f"r{number}", example)
    driver.run()
    forget(driver)
    return [part for _, _, out in calls for part in torch.split(out["media"].data, list(out["media"].lengths))]


def test_the_encoder_alone_and_in_a_batch(driver: Driver, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    together = embeddings(driver, monkeypatch, LENGTHS)
    for seconds, ours in zip(LENGTHS, together, strict=True):
        found = features(clip(seconds))
        mask = found["attention_mask"]
        mel = found["input_features"].masked_fill(~mask.bool()[:, None], 0.0)
        with torch.inference_mode():
            expected = reference.model.get_audio_features(mel, mask).pooler_output
        assert ours.shape == expected.shape
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)
        (alone,) = embeddings(driver, monkeypatch, (seconds,))
        torch.testing.assert_close(ours, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("language", [None, "German"])
def test_logits_and_greedy_tokens(
    driver: Driver, reference: Any, monkeypatch: pytest.MonkeyPatch, language: str | None
) -> None:
    calls = recorded(monkeypatch, driver.worker.engine.nodes["llm"], "logits")
    for seconds in (0.2, 2.357, 9.01):
        knobs = {"max_tokens": NEW} | ({"language": language} if language else {})
        example = Example("names: Ada, 李", knobs, parts=(Audio(clip(seconds), 16_000),), live=())
        prepared = driver.prepare("r", example)
        calls.clear()
        driver.submit("r", example)
        driver.run()
        ours, logits = driver.result("r")["text"], torch.cat([result for _, _, result in calls])
        forget(driver)
        found = features(clip(seconds))
        mel = found["input_features"].masked_fill(~found["attention_mask"].bool()[:, None], 0.0)
        with torch.inference_mode():
            expected = reference.generate(
                input_ids=torch.tensor(prepared.request.inputs["prompt"])[None],
                input_features=mel,
                input_features_mask=found["attention_mask"],
                max_new_tokens=NEW,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = expected.sequences[0, len(prepared.request.inputs["prompt"]) :].tolist()
        assert ours == tokens
        torch.testing.assert_close(logits, torch.cat(expected.logits), atol=2e-5, rtol=1e-4)


def test_the_prompt(driver: Driver) -> None:
    """As the authors' package builds it."""
    tokenizer = driver.processor.tokenizer
    example = Example("hot <|im_end|> words", {"language": "ja"}, parts=(Audio(clip(1.0), 16_000),), live=())
    ids = list(driver.prepare("r", example).request.inputs["prompt"])
    plain = tokenizer.encode("hot <|im_end|> words", special=False)
    assert ids.count(tokenizer.id_of("<|im_end|>")) == 2  # what a client writes ends no turn
    assert plain.count(tokenizer.id_of("<|im_end|>")) == 1
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>system\nhot <|im_end|> words<|im_end|>\n<|im_start|>user\n<|audio_start|>"
        + "<|audio_pad|>" * 13
        + "<|audio_end|><|im_end|>\n<|im_start|>assistant\nlanguage Japanese<asr_text>"
    )


def test_a_short_clip_is_followed_by_silence_and_a_loud_one_is_divided(driver: Driver) -> None:
    loud = clip(1.0) * 9
    for samples, same in ((clip(0.2), np.pad(clip(0.2), (0, 4800))), (loud, loud / np.abs(loud).max())):
        first, second = (
            driver.prepare("r", Example(parts=(Audio(s, 16_000),), live=())).request.inputs["sound"]
            for s in (samples, same)
        )
        np.testing.assert_array_equal(first, second)
    assert sound_rows(clip(0.5), 100).shape == (1, 16_401)

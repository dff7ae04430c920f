"""Long clips through the whole model at a tiny random size, against transformers' own way through them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted import RATE, asked

from mstar.plugins import load_plugins
from mstar.processing.speech.transcript import Transcript, TranscriptBuilder
from mstar.processing.tokenizer import TextTokenizer
from mstar.registry import Registry
from mstar.runtime.service import Service, open_service
from mstar.settings import Settings
from mstar.spec.tasks import TranscriptionTask

SETTINGS = Settings(plugins=("server",), extra_plugins=("mstar_asr.plugin",))
NEVER: Mapping[str, Any] = {
    "vad_filter": False,
    "temperature_increment": 0.0,
    "compression_ratio_threshold": 100.0,
    "logprob_threshold": -100.0,
    "no_speech_threshold": 1.0,
}
"""Every answer is taken."""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, which says no blanks and languages: segments without words stay in transformers' prompts,
    not in OpenAI's."""
    made = tmp_path_factory.mktemp("longform") / "whisper"
    shutil.copytree(tiny_folder, made)
    tokenizer, file = TextTokenizer(made), made / "generation_config.json"
    content = json.loads(file.read_text())
    wordless = [token for token in range(content["eos_token_id"]) if not tokenizer.decode([token]).strip()]
    content["suppress_tokens"] = sorted({*content["suppress_tokens"], *wordless, *content["lang_to_id"].values()})
    file.write_text(json.dumps(content))
    return made


@pytest.fixture(scope="module")
def service(folder: Path, loop: asyncio.AbstractEventLoop) -> Iterator[Service]:
    registry = Registry(load_plugins(SETTINGS))
    overrides = {"weights": str(folder), "device": "cpu", "executor": "inline", "engine": {"threads": 1}}
    made = open_service("whisper_base", SETTINGS, overrides, registry)
    loop.run_until_complete(made.start())
    yield made
    loop.run_until_complete(made.stop())


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    return WhisperFeatureExtractor.from_pretrained(folder), model


def clip(seconds: float, seed: int) -> np.ndarray:
    """Tones that come and go, louder and softer, and noise."""
    draw = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    tones = sum(
        np.sin(2 * np.pi * pitch * time) * (np.sin(2 * np.pi * rate * time) > 0)
        for pitch, rate in zip(draw.uniform(90, 3000, 5), draw.uniform(0.05, 4, 5), strict=True)
    )
    loud = 0.02 + 0.1 * (1 + np.sin(2 * np.pi * 0.013 * time + seed))
    return (loud * tones + 0.02 * draw.standard_normal(len(time))).astype(np.float32)


async def transcribed(service: Service, task: TranscriptionTask) -> Transcript:
    assert task.audio is not None
    builder = TranscriptBuilder(len(task.audio.samples) / RATE)
    for window in service.processor.windows(task):
        following: Any = window
        while following is not None:
            builder.open(following.offset, following.offset + len(following.audio.samples) / RATE)
            async with await service.generate(following) as answer:
                async for delta in answer:
                    builder.feed(delta)
            builder.close(answer.finish_reason)
            following = answer.follow
    return builder.result()


def expected(reference: Any, samples: np.ndarray, **options: Any) -> list[tuple[float, float, list[int]]]:
    """Segments of transformers' ``generate``: start, end, tokens."""
    extractor, model = reference
    whole = {"truncation": False, "padding": "longest", "return_attention_mask": True, "return_tensors": "pt"}
    found = extractor(samples, sampling_rate=RATE, **whole)
    options = {"language": "en", "temperature": (0.0,), **options}
    with torch.inference_mode():
        said = model.generate(
            found.input_features,
            attention_mask=found.attention_mask,
            return_timestamps=True,
            return_segments=True,
            return_dict_in_generate=True,
            **options,
        )
    return [(float(s["start"]), float(s["end"]), s["tokens"].tolist()) for s in said["segments"][0]]


def compare(model: Any, got: Transcript, wanted: list[tuple[float, float, list[int]]]) -> None:
    begin, eot = model.tokens.timestamp_begin, model.tokens.eot
    kept = []
    for start, end, tokens in wanted:
        if len(tokens) > 1 and tokens[-1] >= begin and tokens[-2] >= begin:
            tokens = tokens[:-1]  # it keeps both timestamps of a pair at the end
        text = model.tokenizer.decode([token for token in tokens if token < eot])
        if text.strip() and start != end:
            kept.append((start, end, tokens))
    assert [list(s.said.tokens) for s in got.segments] == [tokens for _, _, tokens in kept]
    limit = got.duration
    for segment, (start, end, _) in zip(got.segments, kept, strict=True):
        assert segment.said.start == pytest.approx(min(start, limit), abs=0.011)
        assert segment.said.end == pytest.approx(min(end, limit), abs=0.011)


@pytest.mark.parametrize(("seed", "context"), [(0, True), (1, True), (2, False)])
def test_segments_are_those_of_transformers(
    service: Service, reference: Any, loop: asyncio.AbstractEventLoop, seed: int, context: bool
) -> None:
    samples = clip(65.0 + seed, seed)
    task = asked(samples, {**NEVER, "condition_on_previous_text": context})
    got = loop.run_until_complete(transcribed(service, task))
    compare(service.processor, got, expected(reference, samples, condition_on_prev_tokens=context))
    assert len({segment.seek for segment in got.segments}) >= 3


def test_windows_of_silence_are_those_of_transformers(
    service: Service, reference: Any, loop: asyncio.AbstractEventLoop
) -> None:
    """The worse half of the windows counts as silence."""
    samples = clip(95.0, 6)
    task = asked(samples, {**NEVER, "condition_on_previous_text": False})
    windows = {s.seek: s.said for s in loop.run_until_complete(transcribed(service, task)).segments}
    means = sorted(said.avg_logprob for said in windows.values())
    border = (means[len(means) // 2 - 1] + means[len(means) // 2]) / 2
    unlikely = min(said.no_speech_prob for said in windows.values()) / 2
    judging = {"logprob_threshold": border, "no_speech_threshold": unlikely}
    got = loop.run_until_complete(transcribed(service, asked(samples, {**task.knobs.model_dump(), **judging})))
    # An answer that is cut short has no end token. OpenAI's mean counts one all the same, transformers' does not.
    said = service.processor.positions - len(("sot", "language", "task"))
    theirs = {**judging, "logprob_threshold": border * (said + 1) / said}
    wanted = expected(reference, samples, condition_on_prev_tokens=False, **theirs)
    compare(service.processor, got, wanted)
    assert 0 < len({segment.seek for segment in got.segments}) < len(windows)

"""Whisper against transformers, at a tiny random size, through the family's own loader and a worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hearing import ROUNDING, Ears, Reference, clip, window
from msgspec import structs
from torch.nn import functional as F

from mstar_asr.whisper.alignment import heads_by_layer
from mstar_asr.whisper.features import LogMel
from mstar_asr.whisper.request import CONTEXT, DETECT, FRAMES, HOP, WINDOW
from mstar_asr.whisper.spectrum import loudest, mel_filters

COUNT = 14


@pytest.fixture(scope="module")
def ears(tiny_folder: Path) -> Ears:
    return Ears(tiny_folder)


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Reference:
    return Reference(tiny_folder)


# --- features


@pytest.mark.parametrize("mels", [16, 80, 128])
@pytest.mark.parametrize("seconds", [0.1, 5.003, 30.0])
def test_features(mels: int, seconds: float) -> None:
    from transformers import WhisperFeatureExtractor

    samples = clip(seconds)
    wanted = WhisperFeatureExtractor(feature_size=mels)(samples, sampling_rate=16_000, return_tensors="pt")
    own = torch.from_numpy(window(samples))[None]
    got = LogMel.ready(mels)(own, torch.tensor([[FRAMES]]), torch.tensor([[torch.nan]]))
    torch.testing.assert_close(got, wanted.input_features, rtol=0, atol=1e-5)


def test_windows_of_a_long_clip_are_slices_of_its_features() -> None:
    from transformers import WhisperFeatureExtractor

    samples = clip(71.23) * np.linspace(1, 0.01, int(71.23 * 16_000), dtype=np.float32)
    padded = np.concatenate((samples, np.zeros(WINDOW, np.float32)))
    extractor, log_mel = WhisperFeatureExtractor(feature_size=80), LogMel.ready(80)
    (whole,) = extractor(
        padded, sampling_rate=16_000, truncation=False, padding=False, return_tensors="pt"
    ).input_features
    around = torch.from_numpy(np.pad(padded, CONTEXT, mode="reflect"))
    top = torch.tensor([[loudest(samples, 80)]])
    content = len(samples) // HOP
    for first in (0, 1234, 3000, 5500):
        cut = around[first * HOP : first * HOP + WINDOW + 2 * CONTEXT]
        frames = min(FRAMES, content - first)
        got = log_mel(cut[None], torch.tensor([[frames]]), top)[0]
        wanted = F.pad(whole[:, first : first + frames], (0, FRAMES - frames))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mels", [16, 80, 128])
def test_mel_filters(mels: int) -> None:
    from transformers.audio_utils import mel_filter_bank

    wanted = mel_filter_bank(201, mels, 0.0, 8000.0, 16_000, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(mel_filters(mels).T, wanted, atol=1e-8)


def test_windows_from_a_clip_are_those_of_the_contract() -> None:
    """What the API side cuts out is what these tests do."""
    from mstar_asr.whisper.clip import Clip

    samples = clip(47.3)
    cut = Clip(samples)
    for seek in (0, 1, 2999, 3000, 4700):
        np.testing.assert_array_equal(cut.window(seek), window(samples, seek * HOP))
    short = clip(0.01)
    np.testing.assert_array_equal(Clip(short).window(0), window(short))


# --- encoder and decoder


def test_encoder(ears: Ears, reference: Reference) -> None:
    clips = [clip(seconds, seed) for seed, seconds in enumerate((1.0, 30.0, 12.5))]
    encoder = ears.worker.engine.nodes["encoder"]
    features = torch.cat([reference.features(samples) for samples in clips])
    with torch.inference_mode():
        got = encoder.encode(features)  # type: ignore[operator]
    for row, samples in enumerate(clips):
        torch.testing.assert_close(got[row], reference.memory(samples)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("language", [None, "de"])
@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("previous", [(), (11, 12, 40, 41)])
@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_greedy_tokens(
    ears: Ears, reference: Reference, language: str | None, timestamps: bool, previous: tuple[int, ...], task: str
) -> None:
    samples = clip(7.5, seed=len(previous))
    how = {"language": language, "timestamps": timestamps, "previous": previous, "task": task}
    request = ears.request("r", samples, how=how, max_tokens=COUNT, logprobs=0)
    prompt = request.inputs["prompt"].tolist()
    assert (DETECT in prompt) == (language is None)
    tokens, logprobs, silent = reference.answer(samples, prompt, COUNT)
    (got,) = ears.hear(request)
    assert got["text"] == tokens
    assert tokens[0] >= ears.tokens.timestamp_begin or not timestamps
    np.testing.assert_allclose(got["logprobs"], logprobs, atol=2e-4)
    np.testing.assert_allclose(got["no_speech"], [silent], rtol=1e-3)
    if language is None:
        token, probability = reference.language(samples)
        assert got["language"][0, 0] == token
        assert got["language"][0, 1] == pytest.approx(probability, rel=1e-3)
    else:
        assert "language" not in got


def test_english_only(tiny_english_folder: Path) -> None:
    ears, reference = Ears(tiny_english_folder, "whisper_tiny_en"), Reference(tiny_english_folder)
    samples = clip(3.0)
    for timestamps in (False, True):
        request = ears.request("r", samples, how={"timestamps": timestamps}, max_tokens=COUNT)
        assert request.inputs["prompt"].tolist()[0] == ears.tokens.sot
        assert len(request.inputs["prompt"]) == 2 - timestamps
        assert ears.hear(request)[0]["text"] == reference.answer(samples, request.inputs["prompt"].tolist(), COUNT)[0]


def test_batched_equals_alone(ears: Ears) -> None:
    def requests(prefix: str) -> list:
        return [
            ears.request(
                f"{prefix}{number}",
                clip(2.0 + number, seed=number),
                how={
                    "timestamps": bool(number % 2),
                    "language": "en" if number % 3 else None,
                    "previous": [9] * number,
                },
                max_tokens=4 + number,
                words=number == 3,
                temperature=0.7 if number == 4 else 0.0,
                seed=5,
                logprobs=0,
            )
            for number in range(6)
        ]

    alone = [ears.hear(request)[0] for request in requests("a")]
    together = ears.hear(*requests("t"))
    for one, other in zip(alone, together, strict=True):
        assert one.keys() == other.keys()
        assert one["text"] == other["text"]
        for name in one.keys() - {"text"}:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-4)


# --- words


@pytest.mark.parametrize("timestamps", [False, True])
def test_alignment(ears: Ears, reference: Reference, timestamps: bool) -> None:
    from transformers.models.whisper.generation_whisper import _median_filter

    samples, frames = clip(9.0, seed=3), 900
    how = {"language": "en", "timestamps": timestamps}
    request = ears.request("r", samples, how=how, max_tokens=COUNT, words=True, frames=frames)
    request.inputs["frames"][:] = FRAMES  # the reference hears the padding
    (got,) = ears.hear(request)
    tokens = ears.tokens
    text = [token for token in got["text"] if token < tokens.eot]
    if timestamps:  # some may not count
        text = text[: len(got["aligned"]) - 1]
    assert got["aligned"].tolist() == [*text, tokens.eot]
    assert text
    ids = [tokens.sot, tokens.languages["en"], tokens.transcribe, tokens.no_timestamps, *text, tokens.eot]
    out = reference.logits(reference.memory(samples), ids, output_attentions=True)
    heads = heads_by_layer(tokens, 2, 4)
    weights = torch.cat([out.cross_attentions[layer][0, own] for layer, own in heads.items()])
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    matrix = _median_filter((weights - mean) / std, 7).mean(0)[3:-1]
    np.testing.assert_allclose(got["alignment"], matrix.numpy(), rtol=1e-4, atol=1e-4)
    probabilities = out.logits[0, 3 : 3 + len(text), : tokens.eot].softmax(-1)
    wanted = probabilities[torch.arange(len(text)), text]
    np.testing.assert_allclose(got["aligned_probability"], wanted.numpy(), rtol=2e-3)


def test_an_answer_of_every_position_is_aligned(ears: Ears) -> None:
    request = ears.request("r", clip(3.0), how={"language": "en"}, words=True)
    most = ears.positions - len(request.inputs["prompt"]) - 1
    (got,) = ears.hear(request)
    assert len(got["text"]) == most
    text = [token for token in got["text"] if token < ears.tokens.eot]
    assert got["aligned"].tolist() == [*text, ears.tokens.eot]
    assert got["alignment"].shape == (len(text) + 1, 1500)
    assert np.isfinite(got["alignment"]).all()


def test_bfloat16_differs_by_no_more_than_its_rounding(tiny_folder: Path, reference: Reference) -> None:
    ears = Ears(tiny_folder, dtype="bfloat16")
    for number in range(4):
        samples = clip(1.0 + number, seed=number)
        request = ears.request(f"{number}", samples, how={"timestamps": bool(number % 2)}, max_tokens=COUNT)
        (got,) = ears.hear(request)
        prompt, answer = request.inputs["prompt"].tolist(), got["text"]
        prompt[prompt.index(DETECT)] = int(got["language"].flat[0])
        assert reference.doubts(samples, prompt, answer, torch.bfloat16).max() < ROUNDING
        exact = reference.answer(samples, prompt, COUNT)[0]
        assert reference.doubts(samples, prompt, exact, torch.bfloat16).max() == 0
        for place in (0, len(answer) // 2):  # anything else is found
            wrong = [*answer[:place], (answer[place] + 5) % ears.tokens.eot, *answer[place + 1 :]]
            assert reference.doubts(samples, prompt, wrong, torch.bfloat16).max() > ROUNDING


def test_steps_that_are_launched_ahead_say_the_same(tiny_folder: Path) -> None:
    """Answers of any length side by side, of which some stop by themselves: what was launched for them is retracted."""
    most = (1, 2, COUNT, 40, 3, 40)

    def said(ears: Ears, stop: int) -> list[list[int]]:
        requests = [
            ears.request(
                f"{number}", clip(1.0 + number / 2, seed=number), how={"timestamps": bool(number % 2)}, max_tokens=n
            )
            for number, n in enumerate(most)
        ]
        for request in requests:
            params = request.sampling["sampler"]
            request.sampling["sampler"] = structs.replace(params, stop_token_ids=(*params.stop_token_ids, stop))
        return [one["text"] for one in ears.hear(*requests)]

    plain = Ears(tiny_folder, engine={"threads": 1, "lookahead": False})
    stop = said(plain, -1)[5][20]
    wanted = said(plain, stop)
    stopped = sum(text[-1] == stop and len(text) < n for text, n in zip(wanted, most, strict=True))
    assert stopped

    ahead, dropped = Ears(tiny_folder, engine={"threads": 1, "lookahead": True}), []
    drop = ahead.worker.ahead.drop
    ahead.worker.ahead.drop = lambda call: (dropped.append(call), drop(call))[1]  # type: ignore[method-assign]
    assert said(ahead, stop) == wanted
    assert len(dropped) == stopped

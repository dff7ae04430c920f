"""Drives Whisper's model without its API side: windows in, streams out; and what transformers makes of the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.cluster.base import WorkerConfig
from mstar.nn.config import read_config
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.runtime.deployment_files import packaged_deployment
from mstar.settings import Settings
from mstar.spec.deployment import merge_deployment
from mstar.spec.request import Done, Emit, EngineRequest
from mstar.testing.drive import collect
from mstar.worker.core import Worker
from mstar_asr.whisper.request import CONTEXT, DETECT, RATE, WINDOW, window_prompt, window_request
from mstar_asr.whisper.tokens import WhisperTokens

SETTINGS = Settings(plugins=("server",), extra_plugins=("mstar_asr.plugin",))
ROUNDING = 8.0
"""Of :meth:`Reference.doubts`. The difference of two logits has √2 of one's error: this is beyond five deviations."""
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "engine": {"threads": 1}}


def clip(seconds: float, seed: int = 0) -> np.ndarray:
    """Tones that come and go, and noise: float32 at 16 kHz."""
    draw = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    tones = sum(
        np.sin(2 * np.pi * pitch * time) * (np.sin(2 * np.pi * rate * time) > 0)
        for pitch, rate in zip(draw.uniform(90, 3000, 4), draw.uniform(0.5, 4, 4), strict=True)
    )
    return (0.1 * tones + 0.02 * draw.standard_normal(len(time))).astype(np.float32)


def window(samples: np.ndarray, start: int = 0) -> np.ndarray:
    """The window of *samples* from *start* on, as the contract wants it; padded with silence as the feature extractor
    of transformers does."""
    padded = np.concatenate((samples, np.zeros(max(0, start + WINDOW - len(samples)), np.float32)))
    around = np.pad(padded, CONTEXT, mode="reflect")
    return around[start : start + WINDOW + 2 * CONTEXT]


class Ears:
    """A worker of one Whisper, and the streams of its requests."""

    def __init__(self, folder: Path, key: str = "whisper_base", **overrides: Any):
        self.key = key
        registry = Registry(load_plugins(SETTINGS))
        deployment = merge_deployment(key, packaged_deployment(registry.model(key)), {**CPU, **overrides})
        config = WorkerConfig(key=key, weights=str(folder), deployment=deployment)
        self.worker = Worker(config, registry)
        self.tokens = WhisperTokens.read(folder)
        self.positions = int(read_config(folder)["max_target_positions"])

    def request(
        self, name: str, samples: np.ndarray, prompt: Sequence[int] | None = None, how: Any = None, **options: Any
    ) -> EngineRequest:
        """*how*: of :func:`window_prompt`. *options*: of :func:`window_request`."""
        positions = self.positions
        prompt = prompt or window_prompt(self.tokens, positions=positions, **(how or {}))
        return window_request(name, self.tokens, window(samples), prompt, positions=positions, **options)

    def hear(self, *requests: EngineRequest) -> list[dict[str, Any]]:
        """What the streams of *requests* carried; they run together. ``logprobs`` beside them, if asked for."""
        for request in requests:
            self.worker.submit(request)
        emitted: dict[str, list[Emit]] = {request.id: [] for request in requests}
        ended: dict[str, Any] = {}
        while len(ended) < len(requests):
            self.worker.step()
            for event in self.worker.events():
                if isinstance(event, Emit):
                    emitted[event.id].append(event)
                    self.worker.ack(event.id, event.stream, 1)
                else:
                    ended[event.id] = event
        found = []
        for request in requests:
            assert isinstance(ended[request.id], Done), ended[request.id]
            streams = collect(emitted[request.id])
            streams["logprobs"] = [one.logprob for event in emitted[request.id] for one in event.logprobs or ()]
            found.append(streams)
        self.worker.check()
        return found


class Reference:
    """transformers' model and its logits processors, one token at a time, without a cache."""

    def __init__(self, folder: Path):
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

        self._folder, self._rounded = folder, dict[torch.dtype, Any]()
        self.extractor = WhisperFeatureExtractor.from_pretrained(folder)
        self.model = WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
        self.tokens = WhisperTokens.read(folder)

    def features(self, samples: np.ndarray) -> Tensor:
        found: Tensor = self.extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        return found

    @torch.inference_mode()
    def memory(self, samples: np.ndarray) -> Tensor:
        found: Tensor = self.model.model.encoder(self.features(samples)).last_hidden_state
        return found

    @torch.inference_mode()
    def logits(self, memory: Tensor, ids: Sequence[int], **options: Any) -> Any:
        return self.model(encoder_outputs=(memory,), decoder_input_ids=torch.tensor([list(ids)]), **options)

    def language(self, samples: np.ndarray) -> tuple[int, float]:
        """The likeliest language and its probability among languages: what the decoder says after sot alone."""
        known = list(self.tokens.languages.values())
        logits = self.logits(self.memory(samples), [self.tokens.sot]).logits[0, -1, known].softmax(-1)
        return known[int(logits.argmax())], float(logits.max())

    def answer(self, samples: np.ndarray, prompt: Sequence[int], count: int) -> tuple[list[int], list[float], float]:
        """Up to *count* greedy tokens, eot included; their log-probabilities; the probability of silence."""
        from transformers.generation.logits_process import (
            SuppressTokensAtBeginLogitsProcessor,
            SuppressTokensLogitsProcessor,
            WhisperTimeStampLogitsProcessor,
        )

        generation, tokens = self.model.generation_config, self.tokens
        memory, ids, scores_of = self.memory(samples), list(prompt), []
        if DETECT in ids:
            ids[ids.index(DETECT)] = self.language(samples)[0]
        begin = len(ids)
        rules: list[Any] = [
            SuppressTokensLogitsProcessor(generation.suppress_tokens),
            SuppressTokensAtBeginLogitsProcessor(generation.begin_suppress_tokens, begin),
        ]
        if prompt[-1] != tokens.no_timestamps:
            rules.append(WhisperTimeStampLogitsProcessor(generation, begin_index=begin))
        sot = max(place for place, token in enumerate(ids) if token == tokens.sot)
        silent = float(self.logits(memory, ids).logits[0, sot].softmax(-1)[tokens.no_speech])
        while len(ids) < begin + count and (len(ids) == begin or ids[-1] != tokens.eot):
            scores = self.logits(memory, ids).logits[:, -1].float()
            for rule in rules:
                scores = rule(torch.tensor([ids]), scores)
            scores_of.append(float(scores.log_softmax(-1).max()))
            ids.append(int(scores.argmax()))
        return ids[begin:], scores_of, silent

    @torch.inference_mode()
    def doubts(self, samples: np.ndarray, prompt: Sequence[int], answer: Sequence[int], dtype: torch.dtype) -> Tensor:
        """How much worse than float32's choice each token of a greedy *answer* is by float32's logits, in multiples of
        the root mean square error that transformers' own logits have in *dtype*: float32 ``[len(answer)]``, 0 where it
        is that choice. Beyond :data:`ROUNDING` it is no matter of rounding.

        Whether a timestamp comes is a choice as well, and costs as much as its two sides differ."""
        ids = list(prompt)
        if DETECT in ids:
            ids[ids.index(DETECT)] = self.language(samples)[0]
        read, begin = [*ids, *answer[:-1]], len(ids)
        exact = self.logits(self.memory(samples), read).logits[0, begin - 1 :]
        rounded = self._in(dtype)(self.features(samples).to(dtype), decoder_input_ids=torch.tensor([read])).logits
        error = (rounded[0, begin - 1 :].float() - exact).square().mean().sqrt()
        found = []
        for place, token in enumerate(answer):
            scores = self._allowed(torch.tensor([[*ids, *answer[:place]]]), exact[place : place + 1], begin, prompt)
            times, others = scores[self.tokens.timestamp_begin :], scores[: self.tokens.timestamp_begin]
            worse = scores.max() - scores[token]
            if prompt[-1] != self.tokens.no_timestamps:
                ahead = times.logsumexp(0) - others.max()  # what makes it be a timestamp
                timed = torch.maximum(times.max() - scores[token], (-ahead).clamp(min=0))
                worse = torch.maximum(worse, ahead.clamp(min=0))
                worse = torch.minimum(worse, timed) if token >= self.tokens.timestamp_begin else worse
            found.append(worse / error)
        return torch.stack(found)

    def _in(self, dtype: torch.dtype) -> Any:
        if dtype not in self._rounded:
            from transformers import WhisperForConditionalGeneration

            load = WhisperForConditionalGeneration.from_pretrained
            self._rounded[dtype] = load(self._folder, attn_implementation="eager", dtype=dtype).eval()
        return self._rounded[dtype]

    def _allowed(self, ids: Tensor, scores: Tensor, begin: int, prompt: Sequence[int]) -> Tensor:
        """*scores* ``[1, vocab]`` where the rules forbid nothing, whatever is likely; minus infinity elsewhere."""
        from transformers.generation.logits_process import (
            SuppressTokensAtBeginLogitsProcessor,
            SuppressTokensLogitsProcessor,
            WhisperTimeStampLogitsProcessor,
        )

        generation = self.model.generation_config
        scores = SuppressTokensLogitsProcessor(generation.suppress_tokens)(ids, scores.clone())
        scores = SuppressTokensAtBeginLogitsProcessor(generation.begin_suppress_tokens, begin)(ids, scores)
        if prompt[-1] != self.tokens.no_timestamps:
            scores = WhisperTimeStampLogitsProcessor(generation, begin, _detect_timestamp_from_logprob=False)(
                ids, scores
            )
        return scores[0]

"""What a window of sound becomes for the engine, and what the engine answers: the contract between the API side
(``processor``, ``renderer``, ``longform``, ``words``) and the model (``model``). No torch.

*One request is one window of 30 s.* Its inputs:

``samples``
    float32 ``[WINDOW + 2 * CONTEXT]`` (480,400): 16 kHz mono in -1…1, with 200 samples beside the window to either
    side, so that the spectrogram's frames equal those of the whole clip's. What lies beside a window in the middle of a
    clip is the clip; before its start it is the clip's reflection (sample ``-i`` is sample ``i``); after its end zeros.
``frames``
    int64 ``[1]``: spectrogram frames of this window that are the clip's, at most 3000. Those behind them are 0, as the
    reference pads the last window of a clip (``pad_or_trim`` of the spectrogram); 3000 leaves all as they are, which is
    what a clip gives that was padded with silence before the spectrogram (``WhisperFeatureExtractor``).
``loudest``
    float32 ``[1]``: the greatest log10-mel value of the whole clip, 8 below which the spectrogram has its floor
    (:func:`mstar_asr.whisper.spectrum.loudest`). NaN: that of this window.
``prompt``
    int64 ``[T]``: ``[startofprev, *previous]`` or nothing, then sot and, in multilingual models, language and task,
    then notimestamps if no times are wanted. :data:`DETECT` in the language's place: it is found out, as the reference
    does, by the decoder on sot alone, whatever the prompt is.

``rules``
    int64 ``[3]``: whether the answer has timestamps (:data:`TIMESTAMPS`); the greatest index of the first one, -1: any
    (:data:`MAX_INITIAL`); tokens of the prompt behind sot (:data:`AFTER_SOT`).

The parameter ``words`` says whether words are to be aligned. The sampling parameters are under ``sampler``:
temperature, seed, ``max_tokens``, ``logprobs``, and eot as the stop id.

*Streams to the client.*

``text``
    tokens, eot included. With ``logprobs``: each token's log-probability among those that the rules (suppressed tokens,
    timestamps) left, at temperature 1 whatever the request's temperature is; the reference's ``GreedyDecoder`` and
    transformers' ``_retrieve_avg_logprobs`` agree on that. The reference's ``avg_logprob`` is their sum over
    the answer, eot included if it came, divided by the number of tokens without eot plus 1.
``language``
    float32 ``[2]``, once, if it was to be detected: the token's id and its probability among languages.
``no_speech``
    float32 ``[]``, once: probability of the no-speech token after sot, before anything is suppressed.
``aligned``, ``aligned_probability``, ``alignment``
    With ``words``, once, if the answer has text that counts. int64 ``[n + 1]``: the text tokens in order, then eot;
    float32 ``[n]``: the probability of each text token (the reference's ``text_token_probs``); float32
    ``[n + 1, 1500]``: how much each attends to each 20 ms of the window. That is what the reference's
    ``find_alignment`` hands to its dynamic time warping: the weights of the alignment heads, normalised,
    median-filtered (7) and averaged; columns behind ``frames // 2`` are 0 and to be cut off. Text counts as the
    reference's ``transcribe`` has it: all of it if the answer has no two timestamps in a row or ends with a single one,
    else what is before the last such pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mstar.spec.errors import RequestError, nearest
from mstar.spec.request import EngineRequest, SamplingParams
from mstar_asr.whisper.tokens import TIME_STEP, WhisperTokens

__all__ = [
    "AFTER_SOT",
    "CONTEXT",
    "DETECT",
    "FRAMES",
    "HOP",
    "MAX_INITIAL",
    "RATE",
    "TIMESTAMPS",
    "WINDOW",
    "window_prompt",
    "window_request",
]

RATE = 16_000
HOP = 160
"""Samples from one frame of the spectrogram to the next."""
WINDOW = 30 * RATE
"""Samples of a window."""
CONTEXT = 200
"""Samples that a window brings from either side: half a spectrogram frame's width."""
FRAMES = WINDOW // HOP
"""Spectrogram frames of a window."""
DETECT = -1
TIMESTAMPS, MAX_INITIAL, AFTER_SOT = range(3)


def window_prompt(
    tokens: WhisperTokens,
    *,
    language: str | None = None,
    task: str = "transcribe",
    timestamps: bool = False,
    previous: Sequence[int] = (),
    positions: int = 448,
) -> list[int]:
    """The decoder's first tokens.

    :param language: one of ``tokens.languages``, or ``None``: to be detected. :param task: ``transcribe`` or
        ``translate``.
    :param previous: what was said before; of it the last ``positions // 2 - 1`` tokens count.
    :param positions: ``max_target_positions`` of the checkpoint.
    :raises RequestError: an English-only model is asked for another language or for a translation.
    """
    kept = list(previous)[-(positions // 2 - 1) :] if positions >= 4 else []
    prompt = [tokens.sot_prev, *kept] if kept else []
    prompt.append(tokens.sot)
    if tokens.multilingual:
        assert tokens.translate is not None
        assert tokens.transcribe is not None
        if language is not None and language not in tokens.languages:
            message = f"'language': the model does not know {language!r}{nearest(language, tokens.languages)}"
            raise RequestError(message, param="language", code="unsupported_language")
        prompt.append(DETECT if language is None else tokens.languages[language])
        prompt.append(tokens.translate if task == "translate" else tokens.transcribe)
    elif task == "translate":
        raise RequestError("this model knows English only and cannot translate", param="task")
    elif language not in (None, "en"):
        message = f"'language': this model knows 'en' only, got {language!r}"
        raise RequestError(message, param="language", code="unsupported_language")
    return prompt if timestamps else [*prompt, tokens.no_timestamps]


def window_request(
    request_id: str,
    tokens: WhisperTokens,
    samples: Any,
    prompt: Sequence[int],
    *,
    frames: int = FRAMES,
    loudest: float | None = None,
    max_initial_timestamp: float | None = 1.0,
    words: bool = False,
    temperature: float = 0.0,
    seed: int | None = None,
    max_tokens: int | None = None,
    logprobs: int | None = None,
    positions: int = 448,
    **others: Any,
) -> EngineRequest:
    """A request as the module's docstring says.

    :param prompt: what :func:`window_prompt` gave. :param max_initial_timestamp: in seconds; ``None``: no limit.
    :param max_tokens: default and at most ``positions - len(prompt) - 1``: the text has room beside what is read with
        it to align it.
    :param others: further fields of the :class:`EngineRequest` (tenant, timeout…).
    """
    room = positions - len(prompt) - 1
    limit = room if max_tokens is None else min(max_tokens, room)
    after = len(prompt) - 1 - _last(prompt, tokens.sot)
    first = -1 if max_initial_timestamp is None else round(max_initial_timestamp / TIME_STEP)
    return EngineRequest(
        id=request_id,
        inputs={
            "samples": np.asarray(samples, np.float32),
            "frames": np.array([frames], np.int64),
            "loudest": np.array([np.nan if loudest is None else loudest], np.float32),
            "prompt": np.array(prompt, np.int64),
            "rules": np.array([prompt[-1] != tokens.no_timestamps, first, after], np.int64),
        },
        params={"words": words},
        sampling={
            "sampler": SamplingParams(
                temperature=temperature,
                seed=seed,
                max_tokens=limit,
                stop_token_ids=(tokens.eot,),
                logprobs=logprobs,
            )
        },
        **others,
    )


def _last(ids: Sequence[int], wanted: int) -> int:
    return max(place for place, token in enumerate(ids) if token == wanted)

"""When words were said: what the decoder's heads look at while it reads the finished text.

Source: ``find_alignment`` of OpenAI's whisper 20250625 (``timing.py``). Dynamic time warping, which makes times of it,
is the API side's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mstar_asr.whisper.tokens import WhisperTokens

__all__ = ["attention_weights", "heads_by_layer", "median", "text_that_counts", "time_matrix"]

_MEDIAN = 7


def text_that_counts(answer: Sequence[int], tokens: WhisperTokens) -> list[int]:
    """The text tokens of *answer* that a transcript keeps: all of them if it has no two timestamps in a row or ends
    with a single one, else those before the last such pair, where the next window begins."""
    spoken = [token for token in answer if token != tokens.eot]
    times = [token >= tokens.timestamp_begin for token in spoken]
    pairs = [place for place in range(1, len(spoken)) if times[place - 1] and times[place]]
    kept = spoken if not pairs or times[-2:] == [False, True] else spoken[: pairs[-1]]
    return [token for token in kept if token < tokens.eot]


def heads_by_layer(tokens: WhisperTokens, layers: int, heads: int) -> dict[int, list[int]]:
    """Layer → those of its heads that follow the audio; where the checkpoint does not say, all of the upper half."""
    if not tokens.alignment_heads:
        return {layer: list(range(heads)) for layer in range(layers // 2, layers)}
    found: dict[int, list[int]] = {}
    for layer, head in tokens.alignment_heads:
        found.setdefault(layer, []).append(head)
    return found


def attention_weights(q: Tensor, keys: Tensor, heads: Sequence[int], positions: int, rank: int = 0) -> Tensor:
    """How much each token attends to each of the first *positions*, float32 ``[heads, tokens, positions]``; zeros for
    those of *heads* that another rank has.

    :param q: ``[tokens, own heads, head_dim]``. :param keys: ``[memory, own heads, head_dim]``. :param rank: so many
        times as many heads stand before the own ones.
    """
    first, count = rank * q.shape[1], q.shape[1]
    held = [place for place, head in enumerate(heads) if first <= head < first + count]
    local = [heads[place] - first for place in held]
    own, other = q[:, local].float(), keys[:positions, local].float()
    scores: Tensor = torch.einsum("qhd,khd->hqk", own, other) * q.shape[-1] ** -0.5
    weights = scores.softmax(-1)
    if len(held) == len(heads):
        return weights
    found = weights.new_zeros(len(heads), *weights.shape[1:])
    for place, own_weights in zip(held, weights, strict=True):
        found[place] = own_weights
    return found


def median(x: Tensor, width: int = _MEDIAN) -> Tensor:
    """Median filter along the last dimension, its ends reflected; *x* ``[a, b, n]`` of too few items stays as it is."""
    half = width // 2
    if x.shape[-1] <= half:
        return x
    around: Tensor = F.pad(x, (half, half), mode="reflect").unfold(-1, width, 1)
    middle: Tensor = around.kthvalue(half + 1, -1)[0]
    return middle


def time_matrix(weights: Tensor) -> Tensor:
    """``[heads, tokens, positions]`` to ``[tokens, positions]``: each position's weights standardised over the tokens,
    filtered along time, and averaged over the heads."""
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    return median((weights - mean) / std).mean(0)

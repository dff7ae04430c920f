"""The maths of sampling: batched functions on logits ``[rows, vocab]``, one row a request.

Order (see :class:`mstar.spec.request.SamplingParams`): logit bias, forbidden and allowed ids → penalties → temperature
→ top-k → top-p → min-p → draw. The semantics are those of transformers' logits processors and of vLLM's sampler.

Three choices make it fast and exact:

* Top-k, top-p and min-p each come down to *one threshold per row*: tokens whose logit is below it are dropped, tokens
  that tie with the last one kept are kept. So nothing depends on how a sort orders equal logits, and a row is filtered
  alike alone and among others.
* A token is drawn by inverting the cumulative distribution in the vocabulary's order, with one uniform number a row:
  block sums find the block, a running sum finds the token in it. No sort, no noise per entry of the vocabulary.
* Every parameter is a tensor with one entry a row. On CUDA :mod:`mstar.nn.ops.cuda_sampling` does the same in a few
  kernels, which read the parameters by slot and can be captured in a graph.

Random numbers are counter-based: a pure function of (stream key, number of draws so far) computed on the host in
integers, hence the same on every device and in every batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mstar.spec.request import TokenLogprob

__all__ = [
    "GREEDY_BELOW",
    "Changes",
    "add_bias",
    "allow_only",
    "argmax",
    "as_reports",
    "draw",
    "edit",
    "filter_threshold",
    "min_p_threshold",
    "penalize_counts",
    "penalize_repetition",
    "stream_key",
    "token_logprobs",
    "uniforms",
    "unpack_bitmask",
]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32."""

_BLOCK = 512
"""Entries of the vocabulary that are reduced together; any value gives the same results up to rounding of sums."""

_HEAD = 256
"""How many of the likeliest tokens top-p looks at before it sorts the whole vocabulary."""


# --- random numbers ----------------------------------------------------------------------------------------------


def stream_key(seed: int, *names: str) -> int:
    """The key of a random stream, in 0…2**64-1: a hash of *seed* (any 64-bit integer) and of what draws from it, so
    that two samplers of one request do not draw the same numbers."""
    text = "\0".join((str(seed), *names)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def uniforms(keys: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), one for each pair of uint64 *keys* and non-negative *draws*. float64, same shape.

    The number is what a SplitMix64 generator (Steele, Lea and Flood, 2014) that started from the key would give as its
    ``draws``-th, with 53 random bits.
    """
    with np.errstate(over="ignore"):
        z = keys + (draws.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.asarray((z >> np.uint64(11)) * 2.0**-53)


# --- edits: bias and masks change *scores* (float32 [rows, vocab]) in place, penalties return new ones ---------------


def add_bias(scores: Tensor, places: Tensor, values: Tensor) -> None:
    """Add ``values[i]`` (float32 ``[n]``) to the entry ``places[i]`` (int64 ``[n]``) of *scores* read as one line."""
    scores.view(-1).index_add_(0, places, values)


def allow_only(scores: Tensor, rows: Tensor, words: Tensor) -> None:
    """In rows *rows* (int64 ``[n]``, rising) keep only the tokens that *words* marks: see :func:`unpack_bitmask`."""
    allowed = unpack_bitmask(words, scores.shape[1])
    if len(rows) == len(scores):
        scores.masked_fill_(~allowed, -torch.inf)
    else:
        scores.index_copy_(0, rows, scores[rows].masked_fill_(~allowed, -torch.inf))


def unpack_bitmask(words: Tensor, vocab: int) -> Tensor:
    """int32 ``[n, ceil(vocab / 32)]``, lowest bit first (the layout of xgrammar), to bool ``[n, vocab]``."""
    if words.device.type == "cpu":
        packed = words.numpy().view(np.uint8)
        return torch.from_numpy(np.unpackbits(packed, axis=1, count=vocab, bitorder="little").view(np.bool_))
    bits = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (bits & 1).bool().flatten(1)[:, :vocab]


class Changes(NamedTuple):
    """Masks and penalties of a step, by row.

    :param which: int64 ``[rows]``: 0 for a row that may sample any token, else 1 + its row in *words*, int32
        ``[n, ceil(vocab / 32)]`` (see :func:`unpack_bitmask`).
    :param histories: int64 ``[rows]``: each row's line in *marks*, int32 ``[n, vocab]``: how often each token was
        generated, plus 2**30 if it was in the prompt. Line 0 is all 0.
    :param flags: uint8 ``[n, ceil(vocab / 8)]``: not 0 where any of eight neighbouring *marks* is not. Kernels need
        them, and that each tensor is contiguous.
    """

    which: Tensor
    words: Tensor
    histories: Tensor
    marks: Tensor
    flags: Tensor | None


def edit(scores: Tensor, slots: Tensor, floats: Tensor, changes: Changes) -> None:
    """Mask *scores* (float32 ``[rows, vocab]``, changed in place) and then apply repetition, frequency and presence
    penalties, without asking the device: :func:`mstar.nn.ops.cuda_edits.edited` in plain operations.

    :param slots: int64 ``[rows]``: each row's line in *floats*, the columns of ``SlotTable``.
    """
    which = changes.which
    allowed = unpack_bitmask(changes.words, scores.shape[1])[(which - 1).clamp_(min=0)]
    scores.masked_fill_(~(allowed | (which == 0).unsqueeze(1)), -torch.inf)
    found, params = changes.marks[changes.histories], floats[slots]
    scores.copy_(penalize_repetition(scores, found != 0, params[:, 3]))
    scores.copy_(penalize_counts(scores, found & ((1 << 30) - 1), params[:, 4], params[:, 5]))


def penalize_repetition(scores: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Divide positive and multiply negative scores of *seen* tokens by *penalty* (``[n]``).

    *scores* ``[n, m]`` may be all of the vocabulary or some tokens of it; *seen* is bool ``[n, m]``.

    From CTRL (Keskar et al., 2019), as in transformers' ``RepetitionPenaltyLogitsProcessor``. Returns new scores.
    """
    factor = penalty.unsqueeze(1)
    return torch.where(seen, torch.where(scores > 0, scores / factor, scores * factor), scores)


def penalize_counts(scores: Tensor, counts: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Subtract *frequency* × count and *presence* × (count > 0). *counts* int ``[n, m]``, like *scores*.

    OpenAI's definition: counts are those of generated tokens, not of the prompt's. Returns new scores.
    """
    return scores - frequency.unsqueeze(1) * counts - presence.unsqueeze(1) * (counts > 0)


# --- filters -------------------------------------------------------------------------------------------------------


def filter_threshold(scores: Tensor, top_k: Tensor, top_p: Tensor | None, max_k: int) -> Tensor:
    """The least logit that top-k and then top-p keep. *scores* after temperature, ``[n, vocab]``; returns ``[n]``.

    :param top_k: int64 ``[n]``; 0 keeps all. :param max_k: the largest of them (a size, hence known to the host).
    :param top_p: float32 ``[n]`` in (0, 1]: keep the fewest likeliest tokens (of those that top-k left) that sum to
        it. ``None``: no row uses it.

    Top-p sorts only the head of the distribution, and more of it for the rows where that is not enough. The test asks
    the device, so a device that is not the CPU sorts all of it at once.
    """
    vocab = scores.shape[1]
    if top_p is None:
        return _kth(_largest(scores, min(vocab, max_k)), top_k)
    head = min(vocab, max(max_k, _HEAD)) if scores.device.type == "cpu" else vocab
    values = _largest(scores, head)
    kth = _kth(values, top_k)
    weights = (scores - values[:, :1]).exp_()
    if max_k > 0:
        weights.mul_(torch.ge(scores, kth.unsqueeze(1)))
    mass = top_p * weights.sum(-1)
    threshold, short = _nucleus(values, kth, top_p, mass)
    while head < vocab and bool(short.any()):
        head = min(vocab, head * 16)
        rows = short.nonzero().squeeze(1)
        values = _largest(scores[rows], head)
        threshold[rows], short[rows] = _nucleus(values, kth[rows], top_p[rows], mass[rows])
    return threshold


def _largest(scores: Tensor, count: int) -> Tensor:
    """The *count* largest of each row, in falling order."""
    if count < scores.shape[1]:
        return scores.topk(count, dim=-1).values
    return scores.sort(dim=-1, descending=True).values


def _kth(values: Tensor, top_k: Tensor) -> Tensor:
    """The *top_k*-th of the sorted *values*; minus infinity where *top_k* is 0."""
    last = (top_k.clamp(1, values.shape[1]) - 1).unsqueeze(1)
    return values.gather(1, last).squeeze(1).masked_fill(top_k == 0, -torch.inf)


def _nucleus(values: Tensor, kth: Tensor, top_p: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Top-p's threshold from the sorted head *values*, and the rows whose nucleus may reach beyond that head."""
    weights = (values - values[:, :1]).exp_()
    before = weights.cumsum(-1) - weights
    kept = (before < mass.unsqueeze(1)) & (values >= kth.unsqueeze(1))
    kept[:, 0] = True  # the likeliest stays whatever rounding says
    count = kept.sum(-1, keepdim=True)
    # A top-p of 1 keeps all, also where rounding lets the sum reach the total early.
    everything = top_p >= 1
    threshold = torch.where(everything, kth, values.gather(1, count - 1).squeeze(1))
    return threshold, (count.squeeze(1) == values.shape[1]) & (values[:, -1] > kth) & ~everything


def min_p_threshold(best: Tensor, min_p: Tensor) -> Tensor:
    """The least logit that min-p keeps: tokens at least *min_p* times as likely as the likeliest. ``[n]`` each.

    (Nguyen et al., 2024.) *best* is the row's largest logit; that ratio does not depend on what other filters dropped.
    """
    return best + min_p.log()


# --- choosing ------------------------------------------------------------------------------------------------------


def argmax(scores: Tensor) -> Tensor:
    """Index of each row's largest score, the first of equals. Any float dtype ``[rows, vocab]`` → int64 ``[rows]``.

    On the CPU in two levels: ``amax`` over blocks is vectorised where ``argmax`` is not (about 8 times as fast).
    """
    if scores.device.type != "cpu" or scores.shape[1] < 2 * _BLOCK:
        return scores.argmax(dim=-1)
    block = _blocks(scores, "amax").argmax(dim=-1, keepdim=True)
    index = _block_index(block, scores.shape[1])
    return index.gather(1, scores.gather(1, index).argmax(dim=-1, keepdim=True)).squeeze(1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw one index per row in proportion to *weights*. int64 ``[rows]``.

    :param weights: float32 ``[rows, vocab]``, not negative, each row with a positive sum; need not be normalised.
    :param uniform: float64 ``[rows]`` in [0, 1). An index of weight 0 is never drawn.
    """
    vocab = weights.shape[1]
    sums = _blocks(weights, "sum").double().cumsum(-1)
    target = uniform.unsqueeze(1) * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    rest = target - torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    index = _block_index(block, vocab)
    inside = weights.gather(1, index).masked_fill_(_beyond(block, vocab), 0.0).double().cumsum(-1)
    # The two levels round apart: keep the remainder below the block's own sum, so that the search ends inside it.
    rest = torch.minimum(rest, inside[:, -1:] * (1 - 2.0**-53))
    place = torch.searchsorted(inside, rest, right=True).clamp_(max=inside.shape[1] - 1)
    return index.gather(1, place).squeeze(1)


def _blocks(scores: Tensor, how: str) -> Tensor:
    """Reduce blocks of the last dimension: ``[rows, ceil(vocab / _BLOCK)]``; the last block may be short."""
    whole = scores.shape[1] // _BLOCK * _BLOCK
    reduce = torch.amax if how == "amax" else torch.sum
    parts = [reduce(scores[:, :whole].reshape(len(scores), -1, _BLOCK), dim=-1)] if whole else []
    if whole < scores.shape[1]:
        parts.append(reduce(scores[:, whole:], dim=-1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _block_index(block: Tensor, vocab: int) -> Tensor:
    """Indices of the entries of *block* (int64 ``[rows, 1]``); those beyond the vocabulary repeat its last entry."""
    return (block * _BLOCK + torch.arange(_BLOCK, device=block.device)).clamp_(max=vocab - 1)


def _beyond(block: Tensor, vocab: int) -> Tensor:
    return block * _BLOCK + torch.arange(_BLOCK, device=block.device) >= vocab


# --- reports -------------------------------------------------------------------------------------------------------


def token_logprobs(logits: Tensor, ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under raw *logits* ``[n, vocab]``: those of the sampled *ids* (int64 ``[n]``), float32 ``[n]``;
    those of the *most* likeliest tokens, float32 ``[n, most]``, and these tokens, int64 ``[n, most]``."""
    table = torch.log_softmax(logits.float(), dim=-1)
    chosen = table.gather(1, ids.clamp(min=0).unsqueeze(1)).squeeze(1)
    return chosen, *table.topk(min(most, table.shape[1]), dim=-1)


def as_reports(
    ids: Sequence[int],
    chosen: Sequence[float],
    values: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    alternatives: Sequence[int],
) -> list[TokenLogprob]:
    """What :func:`token_logprobs` computed, one report a row with as many of the likeliest tokens as
    *alternatives* says."""
    rows = zip(ids, chosen, tokens, values, alternatives, strict=True)
    return [
        TokenLogprob(token=token, logprob=logprob, top=list(zip(top[:n], worth[:n], strict=True)))
        for token, logprob, top, worth, n in rows
    ]

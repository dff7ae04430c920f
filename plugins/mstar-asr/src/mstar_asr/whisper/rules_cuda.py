"""The rules of a decode step as Triton kernels: :meth:`mstar_asr.whisper.rules.Rules.next` in one instead of twenty,
and what is noted of a token in one instead of fifteen.

A row is one program's, which looks at no other row nor at their number. Everything is read on the device when a kernel
runs, so that a captured graph replays with what the tensors then hold.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import pdl
from mstar.nn.ops.delta import StateSlots

__all__ = ["following", "note"]

_BLOCK = 4096
_WANTED, _COUNT, _LAST, _BEFORE, _LATEST = (tl.constexpr(place) for place in range(5))


@triton.jit
def _following(
    logits, facts, never, suppressed, begin, eot, no_timestamps, stride: tl.constexpr, width: tl.constexpr,
    vocab: tl.constexpr, block: tl.constexpr, block_never: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    nothing = tl.full((), float("-inf"), tl.float32)
    which = tl.arange(0, block_never)
    tl.store(line + tl.load(never + which, mask=which < suppressed, other=0), nothing, mask=which < suppressed)
    if tl.load(facts + row * width + _WANTED) == 0:
        return
    tl.store(line + no_timestamps, nothing)
    tl.debug_barrier()  # other threads read on from here
    last = tl.load(facts + row * width + _LAST) != 0
    before = tl.load(facts + row * width + _BEFORE) != 0
    latest = tl.load(facts + row * width + _LATEST)
    opened, closed = last & before, last & (before == 0)
    lowest = tl.where(latest > 0, latest + tl.where(closed, 0, 1), begin)
    lowest = tl.where(opened, vocab, lowest)  # a segment has begun: no timestamp at all

    at = tl.arange(0, block)
    words = tl.full((block,), float("-inf"), tl.float32)
    top = tl.full((block,), float("-inf"), tl.float32)
    held = tl.zeros((block,), tl.float32)
    broken = tl.zeros((block,), tl.int32)
    for start in range(0, vocab, block):
        place = start + at
        x = tl.load(line + place, mask=place < vocab, other=float("-inf"))
        text, time = place < eot, place >= lowest
        word = (place < begin) & ((text == 0) | (closed == 0))
        broken += ((x != x) & (word | time)).to(tl.int32)
        words = tl.maximum(words, tl.where(word, x, float("-inf")))
        timed = tl.where(time, x, float("-inf"))
        higher = tl.maximum(top, timed)
        some = higher > float("-inf")
        held = tl.where(some, held * tl.exp(top - higher) + tl.exp(timed - higher), 0)
        top = higher
    best = tl.max(words, 0)
    most = tl.max(top, 0)
    total = tl.log(tl.sum(tl.where(top > float("-inf"), held * tl.exp(top - most), 0), 0)) + most
    # Where a number is none, nothing is likelier than anything; the sampler marks the row.
    total = tl.where(tl.sum(broken, 0) > 0, float("-inf"), total)
    is_time = (total > best).to(tl.int32)
    first = tl.where(is_time > 0, begin, tl.where(closed, eot, 0))  # what is before it cannot be

    for start in range(0, vocab, block):
        place = start + at
        barred = (place < first) | ((place >= begin) & (place < lowest))
        tl.store(line + place, nothing + tl.zeros((block,), tl.float32), mask=(place < vocab) & barred)


def following(logits: Tensor, facts: Tensor, never: Tensor, begin: int, eot: int, no_timestamps: int) -> None:
    """:meth:`Rules.next`. *logits* float32 ``[rows, vocab]``, contiguous; *never* int64: what is suppressed."""
    rows, vocab = logits.shape
    if not rows:
        return
    block = min(triton.next_power_of_2(vocab), _BLOCK)
    _following[(rows,)](
        logits, facts, never, len(never), begin, eot, no_timestamps, logits.stride(0), facts.stride(0), vocab, block,
        triton.next_power_of_2(max(len(never), 1)), pdl.enabled(), num_warps=16 if block == _BLOCK else 4,
        **pdl.options(),
    )  # fmt: skip


@triton.jit
def _note(
    ids, facts, said, facts_pool, source, target, facts_target, begin, width: tl.constexpr, facts_stride: tl.constexpr,
    length: tl.constexpr, said_stride: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row)
    old = facts + row * width
    wanted, count, last = tl.load(old + _WANTED), tl.load(old + _COUNT), tl.load(old + _LAST)
    latest = tl.load(old + _LATEST)
    at = tl.arange(0, block)
    answer = tl.load(said + tl.load(source + row) * said_stride + at, mask=at < length, other=0)
    answer = tl.where(at == tl.minimum(count, length - 1), token, answer)
    tl.store(said + tl.load(target + row) * said_stride + at, answer, mask=at < length)
    timed = token >= begin
    new = facts_pool + tl.load(facts_target + row) * facts_stride
    tl.store(new + _WANTED, wanted)
    tl.store(new + _COUNT, count + 1)
    tl.store(new + _LAST, timed.to(tl.int64))
    tl.store(new + _BEFORE, tl.where(count == 0, 1, last))
    tl.store(new + _LATEST, tl.where(timed, token, latest))


def note(ids: Tensor, facts: Tensor, answer: StateSlots, noted: StateSlots, begin: int) -> None:
    """Put *ids* int64 ``[rows]`` behind the rows' *answer*, and what :meth:`Rules.after` makes of *facts*, which were
    read before, where *noted* keeps the facts."""
    rows = ids.shape[0]
    if not rows or answer.target is None or noted.target is None:
        return
    length = answer.pool.shape[1]
    _note[(rows,)](
        ids, facts, answer.pool, noted.pool, answer.source, answer.target, noted.target, begin, facts.stride(0),
        noted.pool.stride(0), length, answer.pool.stride(0), triton.next_power_of_2(length), pdl.enabled(),
        num_warps=4, **pdl.options(),
    )  # fmt: skip

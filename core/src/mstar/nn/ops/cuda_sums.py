"""What ranks tell each other in one kernel: sums and rows gathered, through memory that their GPUs map of each other.

*Protocol.* Every rank has an inbox ``[2, ranks, room]`` of 64-bit words. A word carries 32 bits of a message and the
number of the call that it belongs to, and is stored and loaded as a whole: a reader that sees the number has the bits.
So there are no flags to raise behind the data and no fences to wait for: a call is one trip over NVLink. The price is
twice the bytes, which small messages do not notice. (NCCL calls the idea LL.)

A call's words go to one of two slots, alternately. Why two are enough: let a program of rank *a* send call *n + 2*,
into the slot of call *n* in the inbox of *b*. It began after the one before had ended on *a*, which had seen the words
that the same program of *b* sent in call *n + 1*. That program had begun after its own call *n* had ended: it has read
what is overwritten. It rests on three things:

- a kernel sends only after the kernels before it have ended, also when it is launched early;
- program *p* of one rank and program *p* of another share the same calls and words: a word's program depends on its
  place alone, and those that a short message does not need are not launched, on no rank;
- calls are counted in device memory, by each program for itself, since a captured step repeats its arguments.

*Order.* Every rank adds the same parts in float32 in the order of the ranks, its own among them, and rounds once: all
have the same bits, whatever the size of the message, as ranks must that sample the same token for themselves.

A program that waits occupies its place, so all of a call must have one at once: :data:`PROGRAMS` small ones do on any
GPU that has NVLink. If a peer dies, the others wait until somebody ends them, as in a kernel of NCCL: the worker's
watch over its ranks does.

*Hosts.* While a kernel waits, its process may be held up: to load a kernel that was never used, or to allocate, the
driver may wait for what runs. That is no harm as long as no process waits for another's between two calls: the one that
has made fewer calls is held up by none of them, since the others' words are there. So a step is told to all ranks
before any begins it, and two ranks in one process must have loaded everything before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import pdl

__all__ = ["BLOCK", "PROGRAMS", "Mail", "add", "echoing", "gather", "reduce", "takes"]

PROGRAMS = 256
"""Most programs of a call."""
BLOCK = 256
"""Words of a message that a program moves at a time, one a thread: 1 kB."""
_WORD = 4
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Mail(NamedTuple):
    """A rank's way to its peers, all of which make the same calls in the same order, one after the other.

    :ivar room: 32-bit words of the longest message.
    :ivar inboxes: int64 ``[ranks]`` on the device: where each rank's inbox, int64 ``[2, ranks, room]``, lies in this
        process. They were zeros before any rank sent anything.
    :ivar calls: int32 ``[PROGRAMS]`` on the device, zeros at first.
    :ivar kept: memory that *inboxes* tell of, which stays as long.
    """

    rank: int
    size: int
    room: int
    inboxes: Tensor
    calls: Tensor
    kept: object = None


def echoing(rank: int, size: int, room: int, device: torch.device, programs: int = PROGRAMS) -> Mail:
    """The way of a *rank* that is by itself: what it sends to a peer lies where it looks for what that peer sends. So
    each peer says what it says, at once."""
    inbox = torch.zeros(2, size, room, dtype=torch.int64, device=device)
    addresses = [inbox.data_ptr() + (peer - rank) * room * inbox.itemsize for peer in range(size)]
    addresses[rank] = inbox.data_ptr()
    calls = torch.zeros(programs, dtype=torch.int32, device=device)
    return Mail(rank, size, room, torch.tensor(addresses, device=device), calls, inbox)


@triton.jit
def _send(target, word, inside, native: tl.constexpr):
    """Store 64-bit *word* at *target*, in the memory of a peer."""
    if native:
        tl.inline_asm_elementwise(
            """{
            .reg .pred inside;
            setp.ne.s32 inside, $3, 0;
            @inside st.relaxed.sys.global.b64 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,l,r", [target.to(tl.int64), word, inside.to(tl.int32)], tl.int32, False, 1,
        )  # fmt: skip
    else:
        tl.store(target, word, mask=inside)


@triton.jit
def _receive(source, call, inside, native: tl.constexpr):
    """The 32 bits at *source*, once they are those of *call*."""
    if native:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred outside, other;
            .reg .b32 bits, number;
            .reg .b64 word;
            mov.b32 bits, 0;
            setp.eq.s32 outside, $3, 0;
            @outside bra COME;
            AGAIN:
            ld.relaxed.sys.global.b64 word, [$1];
            mov.b64 {bits, number}, word;
            setp.ne.s32 other, number, $2;
            @other bra AGAIN;
            COME:
            mov.b32 $0, bits;
            }""",
            "=r,l,r,r", [source.to(tl.int64), call, inside.to(tl.int32)], tl.int32, False, 1,
        )  # fmt: skip
    else:
        word = tl.load(source, mask=inside, other=0)
        return tl.where((word >> 32).to(tl.int32) == call, word.to(tl.int32), 0)


@triton.jit
def _numbers(bits, kind: tl.constexpr):
    """The two numbers of 16 bits in a word, the lower end first, or twice the one of 32, in float32."""
    if kind == tl.float32:
        low = bits.to(tl.float32, bitcast=True)
        high = low
    else:
        low = bits.to(tl.int16).to(kind, bitcast=True).to(tl.float32)
        high = (bits >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _rounded(low, high, kind: tl.constexpr):
    """The word of such numbers."""
    if kind == tl.float32:
        word = low.to(tl.int32, bitcast=True)
    else:
        word = high.to(kind).to(tl.int16, bitcast=True).to(tl.int32) << 16
        word |= low.to(kind).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return word


@triton.jit(do_not_specialize=["words", "width", "turns"])
def _exchange(
    part, out, inboxes, calls, words, width, turns, room: tl.constexpr, rank: tl.constexpr, size: tl.constexpr,
    kind: tl.constexpr, added: tl.constexpr, gathered: tl.constexpr, programs: tl.constexpr, block: tl.constexpr,
    native: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    call += tl.where(call == 0, 2, 0)  # 0 is what an inbox begins with; the slots go on taking turns
    slot = (call & 1).to(tl.int64) * (size * room)
    own = tl.load(inboxes + rank).to(tl.pointer_type(tl.int64)) + slot
    for turn in range(turns):
        at = (turn * programs + program) * block + tl.arange(0, block)
        inside = at < words
        bits = tl.load(part + at, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
        word = (call.to(tl.int64) << 32) | bits
        for step in tl.static_range(1, size):
            peer = (rank + step) % size
            inbox = tl.load(inboxes + peer).to(tl.pointer_type(tl.int64))
            _send(inbox + slot + rank * room + at, word, inside, native)
    for turn in range(turns):
        at = (turn * programs + program) * block + tl.arange(0, block)
        inside = at < words
        mine = tl.load(part + at, mask=inside, other=0)
        if added:
            stream = tl.load(out + at, mask=inside, other=0)  # before waiting, which nothing passes
        for each in tl.static_range(size):
            if each == rank:
                bits = mine
            else:
                bits = _receive(own + each * room + at, call, inside, native)
            if gathered:
                row = at // width
                tl.store(out + (row * size + each).to(tl.int64) * width + at % width, bits, mask=inside)
            elif each == 0:
                low, high = _numbers(bits, kind)
            else:
                next_low, next_high = _numbers(bits, kind)
                low += next_low
                high += next_high
        if not gathered:
            if added:
                next_low, next_high = _numbers(stream, kind)
                low += next_low
                high += next_high
            tl.store(out + at, _rounded(low, high, kind), mask=inside)
    tl.debug_barrier()  # all threads have read the count
    tl.store(calls + program, call)


def takes(mail: Mail, x: Tensor) -> bool:
    """Whether *x* is a message for *mail*: by shape and dtype, so alike on every rank."""
    whole = x.dim() > 0 and x.shape[-1] * x.element_size() % _WORD == 0
    return x.dtype in _TYPES and whole and 0 < x.nbytes <= mail.room * _WORD


def reduce(mail: Mail, x: Tensor) -> Tensor:
    """The sum of all ranks' contiguous *x*, in its place."""
    _launch(mail, x, x, added=False, gathered=False)
    return x


def add(mail: Mail, residual: Tensor, x: Tensor) -> None:
    """Add the sum of all ranks' *x* to *residual*, in place: both contiguous, of one shape and dtype."""
    _launch(mail, x, residual, added=True, gathered=False)


def gather(mail: Mail, x: Tensor) -> Tensor:
    """``[..., ranks * N]``: all ranks' contiguous *x* ``[..., N]`` beside each other."""
    out = x.new_empty(*x.shape[:-1], mail.size * x.shape[-1])
    _launch(mail, x, out, added=False, gathered=True)
    return out


def _launch(mail: Mail, x: Tensor, out: Tensor, added: bool, gathered: bool) -> None:
    part, result = x.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    words, blocks = part.numel(), triton.cdiv(part.numel(), BLOCK)
    kind = tl.float32 if gathered else _TYPES[x.dtype]  # what is gathered is bits
    _exchange[(min(blocks, PROGRAMS),)](
        part, result, mail.inboxes, mail.calls, words, x.shape[-1] * x.element_size() // _WORD,
        triton.cdiv(blocks, PROGRAMS), mail.room, mail.rank, mail.size, kind, added, gathered, PROGRAMS, BLOCK,
        x.is_cuda, pdl.enabled(), num_warps=BLOCK // 32, **pdl.options(),
    )  # fmt: skip

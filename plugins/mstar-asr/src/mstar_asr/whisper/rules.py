"""Which tokens may come next: suppressed tokens and the grammar of timestamps, as operations on the device.

Source: ``SuppressBlank``, ``SuppressTokens`` and ``ApplyTimestampRules`` of OpenAI's whisper 20250625
(``decoding.py``), with which transformers' ``WhisperTimeStampLogitsProcessor`` agrees. With timestamps an answer is a
row of segments: a timestamp, text, a timestamp. So they come in pairs, but for the first and the last one; they never
decrease; a segment is not empty; and where all timestamps together are likelier than the likeliest text, a timestamp it
is.

What the rules must know of an answer so far is :data:`FACTS` numbers a request, kept in a resource on the device.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mstar.nn.ops import cuda_kernels_fault
from mstar_asr.whisper.tokens import WhisperTokens

__all__ = ["FACTS", "Rules"]

FACTS = 5
"""Whether timestamps are wanted; tokens so far; whether the last one and the one before it are timestamps (before the
second token: yes); the last timestamp, 0 without one."""

_WANTED, _COUNT, _LAST, _BEFORE, _LATEST = range(FACTS)


@cache
def _kernels() -> ModuleType | None:
    """The same as kernels for CUDA, where they can be used."""
    if cuda_kernels_fault() is not None:
        return None
    import mstar_asr.whisper.rules_cuda as kernels

    return kernels


class Rules(nn.Module):
    """The rules of one checkpoint. Logits are changed in place, float32 ``[rows, vocab]``; facts are int64
    ``[rows, FACTS]``."""

    never: Tensor
    never_first: Tensor

    def __init__(self, tokens: WhisperTokens):
        super().__init__()
        self.tokens = tokens
        self.register_buffer("never", torch.tensor(tokens.suppressed, dtype=torch.int64), persistent=False)
        self.register_buffer("never_first", torch.tensor(tokens.suppressed_first, dtype=torch.int64), persistent=False)

    def compute_buffers(self, device: torch.device) -> dict[str, Tensor]:
        return {
            name: torch.tensor(ids, dtype=torch.int64, device=device)
            for name, ids in (("never", self.tokens.suppressed), ("never_first", self.tokens.suppressed_first))
        }

    def first(self, logits: Tensor, timestamps: Tensor, max_initial: Tensor) -> Tensor:
        """Before the first token.

        :param timestamps: bool ``[rows]``. :param max_initial: int64 ``[rows]``, the greatest index that the first
            timestamp may have; -1: any.
        :returns: the facts of answers without a token.
        """
        begin = self.tokens.timestamp_begin
        logits.index_fill_(1, self.never, -torch.inf).index_fill_(1, self.never_first, -torch.inf)
        logits[:, :begin].masked_fill_(timestamps[:, None], -torch.inf)
        times = logits[:, begin:]
        index = torch.arange(times.shape[1], device=logits.device)
        late = (index > max_initial[:, None]) & (max_initial >= 0)[:, None] & timestamps[:, None]
        times.masked_fill_(late, -torch.inf)
        facts = torch.zeros(len(logits), FACTS, dtype=torch.int64, device=logits.device)
        facts[:, _WANTED] = timestamps
        return facts

    def next(self, logits: Tensor, facts: Tensor) -> None:
        """Before any other token."""
        tokens = self.tokens
        kernels = _kernels() if logits.is_cuda and logits.is_contiguous() else None
        if kernels is not None:
            never = self.never, tokens.timestamp_begin, tokens.eot, tokens.no_timestamps
            kernels.following(logits, facts, *never)
            return
        begin, eot = tokens.timestamp_begin, tokens.eot
        logits.index_fill_(1, self.never, -torch.inf)
        wanted, last, before = facts[:, _WANTED].bool(), facts[:, _LAST].bool(), facts[:, _BEFORE].bool()
        latest = facts[:, _LATEST]
        text, control, times = logits[:, :eot], logits[:, eot:begin], logits[:, begin:]
        logits[:, tokens.no_timestamps].masked_fill_(wanted, -torch.inf)
        opened = wanted & last & before  # a segment has begun: text
        closed = wanted & last & ~before  # a segment has ended: where the next one begins, or the end
        lowest = torch.where(latest > 0, latest - begin + (~closed).long(), 0)
        index = torch.arange(times.shape[1], device=logits.device)
        barred = opened[:, None] | ((index < lowest[:, None]) & wanted[:, None])
        times.masked_fill_(barred, -torch.inf)
        best_text = text.amax(1).masked_fill_(closed, -torch.inf)
        best = torch.maximum(best_text, control.amax(1))
        timed = wanted & (times.logsumexp(1) > best)
        text.masked_fill_((closed | timed)[:, None], -torch.inf)
        control.masked_fill_(timed[:, None], -torch.inf)

    def after(self, facts: Tensor, ids: Tensor) -> Tensor:
        """The facts once *ids* int64 ``[rows]`` have been sampled."""
        wanted, count, last, _, latest = facts.unbind(1)
        is_time = ids >= self.tokens.timestamp_begin
        before = torch.where(count == 0, 1, last)
        return torch.stack((wanted, count + 1, is_time.long(), before, torch.where(is_time, ids, latest)), 1)

    def note(self, answer: Any, facts: Tensor, ids: Tensor) -> None:
        """Once *ids* have been sampled: keep them behind the rows' answers, and the facts that are true then.

        :param answer: the step's view of ``said`` and ``facts``. :param facts: those that were true before.
        """
        kernels = _kernels() if ids.is_cuda else None
        if kernels is not None:
            kernels.note(ids, facts, answer.slots("said"), answer.slots("facts"), self.tokens.timestamp_begin)
            return
        said = answer.read("said")
        place = self.count(facts).clamp(max=said.shape[1] - 1)
        answer.write("said", said.scatter(1, place[:, None], ids[:, None]))
        answer.write("facts", self.after(facts, ids))

    @staticmethod
    def count(facts: Tensor) -> Tensor:
        """Tokens so far, int64 ``[rows]``."""
        return facts[:, _COUNT]

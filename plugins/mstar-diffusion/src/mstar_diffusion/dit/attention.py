"""Attention of all tokens of a row with each other, by the implementation that the deployment names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mstar.nn.node import Step
from mstar.nn.sequence import SequenceShards
from mstar.nn.windows import attend_windows

__all__ = ["ATTENTION_BACKENDS", "BY_RESOURCE", "RESOURCE", "TokenAttention", "attend", "attention_by"]

BY_RESOURCE = "flashinfer"
"""The option's value with which the engine attends, by the backend of that name: the denoiser's entries then have
:data:`RESOURCE`."""
RESOURCE = "dit_attention"

ATTENTION_BACKENDS: dict[str, tuple[SDPBackend, ...]] = {
    # in the order in which they are tried
    "sdpa": (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH),
    "flash": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    "math": (SDPBackend.MATH,),
}
"""Values of the option ``attention_backend`` that are PyTorch's. Pictures come in few sizes, so cuDNN's attention,
which prepares itself for each length anew, is worth its preparation here."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """``[rows, tokens, heads, head_dim]`` of queries, keys and values of that shape; keys and values may have fewer
    heads, each shared by as many query heads. *mask*: bool ``[rows, 1, tokens, tokens]``, true where a query sees."""
    # a branch, because a compiler for which heads have any number gives no plain boolean
    shared = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
    if mask is not None and shared and q.is_cuda:
        # of PyTorch's kernels the fast one that takes masks shares no heads, and the plain one computes in float32
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        shared = {}
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if mask is None and not causal and not shared:
        return attend_windows(q, k, v).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, **shared).transpose(1, 2)


@contextmanager
def attention_by(name: str, device: torch.device) -> Iterator[None]:
    """Within it :func:`attend` runs on the backend *name*. The CPU has one of its own, whatever the name; with
    :data:`BY_RESOURCE` nothing is chosen here."""
    if device.type == "cpu" or name == BY_RESOURCE:
        yield
        return
    with sdpa_kernel(list(ATTENTION_BACKENDS[name]), set_priority=True):
        yield


class TokenAttention:
    """How the tokens of a step's rows see each other: all of a row, each.

    :param step: where it has :data:`RESOURCE`, that attends; otherwise :func:`attend`.
    :param shards: of which sequence a rank has these tokens; ``None``: it has them all.
    """

    def __init__(self, step: Step, shards: SequenceShards | None = None):
        self.view: Any = step.views.get(RESOURCE)
        self.shards = shards

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[rows, tokens, heads, head_dim]`` of queries, keys and values of that shape."""
        if self.shards is not None:
            return self.shards.attend(attend if self.view is None else self.view.attend_windows, q, k, v)
        return attend(q, k, v) if self.view is None else self.view.attend_windows(q, k, v)

"""Attention of all tokens of a row with each other, by the implementation that the deployment names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mstar.nn.windows import attend_windows

__all__ = ["ATTENTION_BACKENDS", "attend", "attention_by"]

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
"""Names of the option ``attention_backend``. Pictures come in few sizes, so cuDNN's attention, which prepares itself
for each length anew, is worth its preparation here."""


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
    """Within it :func:`attend` runs on the backend *name*. The CPU has one of its own, whatever the name."""
    if device.type == "cpu":
        yield
        return
    with sdpa_kernel(list(ATTENTION_BACKENDS[name]), set_priority=True):
        yield

"""Attention within windows that all have one length and keep nothing: an encoder's of sound, a denoiser's of pictures.

On GPUs from compute capability 9.0 on cuDNN has a kernel for it that PyTorch's own, of an older generation, does not
reach. It prepares itself for each shape anew, tens of milliseconds, which is why it is off for rows of any length
(:mod:`mstar.resources.attention.torch_sdpa`); windows come in as many shapes as a step has numbers of rows.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["attend_windows"]

log = logging.getLogger(__name__)

_CAPABILITY = (9, 0)
_TOLERANCE = 2e-2
"""Of the largest value: a few roundings of bfloat16."""
_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

_Key = tuple[torch.device, torch.dtype, int, int, int]
_right: dict[_Key, bool] = {}


def attend_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of all positions of a window to each other, ``[rows, heads, positions, head_dim]`` of queries, keys and
    values of that shape; they may be views, as long as each head is one run of memory.

    On a device and in a dtype that cuDNN has a kernel for it is used once it has been found to be right, by one window
    of the shape against PyTorch's. That is not done in a capture, before which a step runs as plain calls anyway. Where
    the caller has PyTorch choose among some kernels only (``sdpa_kernel``) without cuDNN's, that holds; that cuDNN's
    alone is switched off, as it is for rows of any length, does not count.
    """
    if not _able(q):
        return F.scaled_dot_product_attention(q, k, v)
    return _cudnn(q, k, v) if _is_right(q) else _without_cudnn(q, k, v)


def _able(q: Tensor) -> bool:
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or torch.compiler.is_compiling():
        return False
    on = torch.backends.cuda
    others = on.flash_sdp_enabled() and on.mem_efficient_sdp_enabled() and on.math_sdp_enabled()  # type: ignore[no-untyped-call]
    allowed: bool = others or on.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return allowed and torch.cuda.get_device_capability(q.device) >= _CAPABILITY


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(_BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v)


def _without_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(_BACKENDS[1:], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v)


def _is_right(q: Tensor) -> bool:
    _, heads, positions, dim = q.shape
    key = (q.device, q.dtype, heads, positions, dim)
    if key not in _right:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        fault = _fault(*key)
        if fault is not None:
            log.warning("attention within windows by PyTorch's kernel, not by cuDNN's: %s", fault)
        _right[key] = fault is None
    return _right[key]


def _fault(device: torch.device, dtype: torch.dtype, heads: int, positions: int, dim: int) -> str | None:
    """``None``, or why cuDNN's kernel is not used."""
    generator = torch.Generator(device).manual_seed(0)
    made = torch.randn((1, positions, 3, heads, dim), generator=generator, device=device).to(dtype)
    q, k, v = made.permute(2, 0, 3, 1, 4)
    wanted = _without_cudnn(q, k, v).float()
    try:
        got = _cudnn(q, k, v).float()
        worst = float((got - wanted).abs().max() / wanted.abs().max())
    except Exception as error:  # a library that is missing or too old raises what it likes
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None if worst <= _TOLERANCE else f"it differs by {worst:.3g} of the largest value"  # NaN too

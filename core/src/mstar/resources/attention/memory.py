"""The tensor that holds keys and values of many contexts."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from mstar.nn import ops
from mstar.spec.errors import SetupError, nearest

__all__ = ["KVMemory", "dtype_named"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_named(name: str | None, default: torch.dtype) -> torch.dtype:
    """The torch dtype that a resource's ``dtype`` field names; *default* for ``None``."""
    if name is None:
        return default
    if name not in _DTYPES:
        raise SetupError(f"{name!r} is not a dtype that keys and values can be kept in{nearest(name, _DTYPES)}")
    return _DTYPES[name]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As :func:`torch.zeros`; on the CPU the operating system provides each page when it is first written, so that a
    pool costs the memory that is used and not its size."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class KVMemory:
    """Keys and values of *tokens* places in each layer, allocated once.

    ``data`` is ``[layers, 2, tokens, kv_heads, head_dim]`` (keys at 0, values at 1 of the second axis). It begins as
    zeros, so that a place that was never written holds no NaN that a masked read could spread.
    """

    def __init__(
        self, layers: int, tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ):
        self.layers, self.tokens, self.kv_heads, self.head_dim, self.dtype = layers, tokens, kv_heads, head_dim, dtype
        self.data = _zeros((layers, 2, tokens, kv_heads, head_dim), dtype, torch.device(device))
        # Views made once: slicing costs microseconds that every layer of every step would pay.
        self.pairs: list[Tensor] = [layer.view(2 * tokens, kv_heads * head_dim) for layer in self.data.unbind(0)]
        """Per layer ``[2 * tokens, kv_heads * head_dim]``: the value of place *i* is in line ``tokens + i``."""
        self._keys = [pair[:tokens] for pair in self.pairs]
        self._values = [pair[tokens:] for pair in self.pairs]
        self._addresses = [pair.data_ptr() for pair in self.pairs]
        self.values_offset = tokens * kv_heads * head_dim * dtype.itemsize
        """Bytes from a layer's keys to its values."""

    @staticmethod
    def token_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one token takes over all layers."""
        return layers * 2 * kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Put *k*, *v* ``[N, kv_heads, head_dim]`` at *places* int64 ``[N]`` of *layer*."""
        ops.store_rows(self._keys[layer], self._values[layer], places, k, v)

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """*layer*'s keys and values, ``[tokens, kv_heads * head_dim]`` each."""
        return self._keys[layer], self._values[layer]

    def keys_at(self, layer: int) -> int:
        """Address of *layer*'s keys, for kernels that read the memory by themselves."""
        return self._addresses[layer]

    def run(self, layer: int, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Views of keys and values ``[count, kv_heads, head_dim]`` at places ``start … start + count - 1``."""
        data = self.data[layer, :, start : start + count]
        return data[0], data[1]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy places int64 ``[n]`` in all layers. All sources are read before any target is written."""
        self.data.index_copy_(2, targets, self.data.index_select(2, sources))

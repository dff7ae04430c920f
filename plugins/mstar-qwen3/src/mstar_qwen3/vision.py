"""The vision tower: patches of any number of pictures and frames in, embeddings of the language model's width out.

Source: ``Qwen3_5VisionModel`` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.linear import ColumnLinear, RowLinear
from mstar.nn.node import Node, Step
from mstar.nn.rotary import Rotation
from mstar.nn.shards import Division
from mstar_qwen3.vision_config import VisionConfig

__all__ = ["VisionEncoder", "kernel_head_dim"]

_EPS = 1e-6
_KERNEL_HEADS = (64, 128, 256)
"""Head sizes that attention kernels on GPUs have."""


def kernel_head_dim(head_dim: int, device: torch.device) -> int:
    """What heads of *head_dim* are filled up to with zeros, so that there is a kernel for them on *device*."""
    if device.type != "cuda":
        return head_dim
    return next((size for size in _KERNEL_HEADS if size >= head_dim), head_dim)


class _Attention(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = ColumnLinear(
            config.hidden, 3 * config.hidden, bias=True, unit=config.head_dim, sections=(config.hidden,) * 3
        )
        self.qkv.divisions = (Division("heads of the vision tower", config.heads),)
        self.heads = self.qkv.out_features // (3 * config.head_dim)
        self.proj = RowLinear(config.hidden, config.hidden, bias=True, unit=config.head_dim)

    def forward(self, x: Tensor, rotation: Rotation, attention: Any) -> Tensor:
        """*x*: normed ``[P, hidden]``."""
        heads = self.qkv(x).view(x.shape[0], 3 * self.heads, self.head_dim)
        q, k, v = ops.rotate_store(heads, self.heads, rotation.cos, rotation.sin, None, None, None, None)
        q, k = q.to(v.dtype), k.to(v.dtype)  # the angles are float32
        spare = kernel_head_dim(self.head_dim, x.device) - self.head_dim
        if spare:
            q, k, v = (F.pad(part, (0, spare)) for part in (q, k, v))
        mixed = attention.attend(q, k, v, scale=self.head_dim**-0.5)
        return self.proj(mixed[..., : self.head_dim].reshape(x.shape[0], -1))  # type: ignore[no-any-return]


class _MLP(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.linear_fc1 = ColumnLinear(config.hidden, config.intermediate, bias=True)
        self.linear_fc2 = RowLinear(config.intermediate, config.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden, eps=_EPS)
        self.norm2 = nn.LayerNorm(config.hidden, eps=_EPS)
        self.attn = _Attention(config)
        self.mlp = _MLP(config)

    def forward(self, x: Tensor, rotation: Rotation, attention: Any) -> Tensor:
        x = x + self.attn(self.norm1(x), rotation, attention)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class _PatchEmbedding(nn.Module):
    """The published convolution, whose windows are the patches."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        size = (config.pair, config.patch, config.patch)
        self.proj = nn.Conv3d(config.channels, config.hidden, size, stride=size)

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class _Merger(nn.Module):
    """*block* neighbouring patches become one embedding."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.inner = config.hidden * config.block
        self.norm = nn.LayerNorm(config.hidden, eps=_EPS)
        self.linear_fc1 = ColumnLinear(self.inner, self.inner, bias=True)
        self.linear_fc2 = RowLinear(self.inner, config.width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).view(-1, self.inner)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))  # type: ignore[no-any-return]


class VisionEncoder(Node):
    """The patches of all pictures and groups of frames of a step in one sequence; each of them attends within itself.

    :param values: float32 ``[channels, 256]``: what a byte of each channel becomes
        (:meth:`mstar.processing.pictures.Patcher.values`).
    :param largest: patches of the largest picture, which is not cut.
    """

    tensor_parallel = True

    levels: Tensor
    inverse: Tensor

    def __init__(self, config: VisionConfig, values: npt.NDArray[np.float32], largest: int = 0):
        super().__init__()
        self.config, self._values, self.largest = config, values, largest
        self.patch_embed = _PatchEmbedding(config)
        self.pos_embed = nn.Embedding(config.side**2, config.hidden)
        blocks = [_Block(config) for _ in range(config.layers)]
        self._heads = max((block.attn.heads for block in blocks), default=0)
        self.blocks = nn.ModuleList(blocks)
        self.merger = _Merger(config)
        self.register_buffer("levels", torch.empty(values.size), persistent=False)
        self.register_buffer("inverse", torch.empty(config.head_dim // 4), persistent=False)

    def compute_buffers(self, device: torch.device) -> dict[str, Tensor]:
        """``levels``: float32 ``[channels * 256]``. ``inverse``: float32 ``[head_dim / 4]``, radians per row or
        column."""
        half = self.config.head_dim // 2
        steps = torch.arange(0, half, 2, dtype=torch.float32, device="cpu") / half
        inverse = 1.0 / (self.config.theta**steps)
        return {"levels": torch.from_numpy(self._values).flatten().to(device), "inverse": inverse.to(device)}

    def step_bytes(self, items: int, device: torch.device, dtype: torch.dtype) -> int:
        """A block's tensors at their most, those of attention: the stream twice, normed and projected; queries, keys
        and values, their rotation in float32, rounded, and filled up for the kernel."""
        config, size = self.config, dtype.itemsize
        filled = kernel_head_dim(config.head_dim, device)
        attention = self._heads * (config.head_dim * (5 * size + 8) + 4 * filled * size)
        return max(items, self.largest) * (4 * config.hidden * size + attention)

    def regions(self) -> Iterator[tuple[str, nn.Module]]:
        yield from ((f"blocks.{index}", block) for index, block in enumerate(self.blocks))

    def forward(self, step: Step, patches: Tensor, places: Tensor) -> dict[str, Tensor]:
        """Entry ``forward``: writes the embeddings into the step's media.

        :param patches: uint8 ``[P, values]``, in blocks that are merged. :param places: int32 ``[P, 4]``: row and
            column of each patch in its picture, and the picture's rows and columns.
        """
        step["media"].write(self.embed(patches, places, step["encoder_attention"]))
        return {}

    def embed(self, patches: Tensor, places: Tensor, attention: Any) -> Tensor:
        """Embeddings ``[P / block, width]``; see :meth:`forward`."""
        x = self.patch_embed(self._pixels(patches))
        x = x + self._positions(places).to(x.dtype)
        rotation = self._rotation(places)
        for block in self.blocks:
            x = block(x, rotation, attention)
        return self.merger(x)  # type: ignore[no-any-return]

    def _pixels(self, patches: Tensor) -> Tensor:
        """Normalised pixels ``[P, values]`` in the model's dtype."""
        each = self.config.values // self.config.channels
        channel = torch.arange(self.config.values, device=patches.device, dtype=torch.int32) // each * 256
        table = self.levels.to(self.patch_embed.proj.weight.dtype)
        index = patches.to(torch.int32) + channel
        return table.index_select(0, index.flatten()).view(patches.shape)

    def _positions(self, places: Tensor) -> Tensor:
        """The table of positions stretched over each picture, corners on corners, bilinear; float32 ``[P, hidden]``."""
        side = self.config.side
        at = places[:, :2].float() * (side - 1) / (places[:, 2:] - 1).clamp(min=1)
        low = at.floor()
        weight_high = at - low
        first = low.long().clamp(0, side - 1)
        second = (first + 1).clamp(max=side - 1)
        found: Tensor | None = None
        for row, row_weight in ((first[:, 0], 1 - weight_high[:, 0]), (second[:, 0], weight_high[:, 0])):
            for column, weight in ((first[:, 1], 1 - weight_high[:, 1]), (second[:, 1], weight_high[:, 1])):
                part = self.pos_embed(row * side + column) * (row_weight * weight)[:, None]
                found = part if found is None else found + part
        assert found is not None
        return found

    def _rotation(self, places: Tensor) -> Rotation:
        """A quarter of each head turns with the row, a quarter with the column, each with its other half."""
        angles = (places[:, :2, None].float() * self.inverse).flatten(1)
        cos, sin = angles.cos(), angles.sin()
        return Rotation(torch.cat((cos, cos), 1)[:, None], torch.cat((-sin, sin), 1)[:, None])

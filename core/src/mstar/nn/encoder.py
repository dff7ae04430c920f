"""A transformer encoder out of the decoder's layers: each token sees its whole input, before and after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mstar.nn import ops
from mstar.nn.decoder import DecoderStack
from mstar.nn.node import Step
from mstar.nn.rotary import Rotation

__all__ = ["EncoderStack"]


class _BothWays:
    """A ragged-attention view where the layers expect a KV cache's."""

    def __init__(self, view: Any):
        self._view = view

    def attend_heads(
        self, layer: int, heads: Tensor, q_heads: int, rotation: Rotation, norms: ops.HeadNorms | None
    ) -> Tensor:
        q, k, v = ops.rotate_store(heads, q_heads, rotation.cos, rotation.sin, norms, None, None, None)
        return self._view.attend(q, k, v)  # type: ignore[no-any-return]


class EncoderStack(DecoderStack):
    """Embedding, layers and final norm of an encoder with rotary positions; weights as :class:`DecoderStack`'s."""

    def encode(self, step: Step, x: Tensor, attention: Any) -> Tensor:
        """*x*: embedded items ``[N, hidden]``, packed as *step* says; overwritten. *attention*: the step's view of a
        ``ragged_attention`` resource. Returns ``[N, hidden]``, normalised."""
        place = torch.arange(x.shape[0], device=x.device)
        row = torch.bucketize(place, step.offsets[1:], right=True)  # on the device: nothing waits for lengths
        positions = place - step.offsets[row]
        return self.norm(self(x, positions, _BothWays(attention)))  # type: ignore[no-any-return]

"""The text encoder: what a language model thinks of a prompt, layer by layer.

Source: transformers 5.24, ``Qwen3Model`` with ``output_hidden_states``. The embedding counts as state 0; no state has
the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.config import DecoderConfig, read_config
from mstar.nn.decoder import DecoderLayer
from mstar.nn.linear import VocabEmbedding
from mstar.nn.node import Node, Step
from mstar.nn.rotary import Rotary, Rotation
from mstar.spec.errors import SetupError
from mstar.weights.names import WeightMap
from mstar_diffusion.dit.attention import attend
from mstar_diffusion.rows import row_by_row

__all__ = ["TextEncoder", "read_text_config", "text_weights"]


def read_text_config(weights: Path) -> DecoderConfig:
    """Of ``text_encoder/config.json`` below the folder *weights*."""
    return DecoderConfig.from_hf(read_config(weights / "text_encoder"))


class _Padded:
    """Where decoder layers expect a KV cache's view: causal attention within rows of one length, whose last tokens may
    be padding that nobody sees."""

    def __init__(self, rows: int, mask: Tensor):
        self._rows, self._mask = rows, mask

    def attend_heads(
        self, layer: int, heads: Tensor, q_heads: int, rotation: Rotation, norms: ops.HeadNorms | None
    ) -> Tensor:
        q, k, v = ops.rotate_store(heads, q_heads, rotation.cos, rotation.sin, norms, None, None, None)
        q, k, v = (x.reshape(self._rows, -1, *x.shape[1:]) for x in (q, k, v))
        return attend(q, k, v, mask=self._mask).flatten(0, 1)


class TextEncoder(Node):
    """The head of a decoder-only language model.

    :param states: which hidden states are wanted; they stand one after the other in the width. Layers behind the last
        are not built.
    """

    tensor_parallel = True

    def __init__(self, config: DecoderConfig, states: Sequence[int]):
        super().__init__()
        if max(states) > config.layers:
            raise SetupError(f"text_encoder/config.json: {config.layers} layers have no hidden state {max(states)}")
        config = replace(config, layers=max(states))
        self.states = tuple(states)
        self.embed_tokens = VocabEmbedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.layers))
        self.rotary = Rotary(config.head_dim, config.rope)

    def regions(self) -> Iterator[tuple[str, nn.Module]]:
        """Nothing is worth compiling: it runs once a picture."""
        yield from ()

    def forward(self, step: Step, ids: Tensor, length: Tensor) -> dict[str, Any]:
        """*ids* int64 ``[rows, T]``, of which the first *length* ``[rows]`` are the prompt's, the others padding.

        :returns: ``context`` ``[rows, T, states * hidden]``; of padding what it sees of the prompt.
        """
        return {"context": row_by_row(self.encode, ids, length).to(step.dtype)}

    def encode(self, ids: Tensor, length: Tensor) -> Tensor:
        rows, tokens = ids.shape
        places = torch.arange(tokens, device=ids.device)
        mask = (places[None] <= places[:, None])[None] & (places < length[:, None])[:, None]
        x = self.embed_tokens(ids.flatten())
        rotation = self.rotary(places.repeat(rows), x.dtype)
        if x.is_cpu:
            x = x.float()  # as mstar.nn.decoder.DecoderStack has its stream there
        view, delta, found = _Padded(rows, mask[:, None]), None, {}
        for number, layer in enumerate(self.layers, 1):
            delta = layer(x, delta, rotation, view)
            if number in self.states:
                found[number] = x.clone() if delta is None else x.clone().add_(ops.whole(delta, x))
        return torch.cat([found[state] for state in self.states], -1).view(rows, tokens, -1)


def text_weights(module: TextEncoder, config: DecoderConfig) -> WeightMap:
    """Names as transformers publishes them in the folder ``text_encoder``; layers that nobody asks for are left."""
    layers = "|".join(str(index) for index in range(len(module.layers), config.layers))
    spare = (rf"model\.layers\.({layers})\..*",) if layers else ()
    return WeightMap.from_module(
        module, {"": "model."}, ignore=(*spare, r"model\.norm\.weight", r"lm_head\.weight"), folder="text_encoder"
    )

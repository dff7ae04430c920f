"""The code predictor: within one step of the talker, the other codes of a frame, one after the other.

A small decoder that reads the talker's hidden state and the code of group 0, then each code that it has chosen. Its
keys and values live for the step alone: as many positions as there are groups, in one block of memory, so that all of
it is part of the talker's captured graph.

Reference: ``Qwen3TTSTalkerCodePredictorModelForConditionalGeneration`` of qwen_tts 0.1.1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.config import DecoderConfig
from mstar.nn.decoder import DecoderStack
from mstar.nn.linear import ColumnLinear, LMHead, VocabEmbedding
from mstar.nn.rotary import Rotation

__all__ = ["CodePredictor"]


class CodePredictor(nn.Module):
    """:param width: of the talker's hidden states and of all embeddings. :param groups: codes of a frame."""

    places: Tensor

    def __init__(self, config: DecoderConfig, width: int, groups: int):
        super().__init__()
        self.config, self.groups = config, groups
        self.model = DecoderStack(config)
        # The tables of all groups in one, group after group: a frame is looked up at once.
        self.model.embed_tokens = VocabEmbedding((groups - 1) * config.vocab, width)
        self.lm_head = nn.ModuleList(LMHead(config.hidden, config.vocab) for _ in range(groups - 1))
        self.small_to_mtp_projection = ColumnLinear(width, config.hidden, bias=True) if width != config.hidden else None
        self.register_buffer("places", self.compute_buffers(None)["places"], persistent=False)

    def compute_buffers(self, device: torch.device | None) -> dict[str, Tensor]:
        """``places``: int64 ``[groups - 1]``, where each group's table begins."""
        starts = torch.arange(self.groups - 1, device=device or torch.get_default_device())
        return {"places": starts * self.config.vocab}

    def embed(self, codes: Tensor) -> Tensor:
        """The sum of the embeddings of groups 1…: ``[N, width]`` of *codes* int64 ``[N, groups - 1]``, where a code
        below 0 adds nothing."""
        there = codes >= 0
        found = self.model.embed_tokens(codes.clamp(min=0) + self.places)
        total: Tensor = (found * there.unsqueeze(-1)).sum(1)
        return total

    def forward(self, hidden: Tensor, first: Tensor, sample: Callable[[Tensor], Tensor]) -> Tensor:
        """Choose the codes of groups 1….

        :param hidden: the talker's, normed ``[rows, width]``. :param first: the embedding of group 0's code, like it.
        :param sample: logits ``[rows, vocab]`` to codes int64 ``[rows]``; called once for each group.
        :returns: int64 ``[rows, groups - 1]``.
        """
        rows = hidden.shape[0]
        kv = _StepKV(self.config, rows, self.groups, hidden)
        x = torch.cat((hidden, first))
        codes: list[Tensor] = []
        for group, head in enumerate(self.lm_head):
            if self.small_to_mtp_projection is not None:
                x = self.small_to_mtp_projection(x)
            out = self.model(x, kv.advance(x.shape[0] // rows), kv)
            codes.append(sample(head(self.model.norm(out[-rows:]))))
            if group < len(self.lm_head) - 1:
                # a row without numbers has no code, and its request ends
                x = self.model.embed_tokens(codes[-1].clamp(min=0) + group * self.config.vocab)
        return torch.stack(codes, 1)


class _StepKV:
    """Keys and values of one step's rows, all layers: what :class:`~mstar.nn.decoder.Attention` takes for a view.

    Tokens are in order of position, then row.
    """

    def __init__(self, config: DecoderConfig, rows: int, positions: int, like: Tensor):
        self.rows, self.most, self.config = rows, positions, config
        width = config.kv_heads * config.head_dim
        self.memory = like.new_empty(config.layers, 2, rows * positions, width)
        self.starts = torch.arange(rows, device=like.device) * positions
        self.length = self.fresh = 0
        self.places = self.starts

    def advance(self, count: int) -> Tensor:
        """Go on by *count* tokens a row; their positions int64 ``[count * rows]``."""
        new = torch.arange(self.length, self.length + count, device=self.starts.device)
        self.length, self.fresh = self.length + count, count
        self.places = (new.unsqueeze(1) + self.starts).flatten()
        return new.unsqueeze(1).expand(count, self.rows).reshape(-1)

    def attend_heads(
        self, layer: int, heads: Tensor, q_heads: int, rotation: Rotation, norms: ops.HeadNorms | None
    ) -> Tensor:
        """*heads*: queries, keys and values ``[count * rows, heads, head_dim]``. Returns ``[count * rows, q_heads,
        head_dim]``."""
        keys, values = self.memory[layer]
        q, _, _ = ops.rotate_store(heads, q_heads, rotation.cos, rotation.sin, norms, keys, values, self.places)
        split = (self.fresh, self.rows, q_heads, self.config.head_dim)
        mixed = F.scaled_dot_product_attention(
            q.reshape(split).permute(1, 2, 0, 3),
            self._seen(keys),
            self._seen(values),
            is_causal=self.fresh > 1,
            enable_gqa=q_heads != self.config.kv_heads,
        )
        return mixed.permute(2, 0, 1, 3).reshape(-1, q_heads, self.config.head_dim)

    def _seen(self, pool: Tensor) -> Tensor:
        """``[rows, kv_heads, length, head_dim]`` of one layer."""
        shape = (self.rows, self.most, self.config.kv_heads, self.config.head_dim)
        return pool.view(shape)[:, : self.length].transpose(1, 2)

"""The talker: a decoder that reads text and frames together and writes one frame a step.

Reference: ``Qwen3TTSTalkerForConditionalGeneration`` of qwen_tts 0.1.1. There a step begins with the other codes of the
frame whose group 0 the step before chose; here a step ends with them, so that a frame leaves in the step that began it.
The order of operations on a request's numbers is the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.decoder import DecoderStack
from mstar.nn.linear import ColumnLinear, LMHead, RowLinear, VocabEmbedding
from mstar.nn.node import Node, Sampled, Step
from mstar.weights.names import Placement, WeightMap
from mstar_tts.qwen3_tts.code_predictor import CodePredictor
from mstar_tts.qwen3_tts.config import TTSConfig
from mstar_tts.qwen3_tts.prompt import VOICE

__all__ = ["Talker", "talker_weights"]


class TextProjection(nn.Module):
    """From the width of text embeddings to the talker's: ``fc2(silu(fc1(x)))``."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.linear_fc1 = ColumnLinear(width, width, bias=True)
        self.linear_fc2 = RowLinear(width, hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(x)))  # type: ignore[no-any-return]


class Talker(Node):
    """Views: ``kv``, ``positions``, ``sampler`` (group 0), ``subtalker`` (the others) and ``text``: the state that
    :meth:`prepare` writes and every step reads.

    :param queue: the longest text that may wait for its frames, in tokens. :param voiced: whether requests bring a
        voice of their own.
    """

    impossible: Tensor

    def __init__(self, config: TTSConfig, queue: int, voiced: bool):
        super().__init__()
        self.config, self.queue, self.voiced = config, queue, voiced
        self.model = DecoderStack(config.talker)
        self.text_embedding = VocabEmbedding(config.text_vocab, config.text_hidden)
        self.text_projection = TextProjection(config.text_hidden, config.talker.hidden)
        self.codec_head = LMHead(config.talker.hidden, config.talker.vocab)
        self.code_predictor = CodePredictor(config.predictor, config.talker.hidden, config.groups)
        self.register_buffer("impossible", self.compute_buffers(None)["impossible"], persistent=False)

    def compute_buffers(self, device: torch.device | None) -> dict[str, Tensor]:
        """``impossible``: bool ``[vocab]``: ids that are neither a code nor the end."""
        found = torch.zeros(self.config.talker.vocab, dtype=torch.bool, device=device or torch.get_default_device())
        found[list(self.config.suppressed)] = True
        found[self.config.codec.eos] = False
        return {"impossible": found}

    def prepare(self, step: Step, queue: Tensor, prompt_length: Tensor, voice: Tensor | None = None) -> dict[str, Any]:
        """Keep what the steps of a request need beside their rows.

        :param queue: int64, of all requests one after the other: text ids, one for each frame. :param prompt_length:
            int64 ``[rows]``. :param voice: ``[rows, hidden]``.
        """
        sizes = step.offsets.diff()
        at = torch.arange(self.queue, device=queue.device)
        places = torch.where(at < sizes.unsqueeze(1), step.offsets[:-1].unsqueeze(1) + at, queue.shape[0])
        step["text"].write("queue", F.pad(queue, (0, 1))[places])  # behind a row's own there are zeros
        step["text"].write("sizes", torch.stack((prompt_length, sizes), 1))
        if voice is not None:
            step["text"].write("voice", voice)
        return {}

    def forward(self, step: Step, rows: Tensor) -> dict[str, Any]:
        """*rows*: int64 ``[N, 1 + groups]``, text ids and codes (:mod:`mstar_tts.qwen3_tts.prompt`).

        :returns: `token` (the code of group 0, or the end), `frame` int64 ``[rows, groups]``, `next` int64 ``[rows, 1 +
            groups]``: the row that goes in next.
        """
        hidden = self._hidden(step, rows)
        logits = self.codec_head(hidden).masked_fill(self.impossible, -torch.inf)
        token = step["sampler"].sample(logits)
        first = token.ids.clamp(min=0)  # a row without numbers has no token, and its request ends
        sample = step["subtalker"].sample
        others = self.code_predictor(hidden, self.model.embed_tokens(first), lambda scores: sample(scores).ids)
        frame = torch.cat((first.unsqueeze(1), others.clamp(min=0)), 1)
        following = torch.cat((self._next_text(step).unsqueeze(1), frame), 1)
        return {"token": Sampled(token.ids, token.report), "frame": frame, "next": following}

    def _hidden(self, step: Step, rows: Tensor) -> Tensor:
        """The last hidden state of each request, normed ``[rows, hidden]``."""
        x = self.model(self.embed(step, rows), step["positions"].positions, step["kv"])
        return self.model.norm(x[step.last])  # type: ignore[no-any-return]

    def embed(self, step: Step, rows: Tensor) -> Tensor:
        """``[N, hidden]``."""
        text, first = rows[:, 0], rows[:, 1]
        x: Tensor = self.text_projection(self.text_embedding(text))
        codes = self.model.embed_tokens(first.clamp(min=0)) * (first >= 0).unsqueeze(1)
        x = x + (codes + self.code_predictor.embed(rows[:, 2:]))
        if self.voiced:
            voices = step["text"].read("voice")
            if rows.shape[0] != step.rows:
                at = torch.arange(rows.shape[0], device=rows.device)
                voices = voices[torch.searchsorted(step.offsets[1:], at, right=True)]
            x = torch.where((first == VOICE).unsqueeze(1), x + voices, x)
        return x

    def _next_text(self, step: Step) -> Tensor:
        """The text id that goes with each request's new frame, int64 ``[rows]``: the next of its queue, or the pad."""
        queue, sizes = step["text"].read("queue"), step["text"].read("sizes")
        made = step["positions"].positions[step.last] + 1 - sizes[:, 0]
        at = made.clamp(0, self.queue - 1).unsqueeze(1)
        return torch.where(made < sizes[:, 1], queue.gather(1, at).squeeze(1), self.config.tts_pad)


def talker_weights(talker: Talker, ignore: tuple[str, ...]) -> WeightMap:
    """*ignore*: published tensors of other nodes."""
    names = {
        "": "talker.",
        "text_embedding": "talker.model.text_embedding",
        "model.embed_tokens": "talker.model.codec_embedding",
    }
    found = WeightMap.from_module(talker, names, ignore)
    merged, vocab = "code_predictor.model.embed_tokens.weight", talker.config.predictor.vocab
    tables = (
        Placement(f"talker.code_predictor.model.codec_embedding.{group}.weight", merged, group * vocab, vocab)
        for group in range(talker.config.groups - 1)
    )
    kept = tuple(place for place in found.placements if place.target != merged)
    return WeightMap((*kept, *tables), found.ignore, found.float32, found.zeros)

"""Whisper's decoder: text of a window, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.linear import ColumnLinear, LMHead, MergedLinear, QKVLinear, RowLinear, VocabEmbedding
from mstar.nn.node import Node, Packed, Sampled, Step
from mstar.nn.norm import LayerNorm
from mstar_asr.whisper import alignment
from mstar_asr.whisper.config import WhisperConfig
from mstar_asr.whisper.request import AFTER_SOT, MAX_INITIAL, TIMESTAMPS
from mstar_asr.whisper.rules import Rules
from mstar_asr.whisper.tokens import WhisperTokens

__all__ = ["Decoder"]

Mix = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Self-attention of a layer: (layer, q, k, v), each ``[N, heads, head_dim]``."""
Look = Callable[[int, Tensor], Tensor]
"""Attention over the windows: (layer, q)."""


class _SelfAttention(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.qkv_proj = QKVLinear(hidden, heads, heads, hidden // heads, bias=("q_proj", "v_proj"))
        self.heads = self.qkv_proj.heads
        self.out_proj = RowLinear(hidden, hidden, bias=True, unit=hidden // heads)

    def beside(self, x: Tensor, normed: Tensor, layer: int, mix: Mix) -> Tensor | None:
        """Add to the stream *x*; see :class:`_Layer`."""
        q, k, v = self.qkv_proj(normed).view(x.shape[0], 3, self.heads, -1).unbind(1)
        return self.out_proj.add_to(x, mix(layer, q, k, v).flatten(1))


class _CrossAttention(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        head_dim = hidden // heads
        self.q_proj = ColumnLinear(hidden, hidden, bias=True, unit=head_dim)
        self.kv_proj = MergedLinear(hidden, {"k_proj": hidden, "v_proj": hidden}, bias=("v_proj",), unit=head_dim)
        self.heads = self.q_proj.out_features // head_dim
        self.out_proj = RowLinear(hidden, hidden, bias=True, unit=head_dim)

    def remember(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[N, heads, head_dim]`` of *memory* ``[N, hidden]``."""
        k, v = self.kv_proj(memory).view(memory.shape[0], 2, self.heads, -1).unbind(1)
        return k, v

    def beside(self, x: Tensor, normed: Tensor, layer: int, look: Look) -> Tensor | None:
        """Add to the stream *x*; see :class:`_Layer`."""
        q = self.q_proj(normed).view(x.shape[0], self.heads, -1)
        return self.out_proj.add_to(x, look(layer, q).flatten(1))


class _Layer(nn.Module):
    """Blocks beside the stream. What a block adds to it is handed on as *delta* and added within the next norm, or was
    added by its last product (:meth:`mstar.nn.linear.Linear.add_to`), and there is no *delta*."""

    def __init__(self, config: WhisperConfig, index: int):
        super().__init__()
        self.index = index
        self.self_attn_layer_norm = LayerNorm(config.hidden)
        self.self_attn = _SelfAttention(config.hidden, config.decoder_heads)
        self.encoder_attn_layer_norm = LayerNorm(config.hidden)
        self.encoder_attn = _CrossAttention(config.hidden, config.decoder_heads)
        self.final_layer_norm = LayerNorm(config.hidden)
        self.fc1 = ColumnLinear(config.hidden, config.decoder_ffn, bias=True)
        self.fc2 = RowLinear(config.decoder_ffn, config.hidden, bias=True)

    def forward(self, x: Tensor, delta: Tensor | None, mix: Mix, look: Look) -> Tensor | None:
        """*x*: the stream ``[N, hidden]``, changed in place."""
        delta = self.self_attn.beside(x, self.self_attn_layer_norm(x, delta), self.index, mix)
        delta = self.encoder_attn.beside(x, self.encoder_attn_layer_norm(x, delta), self.index, look)
        return self.fc2.add_to(x, F.gelu(self.fc1(self.final_layer_norm(x, delta))))


class Decoder(Node):
    """Entries: ``prime`` writes the memory's keys and values once, ``detect`` names the language, ``begin`` reads the
    prompt and gives the first token, ``forward`` the others, ``align`` tells when each was said."""

    tensor_parallel = True

    def __init__(self, config: WhisperConfig, tokens: WhisperTokens):
        super().__init__()
        self.config, self.tokens = config, tokens
        self.embed_tokens = VocabEmbedding(config.vocab, config.hidden)
        self.embed_positions = nn.Embedding(config.positions, config.hidden)
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(config.decoder_layers))
        self.layer_norm = LayerNorm(config.hidden)
        self.head = LMHead(config.hidden, config.vocab, tied=self.embed_tokens)
        self.rules = Rules(tokens)
        self.register_buffer("languages", torch.empty(len(tokens.languages), dtype=torch.int64), persistent=False)

    def compute_buffers(self, device: torch.device) -> dict[str, Tensor]:
        ids = list(self.tokens.languages.values())
        return {"languages": torch.tensor(ids, dtype=torch.int64, device=device)}

    # --- what all entries share ---------------------------------------------------------------------------------------
    def _run(self, ids: Tensor, positions: Tensor, mix: Mix, look: Look) -> Tensor:
        """The stream ``[N, hidden]`` of tokens *ids* ``[N]`` at *positions* ``[N]``."""
        x = self.embed_tokens(ids) + self.embed_positions(positions)
        delta: Tensor | None = None
        for layer in self.layers:
            delta = layer(x, delta, mix, look)
        return x if delta is None else x.add_(delta)  # type: ignore[no-any-return]

    def _step(self, step: Step, ids: Tensor) -> Tensor:
        kv, cross = step["kv"], step["cross"]
        return self._run(ids, step["positions"].positions, kv.attend, cross.attend)

    def _logits(self, x: Tensor) -> Tensor:
        """Of the stream's rows *x* ``[n, hidden]``: float32 ``[n, vocab]``, free to be changed."""
        return self.head(self.layer_norm(x)).float()  # type: ignore[no-any-return]

    def _sample(self, step: Step, logits: Tensor, facts: Tensor) -> Sampled:
        """Choose a token a row, and note it."""
        sampled: Sampled = step["sampler"].sample(logits)
        self.rules.note(step["answer"], facts, sampled.ids)
        return sampled

    # --- entries ------------------------------------------------------------------------------------------------------
    def prime(self, step: Step, memory: Tensor) -> dict[str, Tensor]:
        """*memory* ``[rows, 1500, hidden]``: every layer's keys and values of it."""
        lengths = [memory.shape[1]] * memory.shape[0]
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            step["cross"].write(layer.index, *layer.encoder_attn.remember(memory.flatten(0, 1)), lengths)
        return {}

    def detect(self, step: Step, sot: Tensor) -> dict[str, Tensor]:
        """*sot* ``[rows]``: the decoder on that token alone, which leaves no trace. Returns ``language``, the likeliest
        language's id ``[rows]``, and ``told``, id and probability, float32 ``[rows, 2]``."""
        logits = self._logits(self._step(step, sot)).index_select(1, self.languages)  # type: ignore[arg-type]
        probability, index = logits.softmax(1).max(1)
        language = self.languages[index]  # type: ignore[index]
        return {"language": language, "told": torch.stack((language.float(), probability), 1)}

    def begin(
        self,
        step: Step,
        ids: Tensor,
        rules: Tensor,
        language: Tensor | None = None,
    ) -> dict[str, Any]:
        """*ids* int64 ``[N]``: the prompts, one after the other. *rules* int64 ``[rows, 3]``, as
        :mod:`mstar_asr.whisper.request` says. *language* ``[rows]``: what was detected. Returns the first ``token`` and
        ``no_speech`` float32 ``[rows]``."""
        if language is not None:
            place = torch.arange(ids.shape[0], device=ids.device)
            row = torch.searchsorted(step.offsets, place, right=True) - 1
            ids = torch.where(ids < 0, language[row.clamp(max=step.rows - 1)], ids)
        x = self._step(step, ids)
        at_sot = (step.last - rules[:, AFTER_SOT]).clamp(min=0)
        logits, sot_logits = torch.split(self._logits(torch.cat((x[step.last], x[at_sot]))), step.rows)
        no_speech = sot_logits.softmax(1)[:, self.tokens.no_speech]
        facts = self.rules.first(logits, rules[:, TIMESTAMPS].bool(), rules[:, MAX_INITIAL])
        return {"token": self._sample(step, logits, facts), "no_speech": no_speech}

    def forward(self, step: Step, ids: Tensor) -> dict[str, Sampled]:
        """*ids* ``[rows]``: the token before. Returns the next ``token``."""
        logits, facts = self._logits(self._step(step, ids)), step["answer"].read("facts")
        self.rules.next(logits, facts)
        return {"token": self._sample(step, logits, facts)}

    def align(
        self, step: Step, prompt: Tensor, frames: list[Tensor], rules: Tensor, language: Tensor | None = None
    ) -> dict[str, Packed]:
        """When each text token was said, as :mod:`mstar_asr.whisper.request` says: one pass of the decoder over sot,
        language, task, notimestamps, text and eot. The host must know the text, so this is never captured.

        *prompt*: as the request has it, ``[N]``; *frames* int64 ``[1]`` a row; *rules* and *language* as for
        :meth:`begin`.
        """
        starts = self._starts(torch.split(prompt, list(step.lengths)), rules[:, AFTER_SOT].tolist(), language)
        rooms = [self.config.positions - len(start) - 1 for start in starts]
        texts = [text[:room] for text, room in zip(self._texts(step["answer"]), rooms, strict=True)]
        read = [[*start, *text, self.tokens.eot] for start, text in zip(starts, texts, strict=True)]
        x, weights = self._read_again(step, read, [int(count) // 2 for count in frames])
        logits = self._logits(x)
        aligned, probabilities, matrices, first = [], [], [], 0
        for start, text, ids, seen in zip(starts, texts, read, weights, strict=True):
            spoken = slice(first + len(start) - 1, first + len(start) - 1 + len(text))
            first += len(ids)
            if not text:
                continue
            said = torch.tensor(text, device=x.device)
            own = logits[spoken, : self.tokens.eot].softmax(1)
            probabilities.append(own.gather(1, said[:, None])[:, 0])
            aligned.append(torch.tensor([*text, self.tokens.eot], device=x.device))
            matrix = alignment.time_matrix(seen)[len(start) - 1 : -1]
            matrices.append(F.pad(matrix, (0, self.config.SOURCE_POSITIONS - matrix.shape[1])))
        lengths = [len(text) for text in texts]
        ends = [length + 1 if length else 0 for length in lengths]
        empty = x.new_empty(0, dtype=torch.float32)
        return {
            "aligned": Packed(torch.cat(aligned) if aligned else empty.long(), ends),
            "probability": Packed(torch.cat([empty, *probabilities]), lengths),
            "alignment": Packed(torch.cat([empty.new_empty(0, self.config.SOURCE_POSITIONS), *matrices]), ends),
        }

    def _starts(self, prompts: Sequence[Tensor], after_sot: Sequence[int], language: Tensor | None) -> list[list[int]]:
        """What stands before a text that is aligned: sot, language and task, notimestamps."""
        detected = [0] * len(prompts) if language is None else language.tolist()
        starts = []
        for prompt, after, found in zip(prompts, after_sot, detected, strict=True):
            ids = prompt[len(prompt) - 1 - after :].tolist()
            kept = [found if token < 0 else token for token in ids if token != self.tokens.no_timestamps]
            starts.append([*kept, self.tokens.no_timestamps])
        return starts

    def _texts(self, answer: Any) -> list[list[int]]:
        said, counts = answer.read("said").tolist(), Rules.count(answer.read("facts")).tolist()
        return [alignment.text_that_counts(ids[:count], self.tokens) for ids, count in zip(said, counts, strict=True)]

    def _read_again(
        self, step: Step, texts: Sequence[Sequence[int]], positions: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """The stream of *texts* one after the other, each by itself, and what the alignment heads look at in each: of
        the first so many *positions* of its memory ``[heads, tokens, positions]``."""
        lengths, device = [len(text) for text in texts], step.device
        tp = self.head.tp
        ids = torch.tensor([token for text in texts for token in text], device=device)
        places = torch.cat([torch.arange(length, device=device) for length in lengths])
        wanted = alignment.heads_by_layer(self.tokens, self.config.decoder_layers, self.config.decoder_heads)
        seen: list[list[Tensor]] = [[] for _ in texts]
        cross = step["cross"]

        def mix(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mixed: Tensor = step["again"].attend(q, k, v, causal=True, lengths=lengths)
            return mixed

        def look(layer: int, q: Tensor) -> Tensor:
            if layer in wanted:
                for row, (own, count) in enumerate(zip(torch.split(q, lengths), positions, strict=True)):
                    found = alignment.attention_weights(own, cross.keys(layer, row), wanted[layer], count, tp.rank)
                    seen[row].append(tp.all_reduce(found))
            mixed: Tensor = cross.attend(layer, q, lengths)
            return mixed

        x = self._run(ids, places, mix, look)
        return x, [torch.cat(weights) for weights in seen]

"""Random checkpoints at published shapes, in the published layout: config, shards with an index, tokenizer, template.

The weights have the scale of a trained model's at its start (normalised fan-in, residual branches scaled by depth), so
that activations, logits and the errors of bfloat16 have the size that they have in practice. The tokenizer has a text
for every id of the vocabulary, so that whatever such a model says is a stream of words.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from gpu.shapes import Shape
from mstar.testing.tiny_tokenizers import EOS, TEMPLATE, byte_level

__all__ = ["publish", "size_on_disk"]

SHARD_BYTES = 5 << 30
_WRITERS = 3


def publish(shape: Shape, folder: Path, device: str = "cpu", seed: int = 1, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write the checkpoint into *folder* unless it is there already, and return *folder*.

    What is written goes to a folder beside it first: a run that was stopped leaves no half of a checkpoint.
    """
    if (folder / "config.json").is_file():
        return folder
    draft = folder.with_name(folder.name + ".part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    _write_shards(shape, draft, device, seed, shard_bytes)
    _write_tokenizer(shape, draft)
    config = {**shape.config, "torch_dtype": "bfloat16"}
    (draft / "config.json").write_text(json.dumps(config, indent=2))
    draft.rename(folder)
    return folder


def size_on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """(published name, shape, mean, deviation) of every tensor, in the order of the model."""
    c = shape.facts
    branch = 1 / math.sqrt(2 * c.layers)
    yield "model.embed_tokens.weight", (c.vocab, c.hidden), 0.0, 1 / math.sqrt(c.hidden)
    for layer in range(c.layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (c.hidden,), 1.0, 0.1
        for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            yield at + f"self_attn.{name}_proj.weight", (heads * c.head_dim, c.hidden), 0.0, 1 / math.sqrt(c.hidden)
        if c.qk_norm:
            yield at + "self_attn.q_norm.weight", (c.head_dim,), 1.0, 0.1
            yield at + "self_attn.k_norm.weight", (c.head_dim,), 1.0, 0.1
        width = c.heads * c.head_dim
        yield at + "self_attn.o_proj.weight", (c.hidden, width), 0.0, branch / math.sqrt(width)
        yield at + "post_attention_layernorm.weight", (c.hidden,), 1.0, 0.1
        for name in ("gate", "up"):
            yield at + f"mlp.{name}_proj.weight", (c.intermediate, c.hidden), 0.0, 1 / math.sqrt(c.hidden)
        down = branch / math.sqrt(c.intermediate)
        yield at + "mlp.down_proj.weight", (c.hidden, c.intermediate), 0.0, 2 * down
    yield "model.norm.weight", (c.hidden,), 1.0, 0.1
    if not c.tied:
        yield "lm_head.weight", (c.vocab, c.hidden), 0.0, 1 / math.sqrt(c.hidden)


def _write_shards(shape: Shape, folder: Path, device: str, seed: int, shard_bytes: int) -> None:
    groups: list[list[tuple[str, tuple[int, ...], float, float]]] = [[]]
    size = total = 0
    for tensor in tensors(shape):
        nbytes = 2 * math.prod(tensor[1])
        if groups[-1] and size + nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size, total = size + nbytes, total + nbytes
    draw = torch.Generator(device).manual_seed(seed)
    names = [f"model-{n + 1:05}-of-{len(groups):05}.safetensors" for n in range(len(groups))]
    if len(groups) == 1:
        names = ["model.safetensors"]
    with ThreadPoolExecutor(_WRITERS) as writers:
        written = []
        for name, group in zip(names, groups, strict=True):
            shard = {key: _random(size_, mean, deviation, draw, device) for key, size_, mean, deviation in group}
            written.append(writers.submit(save_file, shard, folder / name, metadata={"format": "pt"}))
        for done in written:
            done.result()
    if len(groups) > 1:
        where = {tensor[0]: name for name, group in zip(names, groups, strict=True) for tensor in group}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _random(size: tuple[int, ...], mean: float, deviation: float, draw: torch.Generator, device: str) -> Tensor:
    made = torch.empty(size, dtype=torch.bfloat16, device=device)
    return made.normal_(mean, deviation, generator=draw).cpu()


def _write_tokenizer(shape: Shape, folder: Path) -> None:
    """A byte-level BPE tokenizer whose vocabulary is filled up with made-up words to that of *shape*.

    The words have no merges: a text's tokens are bytes and a few short pieces (about one token a letter), while every
    id decodes to text.
    """
    content = json.loads(byte_level().to_str())
    vocab: dict[str, int] = content["model"]["vocab"]
    for token in range(len(vocab), shape.facts.vocab):
        vocab.setdefault("Ġ" + _word(token), token)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _word(number: int) -> str:
    """A word of consonants and vowels in turn, another for every number, and of no other tokenizer's."""
    word = ""
    while number:
        number, digit = divmod(number, 100)
        word += "bcdfghjklmnpqrstvwxz"[digit % 20] + "aeiou"[digit // 20]
    return word + "x"

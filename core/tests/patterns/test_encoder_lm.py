"""The encoder-LM pattern: media in the prompt, whole, in chunks and beside requests without any."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import seeing
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mstar
from mstar.nn.config import DecoderConfig
from mstar.nn.model import BuildContext
from mstar.nn.node import Packed, Step
from mstar.patterns.encoder_lm import EncoderLMNode
from mstar.processing.tokenizer import TextTokenizer
from mstar.runtime.local import Local
from mstar.settings import Settings
from mstar.spec.check import faults
from mstar.spec.errors import RequestError
from mstar.spec.tasks import Image
from mstar.testing.tiny_tokenizers import byte_level

NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=byte_level().get_vocab_size(),
        hidden_size=seeing.HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=200,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.8 if parameter.dim() == 1 else 0.0, 0.25)
    model.save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


def start(folder: Path, **deployment: object) -> Local:
    return mstar.load("seeing", weights=str(folder), settings=Settings(extra_plugins=("seeing",)), **deployment)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Local]:
    with start(folder) as model:
        yield model


def picture(height: int, width: int) -> Image:
    return Image(np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3))


REQUESTS = [("Hello there", ()), ("what is it?", (picture(2, 3),)), ("and these", (picture(1, 2), picture(3, 3)))]


def reference(folder: Path, text: str, images: tuple[Image, ...]) -> list[int]:
    llama = LlamaForCausalLM.from_pretrained(folder).eval()
    tokenizer = TextTokenizer(folder)
    with torch.no_grad():
        embeds = llama.model.embed_tokens(torch.tensor(tokenizer.encode(text)))
        for image in reversed(images):
            patches = torch.from_numpy(image.pixels.reshape(-1, 3).astype(np.float32))
            embeds = torch.cat([seeing.look(patches), embeds])
        tokens: list[int] = []
        for _ in range(NEW):
            logits = llama(inputs_embeds=embeds[None]).logits[0, -1]
            tokens.append(int(logits.argmax()))
            embeds = torch.cat([embeds, llama.model.embed_tokens(torch.tensor(tokens[-1:]))])
    return tokens


def ask(model: Local, text: str, images: tuple[Image, ...]) -> list[int]:
    return list(model.generate(text, images, temperature=0.0, max_tokens=NEW, ignore_eos=True).tokens)


def test_graph_is_sound(folder: Path) -> None:
    family = seeing.Seeing(BuildContext(folder, torch.float32, torch.device("cpu")))
    assert list(faults(family.graph(), family.resources())) == []


@pytest.mark.parametrize(("text", "images"), REQUESTS)
def test_tokens_equal_the_reference(folder: Path, model: Local, text: str, images: tuple[Image, ...]) -> None:
    assert ask(model, text, images) == reference(folder, text, images)


def test_together_and_in_chunks_as_alone(folder: Path) -> None:
    want = [reference(folder, text, images) for text, images in REQUESTS]
    with start(folder, scheduler={"max_step_tokens": 4}) as model, ThreadPoolExecutor(len(REQUESTS)) as pool:
        assert list(pool.map(lambda request: ask(model, *request), REQUESTS)) == want


def test_placeholders_without_media_are_refused() -> None:
    config = DecoderConfig(16, 8, 1, 2, 2, 4, 8, 32)
    llm = EncoderLMNode(config, placeholder=7)
    offsets = torch.tensor([0, 3])
    step = Step([3], offsets, offsets[1:] - 1, [True], {}, torch.device("cpu"), torch.float32)
    with pytest.raises(RequestError, match="2 placeholders for 1 embeddings"):
        llm.embed(step, torch.tensor([7, 7, 1]), Packed(torch.zeros(1, 8), [1]))

"""Chats with pictures and videos against transformers, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from qwen35_seeing import greedy, inputs_of, reference

import mstar
from mstar.runtime.local import Local
from mstar.runtime.result import Result
from mstar.spec.tasks import Image, Message, Part, Text, Video
from mstar_qwen3 import tiny

NEW = 6


def picture(seed: int, height: int = 40, width: int = 56) -> Image:
    return Image(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def video(seed: int, frames: int = 9, fps: float = 3.0, height: int = 40, width: int = 24) -> Video:
    return Video(np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8), fps)


def user(*parts: Part | str) -> Message:
    return Message("user", tuple(Text(part) if isinstance(part, str) else part for part in parts))


CHATS: dict[str, list[Message]] = {
    "a picture": [user(picture(1), "What is it?")],
    "two pictures and a video": [user("Look: ", picture(2, 33, 70), "and", video(3), picture(4, 16, 16), "?")],
    "several turns": [
        user(picture(5), "this"),
        Message("assistant", (Text("A thing."),)),
        user("and", picture(5), picture(6, 90, 30), "these"),
    ],
    "videos": [user(video(7, 5, 0.5), video(8, 40, 20.0, 16, 48), "Which?")],
    "a frame": [user("one", video(9, 1, 1.0))],
    "text": [user("Hello there")],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_5")
    tiny.write(made)
    return made


def load(folder: Path, **options: object) -> Local:
    settings = {"resources": {"kv": {"tokens": 4096}}, "max_concurrent_requests": 4, **options}
    return mstar.load("qwen3_5_0.8b", weights=str(folder), device="cpu", **settings)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Local]:
    with load(folder) as found:
        yield found


def ask(model: Local, messages: Sequence[Message], **knobs: object) -> Result:
    return asyncio.run(collect(model, messages, **knobs))


async def collect(model: Local, messages: Sequence[Message], **knobs: object) -> Result:
    task = model._chat_task(
        messages, {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "enable_thinking": False, **knobs}
    )
    return await model._arun(model._collect(task))


@pytest.mark.parametrize("name", CHATS)
def test_greedy_tokens(folder: Path, model: Local, name: str) -> None:
    expected = greedy(folder, inputs_of(folder, CHATS[name]), NEW)
    assert list(ask(model, CHATS[name]).tokens) == expected


@pytest.mark.parametrize("name", [name for name in CHATS if name != "text"])
def test_prompts_and_positions(folder: Path, model: Local, name: str) -> None:
    inputs = inputs_of(folder, CHATS[name])
    expected, _ = reference(folder).model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        image_grid_thw=inputs.get("image_grid_thw"),
        video_grid_thw=inputs.get("video_grid_thw"),
    )
    processor = model._service.processor
    task = model._chat_task(CHATS[name], {"enable_thinking": False})
    assert processor.prompt_ids(task)[0] == inputs["input_ids"][0].tolist()
    request = processor.prepare(task, "r").request
    assert np.array_equal(request.inputs["positions"], expected[:, 0].numpy())


def test_many_at_once_are_each_alone(model: Local) -> None:
    async def all_at_once() -> list[Result]:
        return await asyncio.gather(*(collect(model, chat) for chat in CHATS.values()))

    alone = [ask(model, chat).tokens for chat in CHATS.values()]
    assert [result.tokens for result in asyncio.run(all_at_once())] == alone


@pytest.mark.parametrize("tokens", [7, 24])
def test_prompts_and_pictures_cut_into_steps_are_whole_ones(folder: Path, model: Local, tokens: int) -> None:
    with load(folder, scheduler={"max_step_tokens": tokens}) as cut:
        for chat in CHATS.values():
            assert ask(cut, chat).tokens == ask(model, chat).tokens


def test_embeddings_are_kept_by_content(folder: Path) -> None:
    with load(folder, resources={"kv": {"tokens": 4096, "prefix_cache": False}}) as model:
        first = ask(model, [user(picture(1), "What?")])
        steps = looks(model)
        again = ask(model, [user("Now", picture(1), "what?")])
        assert looks(model) == steps == 1
        other = ask(model, [user(picture(2), "What?")])
        assert looks(model) == 2
        assert len({first.tokens, again.tokens, other.tokens}) == 3
        assert model.status()["media"] == {"embeddings": 3 * 35, "hits": 35}


def test_embeddings_are_not_kept_if_the_operator_says_so(folder: Path) -> None:
    with load(folder, resources={"kv": {"tokens": 4096}, "media": {"cache": False}}) as model:
        for _ in range(2):
            ask(model, [user("Now", picture(1), "what?")])
        assert looks(model) == 2


def looks(model: Local) -> int:
    """Steps of the encoder so far."""
    entries = model.status()["entries"]
    return sum(entry["steps"] for entry in entries if entry["node"] == "encoder")


def test_a_known_prompt_is_not_computed_again_and_pictures_do_not_collide(folder: Path, model: Local) -> None:
    """Pictures of one size have equal placeholders: what is kept must go by what they show."""
    long = "Tell me what this picture shows, in a few words and without any haste."
    expected = {seed: greedy(folder, inputs_of(folder, [user(picture(seed), long)]), NEW) for seed in (24, 25)}
    assert expected[24] != expected[25]
    with load(folder, resources={"kv": {"tokens": 4096}}) as fresh:
        for seed in (24, 25) * 3:  # states of a prompt are kept once it has come again
            assert list(ask(fresh, [user(picture(seed), long)]).tokens) == expected[seed]
        assert fresh.status()["prefix"]["hits"] > 0


def test_samples_of_one_prompt(folder: Path, model: Local) -> None:
    chat = CHATS["two pictures and a video"]

    async def samples() -> list[Result]:
        return await asyncio.gather(*(collect(model, chat, temperature=1.0, seed=seed) for seed in range(4)))

    alone = [ask(model, chat, temperature=1.0, seed=seed).tokens for seed in range(4)]
    assert [result.tokens for result in asyncio.run(samples())] == alone


def test_reference_sees_the_pictures(folder: Path) -> None:
    """Else the comparisons above would compare text."""
    with torch.inference_mode():
        one, two = (greedy(folder, inputs_of(folder, [user(picture(seed), "What?")]), NEW) for seed in (1, 2))
    assert one != two

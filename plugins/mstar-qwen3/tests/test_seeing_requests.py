"""What becomes of requests with pictures and videos, and which are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.registry import Registry
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.knobs import read_options, validate_knobs
from mstar.spec.processor import ProcessorContext
from mstar.spec.tasks import Audio, ChatTask, GenerateTask, Image, Message, Part, Text, Video
from mstar_qwen3.processor import Qwen35Processor

PICTURE = Image(np.random.default_rng(1).integers(0, 256, (24, 40, 3), dtype=np.uint8))
CLIP = Video(np.random.default_rng(2).integers(0, 256, (12, 16, 24, 3), dtype=np.uint8), 4.0)


def processor(qwen3: Registry, folder: Path, key: str = "qwen3_5_2b", **options: Any) -> Qwen35Processor:
    spec = qwen3.model(key)
    return Qwen35Processor(ProcessorContext(spec, folder, read_options(spec.options, options)))


@pytest.fixture(scope="module")
def sees(qwen3: Registry, folders: dict[str, Path]) -> Qwen35Processor:
    return processor(qwen3, folders["whole"])


def chat(found: Qwen35Processor, *parts: Part, role: Any = "user", **knobs: Any) -> ChatTask:
    knobs = validate_knobs(found.context.spec.knobs, {"max_tokens": 4, **knobs})
    return ChatTask(knobs=knobs, messages=(Message("user", (Text("hello"),)), Message(role, parts)))


def refused(found: Qwen35Processor, *parts: Part, **more: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        found.prepare(chat(found, *parts, **more), "r")
    return caught.value


def test_a_picture_is_as_many_placeholders_as_it_has_embeddings(sees: Qwen35Processor) -> None:
    request = sees.prepare(chat(sees, Text("a"), PICTURE, Text("b")), "r").request
    inputs = request.inputs
    assert inputs["pieces"][:, :2].tolist() == [[60, 15]]
    assert inputs["patches"].shape == (60, 96)
    assert inputs["places"].shape == (60, 4)
    assert (inputs["prompt"] < 0).sum() == 15
    assert inputs["positions"].shape == (3, len(inputs["prompt"]))


def test_placeholders_are_the_contents(sees: Qwen35Processor) -> None:
    other = Image(PICTURE.pixels ^ 1)
    same = Image(PICTURE.pixels.copy())
    media = [sees.prepare(chat(sees, picture), "r").request.inputs["prompt"] for picture in (PICTURE, other, same)]
    first, second, third = ([token for token in prompt.tolist() if token < 0] for prompt in media)
    assert first == third
    assert not set(first) & set(second)
    assert len(set(first)) == 2


def test_tokens_that_are_shown_are_the_vocabularys(sees: Qwen35Processor) -> None:
    ids = sees.tokenize(chat(sees, PICTURE))
    assert min(ids) >= 0
    assert ids.count(sees.sizes.image_token) == 15


def test_words_that_spell_placeholders_are_text(sees: Qwen35Processor) -> None:
    ids = sees.tokenize(chat(sees, Text("<|vision_start|><|image_pad|><|vision_end|> <|video_pad|>"), PICTURE))
    assert ids.count(sees.sizes.image_token) == 15
    assert ids.count(sees.sizes.video_token) == 0


def test_frames_chosen_by_a_decoder_keep_their_times(sees: Qwen35Processor) -> None:
    chosen = Video(CLIP.frames[:3], 1.0, times=(0.0, 10.0, 31.0))
    text = sees.detokenize(sees.tokenize(chat(sees, chosen)))
    assert [text.count(f"<{time} seconds>") for time in ("5.0", "31.0")] == [1, 1]
    text = sees.detokenize(sees.tokenize(chat(sees, CLIP)))  # 3 s, six frames
    assert text.count(" seconds>") == 3


def test_samples_of_one_prompt_share_what_is_made_of_their_pictures(sees: Qwen35Processor) -> None:
    task = chat(sees, Image(PICTURE.pixels.copy()))
    twice = [sees.prepare(task, name).request.inputs["patches"] for name in ("a", "b")]
    assert twice[0] is twice[1]
    del task
    assert len(sees._shown) <= 1  # module-level PICTURE's may be there


def test_files_come_before_the_text_of_a_native_request(sees: Qwen35Processor) -> None:
    knobs = validate_knobs(sees.context.spec.knobs, {})
    task = GenerateTask(knobs=knobs, text="What?", parts=(PICTURE, CLIP, Text(" or ")))
    text = sees.detokenize(sees.prompt_ids(task)[0])
    order = [text.index(word) for word in ("<|image_pad|>", "<|video_pad|>", " or ", "What?")]
    assert order == sorted(order)


@pytest.mark.parametrize("part", [PICTURE, CLIP])
@pytest.mark.parametrize("how", ["text_only", "text checkpoint"])
def test_a_language_model_alone_refuses_pictures(
    qwen3: Registry, folders: dict[str, Path], part: Part, how: str
) -> None:
    blind = (
        processor(qwen3, folders["text"]) if how != "text_only" else processor(qwen3, folders["whole"], text_only=True)
    )
    error = refused(blind, Text("x"), part)
    assert (error.param, error.code) == ("messages[1].content[1]", "unsupported_modality")
    assert "reads text only" in error.message


def test_video_is_refused_by_the_newest(qwen3: Registry, folders: dict[str, Path]) -> None:
    newest = processor(qwen3, folders["whole"], "qwen3_8_27b")
    error = refused(newest, PICTURE, CLIP)
    assert (error.param, error.code) == ("messages[1].content[1]", "unsupported_modality")
    assert "it takes text, image" in error.message
    newest.prepare(chat(newest, PICTURE), "r")


def test_sound_is_refused(sees: Qwen35Processor) -> None:
    error = refused(sees, Audio(np.zeros(10, np.float32), 8000))
    assert "does not take audio; it takes text, image, video" in error.message


@pytest.mark.parametrize(
    ("part", "code"),
    [
        (Image(np.zeros((2, 500, 3), np.uint8)), "invalid_image"),
        (Video(np.zeros((4, 2000, 8, 3), np.uint8), 2.0), "invalid_video"),
    ],
)
def test_shapes_that_cannot_be_cut_are_refused_by_their_place(sees: Qwen35Processor, part: Part, code: str) -> None:
    error = refused(sees, Text("a"), PICTURE, part)
    assert (error.param, error.code, error.status) == ("messages[1].content[2]", code, 400)
    assert "more than 200 times" in error.message


def test_pictures_count_for_the_context(sees: Qwen35Processor) -> None:
    large = Image(np.zeros((64, 64, 3), np.uint8))
    error = refused(sees, *[large] * 40)
    assert (error.param, error.code) == ("messages", "context_length_exceeded")


def test_pictures_that_the_template_leaves_out_are_refused(sees: Qwen35Processor, monkeypatch: Any) -> None:
    render = sees.tokenizer.chat_template.render
    monkeypatch.setattr(sees.tokenizer.chat_template, "render", lambda messages, *a, **k: render(messages[:1], *a, **k))
    error = refused(sees, PICTURE)
    assert "does not show all pictures" in error.message
    assert error.param == "messages"


def test_preprocessors_must_fit_the_tower(qwen3: Registry, folders: dict[str, Path], tmp_path: Path) -> None:
    for file in folders["whole"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 8}')
    with pytest.raises(SetupError, match=r"patches of \(8, 2, 2\) .* are not the vision tower's \(4, 2, 2\)"):
        processor(qwen3, tmp_path)


def test_specs_say_what_they_see(qwen3: Registry) -> None:
    for key in ("qwen3_5_0.8b", "qwen3_5_2b", "qwen3_5_4b", "qwen3_5_9b", "qwen3_5_27b"):
        spec = qwen3.model(key)
        assert spec.inputs == ("text", "image", "video")
        assert dataclasses.astuple(spec.frames) == (2.0, 4, 768)
    assert qwen3.model("qwen3_8_27b").inputs == ("text", "image")

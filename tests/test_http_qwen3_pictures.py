"""Qwen3.5 with pictures and videos through a real server, by each route that takes them, against transformers."""

from __future__ import annotations

import base64
import importlib.metadata
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image as Pillow

from mstar.spec.tasks import Image, Message, Part, Text, Video

from .serving import Server, serving

MODULE = "mstar_qwen3.plugin"
EXTRA = () if importlib.metadata.entry_points(group="mstar.plugins", name="qwen3") else (MODULE,)
sys.path.append(str(Path(__file__).parents[1] / "plugins/mstar-qwen3/tests"))  # for seeing
NEW = 5
SAMPLING = {"temperature": 0, "max_tokens": NEW}
EXACT = {"enable_thinking": False, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mstar_qwen3.tiny import write

    made = tmp_path_factory.mktemp("qwen3_5")
    write(made)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(
        "qwen3_5_0.8b",
        extra_plugins=EXTRA,
        weights=str(folder),
        executor="inline",
        max_concurrent_requests=4,
        resources={"kv": {"tokens": 4096}},
        server_options={"max_video_pixels": 40_000, "max_pixels": 1_000_000},
    ) as running:
        yield running


def picture(seed: int = 1, height: int = 40, width: int = 56) -> Image:
    return Image(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(image: Image) -> bytes:
    out = io.BytesIO()
    Pillow.fromarray(image.pixels).save(out, "PNG")
    return out.getvalue()


def lossless(frames: np.ndarray, fps: int) -> bytes:
    """A video file that decodes to *frames* to the last bit."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as media:
        stream = media.add_stream("ffv1", rate=fps)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "bgr0"
        for pixels in frames:
            media.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        media.mux(stream.encode(None))
    return out.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


FRAMES = np.random.default_rng(5).integers(0, 256, (12, 30, 44, 3), dtype=np.uint8)
CLIP = lossless(FRAMES, 4)


def expected(folder: Path, *parts: Part) -> str:
    """What the reference says to *parts*."""
    from qwen35_seeing import greedy, inputs_of

    from mstar.processing.tokenizer import TextTokenizer

    return TextTokenizer(folder).decode(greedy(folder, inputs_of(folder, [Message("user", parts)]), NEW))


def chat(server: Server, *content: dict[str, Any], **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": list(content)}]
    return server.openai.chat.completions.create(
        model="qwen3_5_0.8b", messages=messages, **SAMPLING, extra_body=EXACT, **more
    )


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data)}}


def test_a_chat_with_a_picture_between_words(server: Server, folder: Path) -> None:
    said = chat(server, {"type": "text", "text": "See "}, image_part(png(picture())), {"type": "text", "text": "What?"})
    assert said.choices[0].message.content == expected(folder, Text("See "), picture(), Text("What?"))
    assert said.usage.prompt_tokens > 35


def test_a_chat_with_a_video_and_pictures_streamed(server: Server, folder: Path) -> None:
    content = (
        image_part(png(picture(2))),
        {"type": "video_url", "video_url": {"url": url(CLIP, "video/x-matroska")}},
        {"type": "text", "text": "Which?"},
        image_part(png(picture(3, 16, 20))),
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chat(server, *content, stream=True))
    assert said == expected(folder, picture(2), Video(FRAMES, 4.0), Text("Which?"), picture(3, 16, 20))


def test_every_choice_sees_the_picture(server: Server, folder: Path) -> None:
    said = chat(server, image_part(png(picture())), {"type": "text", "text": "What?"}, n=3)
    assert {choice.message.content for choice in said.choices} == {expected(folder, picture(), Text("What?"))}


def test_responses(server: Server, folder: Path) -> None:
    content: Any = [
        {"type": "input_text", "text": "See"},
        {"type": "input_image", "image_url": url(png(picture())), "detail": "auto"},
    ]
    said = server.openai.responses.create(
        model="qwen3_5_0.8b",
        input=[{"role": "user", "content": content}],
        temperature=0,
        max_output_tokens=NEW,
        extra_body=EXACT,
    )
    assert said.output_text == expected(folder, Text("See"), picture())


def test_generate(server: Server, folder: Path) -> None:
    answer = server.http.post(
        "/generate",
        data={"text": "What?", "model_kwargs": json.dumps({**SAMPLING, **EXACT})},
        files=[("files", ("a.png", png(picture()))), ("files", ("b.mkv", CLIP))],
    )
    assert answer.status_code == 200, answer.text
    text = "".join(piece["text"] for piece in answer.json()["outputs"]["text"])
    assert text == expected(folder, picture(), Video(FRAMES, 4.0), Text("What?"))


def test_a_video_sent_as_frames(server: Server, folder: Path) -> None:
    images = [base64.b64encode(png(Image(frame))).decode() for frame in FRAMES[:5]]
    said = chat(server, {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join(images)}})
    assert said.choices[0].message.content == expected(folder, Video(FRAMES[:5], 2.0))


def narrow() -> bytes:
    return png(Image(np.zeros((2, 900, 3), np.uint8)))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (image_part(narrow()), "more than 200 times"),
        (image_part(png(picture())[:300]), "damaged"),
        (image_part(b"hello"), "format"),
        (image_part(png(Image(np.zeros((1001, 1000, 3), np.uint8)))), "limit of 1000000 pixels"),
        (
            {
                "type": "video_url",
                "video_url": {"url": url(lossless(np.zeros((40, 64, 64, 3), np.uint8), 4), "video/mp4")},
            },
            "20 frames of 64x64 are more than the limit of 40000 pixels",
        ),
        ({"type": "video_url", "video_url": {"url": url(CLIP[:200], "video/mp4")}}, "video"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "does not take audio"),
        (image_part(b""), "messages[0].content[1]"),
    ],
)
def test_bad_media_are_refused_by_their_place(server: Server, part: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        chat(server, {"type": "text", "text": "Look"}, part)
    assert 400 <= caught.value.status_code < 500
    error: Any = caught.value.body
    assert "messages[0].content[1]" in error["param"]
    assert words in error["message"]


def test_a_picture_of_one_pixel_is_seen(server: Server, folder: Path) -> None:
    dot = picture(7, 1, 1)
    assert chat(server, image_part(png(dot))).choices[0].message.content == expected(folder, dot)


def test_too_many_pictures_for_the_context(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="context is 2048 tokens"):
        chat(server, *[image_part(png(picture(seed, 64, 64))) for seed in range(40)])


def test_what_pictures_cost_is_told(server: Server) -> None:
    chat(server, image_part(png(picture(77))), {"type": "text", "text": "What?"})
    chat(server, {"type": "text", "text": "Again"}, image_part(png(picture(77))))
    metrics = server.http.get("/metrics").text
    assert 'mstar_media_embeddings_total{model="qwen3_5_0.8b"}' in metrics
    hits = next(line for line in metrics.splitlines() if line.startswith("mstar_media_embedding_hits_total{"))
    assert float(hits.split()[-1]) >= 35


def test_nothing_is_left(server: Server) -> None:
    pools = server.pools()["qwen3_5_0.8b"]
    assert {name: pool["used"] for name, pool in pools.items()} == dict.fromkeys(pools, 0)

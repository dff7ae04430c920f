"""Pictures through a real server, asked as OpenAI's client asks."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from mstar.spec.canvas import Canvas, Sizes
from mstar.spec.errors import RequestError
from mstar.testing.miniatures.catalog import denoise_answer, latent_for
from mstar.testing.miniatures.common import encode
from mstar_server.openai.image_request import picture_size
from mstar_server.options import ServerOptions

from .serving import Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys = ("mini_denoise", "mini_chat")
    with serving(*keys, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def right(text: str, size: tuple[int, int], seed: int = 0, images: tuple[Any, ...] = (), steps: int = 4) -> np.ndarray:
    return denoise_answer(encode(text), [1], latent_for(text, size, seed, images), steps, 2.0)


def pixels(data: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")).astype(float)


def file(image: np.ndarray, format_: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, format_)
    return out.getvalue()


def painted(width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def post(server: Server, wrong: dict[str, Any]) -> Any:
    return server.http.post("/v1/images/generations", json={"model": "mini_denoise", "prompt": "abc", **wrong})


def test_pictures_have_seeds_of_their_own(client: openai.OpenAI, server: Server) -> None:
    reply = client.images.generate(model="mini_denoise", prompt="abc", n=3, size="6x4", extra_body={"seed": 5})
    assert (reply.size, reply.output_format, len(reply.data)) == ("6x4", "png", 3)
    for number, image in enumerate(reply.data):
        np.testing.assert_allclose(pixels(image.b64_json), right("abc", (6, 4), 5 + number), atol=1)
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.images) == (9, 0, 3)
    assert not any(pool["used"] for pool in server.pools()["mini_denoise"].values())


@pytest.mark.parametrize(("format_", "magic"), [("png", b"\x89PNG"), ("jpeg", b"\xff\xd8\xff"), ("webp", b"RIFF")])
def test_formats(client: openai.OpenAI, format_: Any, magic: bytes) -> None:
    more: dict[str, Any] = {} if format_ == "png" else {"output_compression": 80}
    reply = client.images.generate(model="mini_denoise", prompt="abc", output_format=format_, **more)
    assert base64.b64decode(reply.data[0].b64_json).startswith(magic)
    assert reply.output_format == format_


def test_a_stream_shows_the_picture_on_its_way(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "mini_denoise", "prompt": "abc", "size": "4x4", "extra_body": {"steps": 8}}
    events = list(client.images.generate(**ask, stream=True, partial_images=3))
    kinds = [event.type for event in events]
    assert kinds == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:3]] == [0, 1, 2]
    np.testing.assert_allclose(pixels(events[-1].b64_json), right("abc", (4, 4), steps=8), atol=1)
    shown = [pixels(event.b64_json) for event in events]
    assert all((one != other).any() for one, other in pairwise(shown))
    assert events[-1].usage.input_tokens == 3
    assert [event.type for event in client.images.generate(**ask, stream=True)] == ["image_generation.completed"]


def test_edits_see_every_picture(client: openai.OpenAI) -> None:
    images = (painted(8, 6), painted(4, 4, 1))
    reply = client.images.edit(
        model="mini_denoise", prompt="abc", image=[file(image) for image in images], extra_body={"seed": 3}
    )
    assert reply.size == "8x6"
    np.testing.assert_allclose(pixels(reply.data[0].b64_json), right("abc", (8, 6), 3, images), atol=1)


def test_an_edit_keeps_what_its_mask_covers(client: openai.OpenAI) -> None:
    image = painted(8, 6)
    opacity = np.zeros((6, 8), np.uint8)
    opacity[:, :4] = 255
    mask = file(np.dstack([image, opacity]))
    reply = client.images.edit(model="mini_denoise", prompt="abc", image=file(image), mask=mask)
    got = pixels(reply.data[0].b64_json)
    np.testing.assert_array_equal(got[:, :4], image[:, :4])
    np.testing.assert_allclose(got[:, 4:], right("abc", (8, 6), 0, (image,))[:, 4:], atol=1)


def test_edits_in_json(server: Server) -> None:
    image = painted(8, 6)
    url = "data:image/png;base64," + base64.b64encode(file(image)).decode()
    for body in ({"images": [{"image_url": url}]}, {"image": url}, {"images": [url], "size": "8x6"}):
        reply = server.http.post("/v1/images/edits", json={"model": "mini_denoise", "prompt": "abc", **body})
        assert reply.status_code == 200, reply.text
        np.testing.assert_allclose(
            pixels(reply.json()["data"][0]["b64_json"]), right("abc", (8, 6), 0, (image,)), atol=1
        )


def test_an_edit_can_be_streamed(client: openai.OpenAI) -> None:
    events = list(
        client.images.edit(model="mini_denoise", prompt="abc", image=file(painted(4, 4)), stream=True, partial_images=1)
    )
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"size": "100000x10000"}, "size"),
        ({"size": "0x0"}, "size"),
        ({"size": "big"}, "size"),
        ({"size": "5x4"}, "size"),
        ({"size": "-4x4"}, "size"),
        ({"size": "9" * 400 + "x4"}, "size"),
        ({"n": 0}, "n"),
        ({"n": 11}, "n"),
        ({"n": True}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"response_format": "url"}, "response_format"),
        ({"output_format": "gif"}, "output_format"),
        ({"output_compression": 50}, "output_compression"),
        ({"output_compression": 101, "output_format": "webp"}, "output_compression"),
        ({"partial_images": 2, "stream": False}, "partial_images"),
        ({"partial_images": 4, "stream": True}, "partial_images"),
        ({"quality": "hd"}, "quality"),
        ({"style": "vivid"}, "style"),
        ({"background": "transparent"}, "background"),
        ({"steps": 0}, "steps"),
        ({"steps": "4"}, "steps"),
        ({"step": 4}, "step"),
        ({"model": "mini_chat"}, "model"),
        ({"model": "mini_denoize"}, "model"),
    ],
)
def test_wrong_requests_name_the_field(server: Server, wrong: dict[str, Any], param: str) -> None:
    """Before anything is scheduled."""
    for stream in (False, True):
        reply = post(server, {"stream": stream, **wrong})
        assert 400 <= reply.status_code < 500, reply.text
        assert reply.json()["error"]["param"] == param, reply.text
    assert post(server, {}).status_code == 200


def test_a_size_off_the_grid_names_the_nearest(server: Server) -> None:
    assert "nearest valid value is 512x52" in post(server, {"size": "100000x10000"}).json()["error"]["message"]


def test_a_size_beyond_the_servers_limit_names_the_nearest_within() -> None:
    grid = Canvas(Sizes(multiple=16, min_side=64, max_side=8192))
    with pytest.raises(RequestError, match="limit of 50000 pixels; the nearest valid value is 224x208") as caught:
        picture_size("8192x8000", grid, ServerOptions(max_pixels=50_000))
    assert caught.value.param == "size"
    with pytest.raises(RequestError, match=r"limit of 50 pixels$"):  # there is none
        picture_size("64x64", grid, ServerOptions(max_pixels=50))


def test_what_no_model_here_takes_is_not_offered(server: Server) -> None:
    message = post(server, {"zzzzzz": 1}).json()["error"]["message"]
    assert "unknown parameter 'zzzzzz'; known: " in message
    assert {"prompt", "seed", "size", "steps"} <= set(message.partition("known: ")[2].split(", "))
    assert not {"complexity", "svg", "style"} & set(message.partition("known: ")[2].split(", "))


def bomb() -> bytes:
    """A PNG of a few bytes that declares 20,000x20,000."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("images", "mask", "more", "param"),
    [
        ([], None, {}, "image"),
        ([b"no image"], None, {}, "image"),
        ([file(painted(40, 40))[:-80]], None, {}, "image"),
        ([bomb()], None, {}, "image"),
        ([file(painted(4, 4))], bomb(), {}, "mask"),
        ([file(painted(4, 4))] * 5, None, {}, "image"),
        ([file(painted(4, 4))], file(painted(4, 4)), {}, "mask"),
        ([file(painted(4, 4))], file(np.zeros((4, 6, 4), np.uint8)), {}, "mask"),
        ([file(painted(4, 4))], None, {"n": "many"}, "n"),
        ([file(painted(4, 4))], None, {"steps": "0"}, "steps"),
        ([file(painted(4, 4))], None, {"stps": "3"}, "stps"),
        ([file(painted(4, 4))], None, {"input_fidelity": "high"}, "input_fidelity"),
        ([file(painted(4, 4))], None, {"prompt": " "}, "prompt"),
        ([file(painted(4, 4))], None, {"model": "mini_chat"}, "model"),
    ],
)
def test_wrong_edits_name_the_field(
    server: Server, images: list[bytes], mask: bytes | None, more: dict[str, str], param: str
) -> None:
    files = [("image", ("a.png", image)) for image in images]
    files += [] if mask is None else [("mask", ("m.png", mask))]
    data = {"model": "mini_denoise", "prompt": "abc", **more}
    reply = server.http.post("/v1/images/edits", data=data, files=files or [("x", ("x", b""))])
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == (param if files else "x"), reply.text
    alive = server.http.post(
        "/v1/images/edits", data={"model": "mini_denoise", "prompt": "abc"}, files=[("image[]", file(painted(4, 4)))]
    )
    assert alive.status_code == 200, alive.text


def test_as_many_pictures_as_the_model_takes(server: Server) -> None:
    """At the limit."""
    files = [("image[]", (f"{n}.png", file(painted(4, 4, n)))) for n in range(4)]
    reply = server.http.post("/v1/images/edits", data={"model": "mini_denoise", "prompt": "abc"}, files=files)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path", ["generations", "edits"])
def test_a_client_that_leaves_frees_everything(server: Server, path: str) -> None:
    url = "data:image/png;base64," + base64.b64encode(file(painted(4, 4))).decode()
    body = {"model": "mini_denoise", "prompt": "abc", "steps": 32, "stream": True, "partial_images": 3}
    body |= {"images": [{"image_url": url}]} if path == "edits" else {}
    with server.http.stream("POST", f"/v1/images/{path}", json=body) as reply:
        assert reply.status_code == 200
        next(reply.iter_raw(1))
    for name, usage in server.pools()["mini_denoise"].items():
        assert usage["used"] == 0, name


def test_native_lines_tell_progress(server: Server) -> None:
    body = {"model": "mini_denoise", "text": "abc", "streaming": True, "output_modalities": ["image", "progress"]}
    lines = [line for line in server.http.post("/generate", json=body).text.splitlines() if '"progress"' in line]
    assert len(lines) == 4
    assert '"step":4,"total":4' in lines[-1]

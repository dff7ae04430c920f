"""Z-Image and FLUX.2 [klein] through a real server, asked as OpenAI's client asks: diffusers' pictures, to a level."""

from __future__ import annotations

import base64
import importlib.metadata
import io
import threading
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from .serving import Server, serving

MODULE = "mstar_diffusion.plugin"
EXTRA = () if importlib.metadata.entry_points(group="mstar.plugins", name="diffusion") else (MODULE,)


@pytest.fixture(scope="module")
def z_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mstar_diffusion.z_image.tiny import write

    folder = tmp_path_factory.mktemp("z_image")
    write(folder)
    return folder


@pytest.fixture(scope="module")
def flux2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mstar_diffusion.flux2.tiny import write

    folder = tmp_path_factory.mktemp("flux2")
    write(folder)
    return folder


@pytest.fixture(scope="module")
def turbo(z_image: Path) -> Iterator[Server]:
    with serving("z_image_turbo", extra_plugins=EXTRA, weights=str(z_image), executor="inline") as running:
        yield running


@pytest.fixture(scope="module")
def klein(flux2: Path) -> Iterator[Server]:
    options = {"max_image_area": 320 * 320}
    with serving(
        "flux2_klein", extra_plugins=EXTRA, weights=str(flux2), executor="inline", model_kwargs=options
    ) as running:
        yield running


def reference(folder: Path, kind: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "z_image":
            from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline as Pipeline
        else:
            from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline as Pipeline
        pipe = Pipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def right(pipe: Any, prompt: str, seed: int, **more: Any) -> np.ndarray:
    (picture,) = pipe(prompt=prompt, generator=torch.Generator().manual_seed(seed), output_type="np", **more).images
    return np.round(picture * 255)


def pixels(data: str | None) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data or ""))).convert("RGB")).astype(float)


def painted(width: int, height: int, seed: int = 0) -> np.ndarray:
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def png(picture: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    return out.getvalue()


def test_words_to_pictures_z_image(turbo: Server, z_image: Path) -> None:
    """Two pictures with seeds of their own, and the model's own number of steps."""
    pipe = reference(z_image, "z_image")
    reply = turbo.openai.images.generate(
        model="z_image_turbo", prompt="a red cat", n=2, size="96x64", extra_body={"seed": 11}
    )
    assert (reply.size, len(reply.data or ())) == ("96x64", 2)
    for number, image in enumerate(reply.data or ()):
        want = right(pipe, "a red cat", 11 + number, width=96, height=64, num_inference_steps=8, guidance_scale=0.0)
        assert want.std() > 20
        np.testing.assert_allclose(pixels(image.b64_json), want, atol=1)


def test_guidance(turbo: Server, z_image: Path) -> None:
    pipe = reference(z_image, "z_image")
    asked = {"seed": 3, "num_inference_steps": 3, "guidance_scale": 2.5, "negative_prompt": "a dog, blurred"}
    reply = turbo.openai.images.generate(model="z_image_turbo", prompt="a red cat", size="64x80", extra_body=asked)
    more = {name: asked[name] for name in ("num_inference_steps", "guidance_scale", "negative_prompt")}
    want = right(pipe, "a red cat", 3, width=64, height=80, **more)
    np.testing.assert_allclose(pixels((reply.data or [])[0].b64_json), want, atol=1)
    assert np.abs(want - right(pipe, "a red cat", 3, width=64, height=80, **{**more, "guidance_scale": 0})).max() > 2


def test_words_to_pictures_klein(klein: Server, flux2: Path) -> None:
    pipe = reference(flux2, "flux2")
    reply = klein.openai.images.generate(
        model="flux2_klein", prompt="a red cat", size="64x96", extra_body={"seed": 2, "num_inference_steps": 4}
    )
    want = right(pipe, "a red cat", 2, width=64, height=96, num_inference_steps=4, text_encoder_out_layers=(1, 2, 3))
    np.testing.assert_allclose(pixels((reply.data or [])[0].b64_json), want, atol=1)


@pytest.mark.parametrize("sizes", [[(100, 90)], [(80, 64), (64, 130), (96, 96), (70, 64)]])
def test_edits(klein: Server, flux2: Path, sizes: list[tuple[int, int]]) -> None:
    """One reference to four, cut to the model's grid; the answer has the first one's size."""
    pipe = reference(flux2, "flux2")
    pictures = [painted(*size, seed=i) for i, size in enumerate(sizes)]
    reply = klein.openai.images.edit(
        model="flux2_klein",
        prompt="make it blue",
        image=[png(picture) for picture in pictures],
        extra_body={"seed": 5, "num_inference_steps": 2},
    )
    width, height = (side // 16 * 16 for side in sizes[0])
    assert reply.size == f"{width}x{height}"
    want = right(
        pipe,
        "make it blue",
        5,
        image=[Image.fromarray(picture) for picture in pictures],
        num_inference_steps=2,
        text_encoder_out_layers=(1, 2, 3),
    )
    np.testing.assert_allclose(pixels((reply.data or [])[0].b64_json), want, atol=1)


def test_an_edit_of_another_size(klein: Server, flux2: Path) -> None:
    pipe = reference(flux2, "flux2")
    picture = painted(80, 80)
    reply = klein.openai.images.edit(
        model="flux2_klein", prompt="x", image=png(picture), size="64x128",  # type: ignore[arg-type]
        extra_body={"seed": 5, "num_inference_steps": 1},
    )  # fmt: skip
    more = {"width": 64, "height": 128, "num_inference_steps": 1, "text_encoder_out_layers": (1, 2, 3)}
    want = right(pipe, "x", 5, image=Image.fromarray(picture), **more)
    np.testing.assert_allclose(pixels((reply.data or [])[0].b64_json), want, atol=1)


def test_a_size_that_nobody_asked_for_fits_the_server(klein: Server) -> None:
    body = {"model": "flux2_klein", "prompt": "a cat", "num_inference_steps": 1}
    made = klein.http.post("/v1/images/generations", json={**body, "size": "auto"})
    assert made.json()["size"] == "320x320"
    files = {"image": ("a.png", png(painted(640, 320)), "image/png")}
    edited = klein.http.post("/v1/images/edits", data={**body, "num_inference_steps": "1"}, files=files)
    assert edited.json()["size"] == "448x224"


def test_the_list_of_models_says_which_sizes_this_server_makes(klein: Server) -> None:
    (listed,) = klein.http.get("/v1/models").json()["data"]
    assert listed["canvas"]["sizes"]["max_pixels"] == 320 * 320
    assert listed["canvas"]["references"] == 4


def test_a_stream_shows_the_picture_on_its_way(klein: Server) -> None:
    ask: dict[str, Any] = {"model": "flux2_klein", "prompt": "a cat", "size": "320x64", "extra_body": {"seed": 1}}
    whole = klein.openai.images.generate(**ask)
    events = list(klein.openai.images.generate(**ask, stream=True, partial_images=3))
    assert [e.type for e in events] == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    assert events[-1].b64_json == (whole.data or [])[0].b64_json
    looks = [pixels(event.b64_json) for event in events]
    assert [look.shape for look in looks] == [(48, 256, 3)] * 3 + [(64, 320, 3)], "at most 256 pixels along a side"
    assert all((one != other).any() for one, other in pairwise(looks[:3]))


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"size": "100x64"}, "size", "96x64"),
        ({"size": "48x64"}, "size", "64x64"),
        ({"size": "400x400"}, "size", "320x320"),
        ({"size": "big"}, "size", "WIDTHxHEIGHT"),
        ({"num_inference_steps": 0}, "num_inference_steps", "1"),
        ({"num_inference_steps": 101}, "num_inference_steps", "100"),
        ({"seed": -1}, "seed", "0"),
        ({"guidance_scale": 3}, "guidance_scale", "unknown"),
        ({"size": "64x64", "width": 80}, "width", "size"),
        ({"prompt": "words " * 600}, "prompt", "512"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    klein: Server, wrong: dict[str, Any], param: str, words: str
) -> None:
    body = {"model": "flux2_klein", "prompt": "a cat", "size": "64x64", **wrong}
    reply = klein.http.post("/v1/images/generations", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("pictures", "words"), [([(32, 64)], "too small"), ([(64, 640)], "too long"), ([(64, 64)] * 5, "at most 4")]
)
def test_references_that_cannot_be_taken(klein: Server, pictures: list[tuple[int, int]], words: str) -> None:
    files = [("image[]", (f"{i}.png", png(painted(*size)), "image/png")) for i, size in enumerate(pictures)]
    reply = klein.http.post("/v1/images/edits", data={"model": "flux2_klein", "prompt": "a cat"}, files=files)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"].startswith("image")


def test_the_native_route_edits_too(klein: Server) -> None:
    picture = png(painted(64, 80))
    form = {"text": "make it blue", "model_kwargs": '{"seed": 5, "num_inference_steps": 2}'}
    reply = klein.http.post("/generate", data=form, files=[("files", ("a.png", picture, "image/png"))])
    assert reply.status_code == 200, reply.text
    edited = klein.openai.images.edit(
        model="flux2_klein", prompt="make it blue", image=picture, extra_body={"seed": 5, "num_inference_steps": 2}
    )
    np.testing.assert_array_equal(
        pixels(reply.json()["outputs"]["image"][0]["data"]), pixels((edited.data or [])[0].b64_json)
    )


def test_pictures_at_different_steps_share_the_denoiser(klein: Server) -> None:
    """Each is what it is alone, to the last bit, and nothing is left when all are done."""
    asked = [{"seed": i, "num_inference_steps": 1 + i % 4} for i in range(6)]
    ask: dict[str, Any] = {"model": "flux2_klein", "prompt": "a cat", "size": "64x64"}
    alone = [klein.openai.images.generate(**ask, extra_body=more) for more in asked]
    found: dict[int, Any] = {}

    def one(number: int) -> None:
        found[number] = klein.openai.images.generate(**ask, extra_body=asked[number])

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, reply in enumerate(alone):
        assert (found[number].data or [])[0].b64_json == (reply.data or [])[0].b64_json
    assert not any(pool["used"] for pool in klein.pools()["flux2_klein"].values())

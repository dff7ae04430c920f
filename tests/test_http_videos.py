"""Videos through a real server: jobs as OpenAI's client asks for them, and videos that are waited for."""

from __future__ import annotations

import base64
import io
import time
import warnings
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import openai
import pytest
from PIL import Image

from mstar.testing.miniatures.catalog import VIDEO_SIZE, picture_of, video_answer

from .serving import Server, serving

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys = ("mini_video", "mini_chat")
    with serving(*keys, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def seen_and_heard(data: bytes) -> tuple[np.ndarray, np.ndarray | None, float]:
    """Frames ``[frames, H, W, 3]``, sound ``[samples]`` and seconds of a file."""
    with av.open(io.BytesIO(data)) as file:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
        seconds = file.duration / 1e6
    with av.open(io.BytesIO(data)) as file:
        if not file.streams.audio:
            return frames, None, seconds
        sound = np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)])
    return frames, sound, seconds


def assert_right(data: bytes, text: str, frames: int, size: tuple[int, int] = VIDEO_SIZE, seed: int = 0) -> None:
    want = video_answer(picture_of(text, size, seed), frames)
    got, sound, seconds = seen_and_heard(data)
    assert got.shape == want["video"].shape
    assert abs(got.astype(float) - want["video"]).mean() < 6, "H.264 loses a little, mostly of colour"
    assert seconds == pytest.approx(frames / 8, abs=0.02)
    assert sound is not None
    power = np.abs(np.fft.rfft(sound[: frames * 1000]))
    assert np.argmax(power[1:]) + 1 == pytest.approx(200 * frames / 8, abs=2), "a sawtooth of 200 Hz"


def finished(client: openai.OpenAI, video_id: str, status: str = "completed") -> Any:
    deadline = time.monotonic() + 30
    while True:
        video = client.videos.retrieve(video_id)
        if video.status in ("completed", "failed"):
            assert video.status == status, video
            return video
        assert time.monotonic() < deadline, video
        time.sleep(0.02)


def test_the_life_of_a_job(client: openai.OpenAI, server: Server) -> None:
    begun = client.videos.create(model="mini_video", prompt="abc", seconds="2", size="32x16", extra_body={"seed": 3})  # type: ignore[arg-type]
    assert (begun.object, begun.model, begun.size) == ("video", "mini_video", "32x16")
    assert (begun.status, begun.seconds) in [("queued", "2"), ("in_progress", "2"), ("completed", "2.125")]
    video = finished(client, begun.id)
    assert (video.progress, video.seconds, video.size, video.error) == (100, "2.125", "32x16", None)
    assert video.created_at <= video.completed_at < video.expires_at
    assert_right(client.videos.download_content(video.id).read(), "abc", 17, (32, 16), 3)
    for variant, kind in (("thumbnail", "WEBP"), ("spritesheet", "JPEG")):
        picture = client.videos.download_content(video.id, variant=variant)  # type: ignore[arg-type]
        with Image.open(io.BytesIO(picture.read())) as image:
            assert image.format == kind
    assert video.id in [other.id for other in client.videos.list()]
    assert client.videos.delete(video.id).deleted
    for gone in (client.videos.retrieve, client.videos.download_content, client.videos.delete):
        with pytest.raises(openai.NotFoundError):
            gone(video.id)
    assert not any(pool["used"] for pool in server.pools()["mini_video"].values())


def test_a_picture_to_begin_with(client: openai.OpenAI, server: Server) -> None:
    image = np.zeros((16, 16, 3), np.uint8)
    image[:, 8:] = 96
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    video = client.videos.create(model="mini_video", prompt="abc", input_reference=("a.png", out.getvalue()))
    body = {"model": "mini_video", "prompt": "abc", "input_reference": {"image_url": url}}
    for video_id in (video.id, server.http.post("/v1/videos", json=body).json()["id"]):
        data = client.videos.download_content(finished(client, video_id).id).read()
        assert abs(seen_and_heard(data)[0][0].astype(float) - image).mean() < 6


def test_pages_of_jobs(client: openai.OpenAI) -> None:
    for video in client.videos.list():
        client.videos.delete(video.id)
    made = [client.videos.create(model="mini_video", prompt=f"clip {n}").id for n in range(5)]
    assert [video.id for video in client.videos.list(limit=2)] == made[::-1]  # the client asks for all pages
    assert [video.id for video in client.videos.list(limit=2, order="asc")] == made
    page = client.videos.list(limit=2, order="asc", after=made[1])
    assert ([video.id for video in page.data], page.has_more) == (made[2:4], True)
    for video_id in made:
        finished(client, video_id)
        client.videos.delete(video_id)
    assert list(client.videos.list()) == []


def test_a_running_job_is_cancelled_with_its_record(client: openai.OpenAI, server: Server) -> None:
    video = client.videos.create(model="mini_video", prompt="abc", size="256x256", extra_body={"frames": 33})  # type: ignore[arg-type]
    assert client.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)
    assert not any(pool["used"] for pool in server.pools()["mini_video"].values())


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"seconds": "0"}, "seconds"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": "-4"}, "seconds"),
        ({"seconds": "four"}, "seconds"),
        ({"seconds": "nan"}, "seconds"),
        ({"seconds": "60"}, "seconds"),
        ({"seconds": "1.4"}, "seconds"),
        ({"size": "17x16"}, "size"),
        ({"size": "big"}, "size"),
        ({"size": "100000x10000"}, "size"),
        ({"frames": 6}, "frames"),
        ({"frmes": 5}, "frmes"),
        ({"n": 2}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"model": "mini_chat"}, "model"),
        ({"input_reference": "data:image/png;base64,AAAA"}, "input_reference"),
        ({"input_reference": {"file_id": "file-1"}}, "input_reference.file_id"),
        ({"input_reference": "http://127.0.0.1/x.png"}, "input_reference"),
    ],
)
def test_wrong_requests_name_the_field(server: Server, wrong: dict[str, Any], param: str, stored: bool) -> None:
    """Nothing is begun, and nothing is kept."""
    body = {"model": "mini_video", "prompt": "abc", **wrong}
    before = server.http.get("/v1/videos").json()
    reply = server.http.post("/v1/videos" if stored else "/v1/videos/generations", json=body)
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.json()["error"]["param"] == param, reply.text
    assert server.http.get("/v1/videos").json() == before


def test_a_length_off_the_grid_names_its_neighbours(server: Server) -> None:
    reply = server.http.post("/v1/videos", json={"model": "mini_video", "prompt": "abc", "seconds": "1.4"})
    assert "lengths are 1.125 and 1.625" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/videos?limit=-1", 400),
        ("GET", "/v1/videos?limit=0", 400),
        ("GET", "/v1/videos?limit=101", 400),
        ("GET", "/v1/videos?order=up", 400),
        ("GET", "/v1/videos?after=video_nobody", 400),
        ("GET", "/v1/videos/video_nobody", 404),
        ("GET", "/v1/videos/video_nobody/content", 404),
        ("GET", "/v1/videos/..%2F..%2Fetc%2Fpasswd/content", 404),
        ("GET", "/v1/videos/%00/content", 404),
        ("DELETE", "/v1/videos/video_nobody", 404),
        ("POST", "/v1/videos/video_nobody/remix", 404),
    ],
)
def test_what_is_not_there(server: Server, method: str, path: str, status: int) -> None:
    reply = server.http.request(method, path)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["message"]


@pytest.fixture(scope="module")
def video_id(server: Server) -> str:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begun = client.videos.create(model="mini_video", prompt="to be read in pieces")
        return str(finished(client, begun.id).id)


def test_parts_of_a_file(server: Server, video_id: str) -> None:
    path = f"/v1/videos/{video_id}/content"
    whole = server.http.get(path).content
    part = server.http.get(path, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, whole[10:20])
    assert part.headers["content-type"] == "video/mp4"
    assert server.http.get(path, headers={"Range": f"bytes={len(whole) + 5}-"}).status_code == 416
    assert server.http.get(path + "?variant=poster").status_code == 400


@pytest.mark.parametrize("ranges", ["0-," * 9000 + "0-", "1-2," * 4000 + "5-6", "-" * 30000, "9" * 30000 + "-", "5-1"])
def test_pathological_ranges_take_no_time(server: Server, video_id: str, ranges: str) -> None:
    began = time.monotonic()
    reply = server.http.get(f"/v1/videos/{video_id}/content", headers={"Range": f"bytes={ranges}"})
    assert reply.status_code in (400, 416), reply.status_code
    assert time.monotonic() - began < 1.0


def test_remixes_are_refused(client: openai.OpenAI, video_id: str) -> None:
    with pytest.raises(openai.BadRequestError, match="remix"):
        client.videos.remix(video_id, prompt="again")


def test_a_video_that_is_waited_for(server: Server) -> None:
    ask = {"model": "mini_video", "prompt": "abc", "seconds": 1}
    reply = server.http.post("/v1/videos/generations", json=ask).json()
    assert (reply["seconds"], reply["size"]) == ("1.125", "16x16")
    assert_right(base64.b64decode(reply["data"][0]["b64_json"]), "abc", 9)
    bare = server.http.post("/v1/videos/generations", json={**ask, "response_format": "mp4"})
    assert bare.headers["content-type"] == "video/mp4"
    assert_right(bare.content, "abc", 9)
    url = server.http.post("/v1/videos/generations", json={**ask, "response_format": "url"})
    assert (url.status_code, url.json()["error"]["param"]) == (400, "response_format")


def test_a_form_says_the_same(server: Server) -> None:
    ask = {"model": "mini_video", "prompt": "abc", "seconds": "1", "seed": "2", "response_format": "mp4"}
    reply = server.http.post("/v1/videos/generations", data=ask)
    assert_right(reply.content, "abc", 9, seed=2)

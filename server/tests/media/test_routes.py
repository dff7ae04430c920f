"""Media through the routes: chat parts, native uploads, limits, and clients that leave."""

from __future__ import annotations

import asyncio
import base64
import io

import httpx
import numpy as np
import psutil
import pytest
from media_files import PIXELS, av_file, image_file, png_that_claims, sound_file, tone, video_file
from PIL import Image as Pillow

from mstar.spec.tasks import Audio, File, Image, Text, Video
from mstar_server.media.limits import Sampling
from mstar_server.openai.chat_adapter import ChatAdapter

BAD = "invalid_value"
UNKNOWN = "unknown_parameter"
JPEG, HUGE = image_file("JPEG"), png_that_claims(20_000, 20_000)
CHAT = "/v1/chat/completions"
SEES = {"inputs": ("text", "image", "audio", "video")}


def base64_of(data):
    return base64.b64encode(data).decode()


def data_url(data, media_type="application/octet-stream"):
    return f"data:{media_type};base64,{base64_of(data)}"


async def ask(client, *parts):
    return await client.post(CHAT, json={"model": "tiny", "messages": [{"role": "user", "content": list(parts)}]})


async def test_every_kind_of_part_arrives_decoded_in_its_place(kit):
    service = kit.Service(kit.HELLO, **SEES)
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": data_url(image_file("PNG")), "detail": "high", "format": None}},
        {"type": "input_audio", "input_audio": {"data": base64_of(av_file("mp3")), "format": "mp3"}},
        {"type": "audio_url", "audio_url": {"url": data_url(av_file("m4a"), "audio/mp4")}},
        {"type": "video_url", "video_url": {"url": data_url(video_file(), "video/mp4"), "fps": 5, "max_frames": 4}},
        {"type": "video_url", "video_url": data_url(JPEG, "video/jpeg") + "," + base64_of(JPEG)},
        {"type": "file", "file": {"file_data": base64_of(image_file("PNG")), "filename": "x.png"}},
        {"type": "file", "file": {"file_data": data_url(video_file(), "video/mp4")}},
        {"type": "text", "text": "b"},
    ]  # fmt: skip
    async with kit.client(service) as client:
        reply = await ask(client, *parts)
    assert reply.status_code == 200, reply.text
    content = service.tasks[0].messages[0].content
    assert [type(part) for part in content] == [Text, Image, Audio, Audio, Video, Video, Image, Video, Text]
    assert content[1].pixels.tolist() == PIXELS.tolist()
    assert len(content[4].frames) == 4
    assert content[4].audio.rate == 16_000
    assert content[5].frames.shape == (2, 5, 7, 3)
    assert content[7].fps == 2


@pytest.mark.parametrize(
    ("part", "param", "status", "code"),
    [
        ({"type": "image_url", "image_url": data_url(HUGE)}, "image_url", 400, "image_too_large"),
        ({"type": "image_url", "image_url": "https://example.com/a.png"}, "image_url", 400, "url_not_allowed"),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, "image_url", 400, "url_not_allowed"),
        ({"type": "image_url"}, "image_url", 400, "invalid_value"),
        ({"type": "video_url", "video_url": {"url": ["data:,"]}}, "video_url", 400, "invalid_value"),
        ({"type": "video_url", "video_url": {"url": "data:,", "fps": 0}}, "video_url.fps", 400, "invalid_value"),
        ({"type": "video_url", "video_url": {"url": "", "max_frames": 0}}, "video_url.max_frames", 400, BAD),
        ({"type": "video_url", "video_url": "data:video/jpeg;base64,AAAA"}, "video_url", 400, "invalid_image"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "input_audio.data", 415, "unsupported_media_type"),
        ({"type": "file", "file": {"file_data": base64_of(b"%PDF-1.7")}}, "file", 400, "unsupported_file"),
        ({"type": "file", "file": {"file_data": base64_of(b"x,y")}}, "file", 400, "unsupported_file"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "file.file_id", 400, "unsupported_parameter"),
        ({"type": "file", "file": {}}, "file.file_data", 400, "invalid_value"),
        ({"type": "video_url", "video_url": {"url": "", "max_frame": 8}}, "video_url.max_frame", 400, UNKNOWN),
        ({"type": "image_url", "image_url": {"url": "", "fps": 8}}, "image_url.fps", 400, UNKNOWN),
        ({"type": "input_audio", "input_audio": {"data": "", "rate": 8}}, "input_audio.rate", 400, UNKNOWN),
    ],
)  # fmt: skip
async def test_a_bad_part_is_named(kit, part, param, status, code):
    async with kit.client(kit.Service(kit.HELLO, **SEES)) as client:
        reply = await ask(client, {"type": "text", "text": "x"}, part)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (status, code, f"messages[0].content[1].{param}")


@pytest.mark.parametrize(
    ("sent", "data", "said"),
    [
        ("image_url", video_file(), "an MP4 file, not an image; send it as 'video_url' or 'audio_url'"),
        ("video_url", image_file("PNG"), "a PNG file, not a video; send it as 'image_url'"),
        ("audio_url", image_file("PNG"), "a PNG file, not an audio; send it as 'image_url'"),
        ("video_url", sound_file(tone(1, 8000), 8000), "a WAV file, not a video; send it as 'audio_url'"),
    ],
)
async def test_a_file_of_another_kind_is_told_where_it_belongs(kit, sent, data, said):
    async with kit.client(kit.Service(kit.HELLO, **SEES)) as client:
        reply = await ask(client, {"type": "text", "text": "x"}, {"type": sent, sent: data_url(data)})
    error, param = reply.json()["error"], f"messages[0].content[1].{sent}"
    assert (reply.status_code, error["code"], error["param"]) == (400, "wrong_media_kind", param)
    assert error["message"] == f"'{param}': the file is {said}"


async def test_the_right_part_is_not_named_to_a_model_that_does_not_take_it(kit):
    async with kit.client(kit.Service(kit.HELLO, inputs=("text", "image"))) as client:
        reply = await ask(client, {"type": "image_url", "image_url": data_url(video_file())})
    assert reply.json()["error"]["message"].endswith("an MP4 file, not an image")


async def test_what_the_model_does_not_take_is_refused_before_it_is_decoded(kit):
    service = kit.Service(kit.HELLO, inputs=("text", "audio"))
    async with kit.client(service) as client:
        for part in (
            {"type": "image_url", "image_url": data_url(image_file("PNG"))},
            {"type": "file", "file": {"file_data": base64_of(image_file("PNG"))}},
        ):
            reply = await ask(client, part)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_modality")
        assert client._transport.app.state.mstar.media.pool.pids == []
        video = await ask(client, {"type": "file", "file": {"file_data": base64_of(video_file())}})
        assert (video.status_code, video.json()["error"]["code"]) == (400, "unsupported_modality")


async def test_as_many_files_as_allowed_and_not_one_more(kit):
    image = {"type": "image_url", "image_url": data_url(image_file("PNG"))}
    service = kit.Service(kit.HELLO)
    async with kit.client(service, max_files=3) as client:
        assert (await ask(client, *[image] * 3)).status_code == 200
        reply = await ask(client, *[image] * 4)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "too_many_files")
    assert len(service.tasks[0].messages[0].content) == 3


class Wishing(ChatAdapter):
    sampling = Sampling(fps=10, max_frames=7)


async def test_an_adapter_says_which_frames_its_model_wants(kit):
    service = kit.Service(kit.HELLO, **SEES)
    async with kit.client(service) as client:
        client._transport.app.state.mstar._adapters["tiny"]["chat"] = Wishing(service.spec, _options(client))
        assert (await ask(client, {"type": "video_url", "video_url": data_url(video_file())})).status_code == 200
    assert len(service.tasks[0].messages[0].content[0].frames) == 7


def _options(client):
    return client._transport.app.state.mstar.options


async def test_uploads_are_decoded_and_large_ones_are_not_read_into_memory(kit):
    service = kit.Service(kit.HELLO, **SEES)
    long = sound_file(tone(120, 16_000), 16_000)  # 3.8 MB: spooled to disk
    async with kit.client(service) as client:
        files = [("files", ("a.wav", long)), ("files", ("b.mp4", video_file())), ("files", ("c.csv", b"x,y"))]
        reply = await client.post("/generate", data={"text": "x"}, files=files)
        assert reply.status_code == 200, reply.text
        refused = await client.post(
            "/generate", data={"text": "x"}, files=[("files", ("a.png", png_that_claims(20_000, 20_000)))]
        )
        assert refused.json()["error"]["param"] == "files[0]"
    audio, video, other = service.tasks[0].parts
    assert (len(audio.samples), audio.rate) == (120 * 16_000, 16_000)
    assert np.abs(audio.samples).max() == pytest.approx(0.5, abs=1e-3)
    assert (len(video.frames), video.audio.rate) == (4, 16_000)
    assert other == File(b"x,y", "c.csv", "text/csv")


async def test_an_upload_over_the_cap_is_a_413_while_memory_stays(kit):

    async def zeros(megabytes):
        yield b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
        for _ in range(megabytes):
            yield bytes(1 << 20)
        yield b"\r\n--x--\r\n"

    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    async with kit.client(kit.Service(kit.HELLO), max_body_bytes=300 << 20, max_file_bytes=150 << 20) as client:
        before = psutil.Process().memory_info().rss
        for size, limit in ((400, 300 << 20), (200, 150 << 20)):
            reply = await client.post("/generate", content=zeros(size), headers=kind)
            assert reply.status_code == 413
            assert str(limit) in reply.json()["error"]["message"]
        assert psutil.Process().memory_info().rss - before < 60 << 20


async def test_a_client_that_leaves_gives_its_decoder_back(kit):
    service = kit.Service(kit.HELLO)
    body = b'{"text": "x", "files": [{"data": "' + base64.b64encode(_slow_png()) + b'"}]}'
    async with kit.server(service, media_processes=1) as address:
        host, port = address.split(":")
        for _ in range(3):
            _, writer = await asyncio.open_connection(host, int(port))
            head = (
                f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            )
            writer.write(head.encode() + b"\r\n\r\n" + body)
            await writer.drain()
            await asyncio.sleep(0.1)
            await kit.leave(writer)
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=30) as client:
            reply = await client.post(
                "/generate", json={"text": "x", "files": [{"data": base64_of(image_file("PNG"))}]}
            )
        assert reply.status_code == 200
        children = [p for p in psutil.Process().children() if "media.child" in " ".join(p.cmdline())]
        assert len(children) == 1
    assert not any(psutil.pid_exists(child.pid) and child.status() != "zombie" for child in children)


def _slow_png():
    out = io.BytesIO()
    Pillow.new("RGB", (7000, 7000)).save(out, "PNG", compress_level=1)
    return out.getvalue()

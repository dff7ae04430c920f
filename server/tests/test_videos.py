"""Video jobs without an engine: their books, their ends, and who may see them."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import time

import av
import numpy as np
import pytest

from mstar.spec.errors import RequestError, SetupError, TooBusy
from mstar.spec.processor import AudioDelta, FramesDelta, ProgressDelta
from mstar_server import exchange
from mstar_server.media.encode.clip import ClipWriter
from mstar_server.videos.store import Room, VideoRecord, VideoStore

URL = "/v1/videos"
FRAMES = FramesDelta(np.full((2, 16, 32, 3), 96, np.uint8), 8, "video")
SOUND = AudioDelta(np.zeros(2000, np.float32), 8000)
SPEC = {"abilities": ("video",), "outputs": ("video", "audio", "progress")}


def body(**more):
    return {"model": "tiny", "prompt": "a bird", **more}


async def until(client, video_id, condition):
    """The job's object when *condition* holds of it."""
    async with asyncio.timeout(20):
        while not condition(video := (await client.get(f"{URL}/{video_id}")).json()):
            await asyncio.sleep(0.01)
    return video


async def ended(client, video_id):
    return await until(client, video_id, lambda video: video["status"] in ("completed", "failed"))


async def test_a_job_tells_how_far_it_is(kit):
    going = asyncio.Event()
    service = kit.Service((ProgressDelta(1, 4), ProgressDelta(3, 4), FRAMES, SOUND, going), **SPEC)
    async with kit.client(service) as client:
        video = (await client.post(URL, json=body(seed=3, size="32x16"))).json()
        now = await until(client, video["id"], lambda video: video["progress"] == 75)
        assert (now["status"], now["progress"], now["size"], now["seconds"]) == ("in_progress", 75, "32x16", "auto")
        early = await client.get(f"{URL}/{video['id']}/content")
        assert (early.status_code, early.json()["error"]["code"]) == (400, "video_not_completed")
        going.set()
        done = await ended(client, video["id"])
        assert (done["status"], done["progress"], done["seconds"]) == ("completed", 100, "0.25")
        data = (await client.get(f"{URL}/{video['id']}/content")).content
    with av.open(io.BytesIO(data)) as file:
        assert [stream.type for stream in file.streams] == ["video", "audio"]
        assert sum(1 for _ in file.decode(video=0)) == 2
    (task,) = service.tasks
    assert (task.prompt, task.size, task.knobs.seed, task.want) == ("a bird", (32, 16), 3, SPEC["outputs"])


async def test_a_job_that_fails_says_why(kit):
    wrong = RequestError("the prompt is not allowed", code="refused")
    for script, code in (
        ((FRAMES, wrong), "refused"),
        ((), "internal_error"),
        ((FRAMES, ValueError("x")), "internal_error"),
    ):
        async with kit.client(kit.Service(script, **SPEC)) as client:
            video = (await client.post(URL, json=body())).json()
            failed = await ended(client, video["id"])
            assert (failed["status"], failed["error"]["code"]) == ("failed", code)
            assert failed["completed_at"] is None
            assert failed["expires_at"] > failed["created_at"]
            assert (await client.get(f"{URL}/{video['id']}/content")).status_code == 400


async def test_a_full_queue_is_no_job(kit):
    service = kit.Service((TooBusy("the queue is full"),), **SPEC)
    async with kit.client(service) as client:
        reply = await client.post(URL, json=body())
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")
        assert (await client.get(URL)).json()["data"] == []


async def test_jobs_that_run_are_bounded(kit):
    service = kit.Service((asyncio.Event(),), **SPEC)
    async with kit.client(service, max_running_videos=2) as client:
        kept = [(await client.post(URL, json=body())).json()["id"] for _ in range(2)]
        assert (await client.post(URL, json=body())).status_code == 429
        assert (await client.delete(f"{URL}/{kept[0]}")).json() == {
            "id": kept[0],
            "object": "video.deleted",
            "deleted": True,
        }
        assert service.answers[0].reason == "cancelled"
        assert (await client.post(URL, json=body())).status_code == 200


async def test_a_server_that_stops_leaves_books(kit, tmp_path):
    service = kit.Service(lambda n: (FRAMES,) if n == 0 else (FRAMES, asyncio.Event()), **SPEC)
    async with kit.client(service, state_dir=tmp_path) as client:
        whole, part = [(await client.post(URL, json=body())).json()["id"] for _ in range(2)]
        await ended(client, whole)
        with pytest.raises(SetupError, match="another server uses it"):
            VideoStore(tmp_path / "videos", Room(), Room(), 1)
    assert service.answers[1].reason == "cancelled"
    async with kit.client(service, state_dir=tmp_path) as client:
        assert (await ended(client, whole))["status"] == "completed"
        failed = await ended(client, part)
        assert (failed["status"], failed["error"]["message"]) == ("failed", "the server was stopped")
        assert (await client.get(f"{URL}/{whole}/content")).status_code == 200
    assert len([file for file in (tmp_path / "videos").iterdir() if file.name.startswith("video_")]) == 3


async def test_a_server_that_died_leaves_failed_jobs(tmp_path):
    store = VideoStore(tmp_path, Room(), Room(), 100)
    await store.add(VideoRecord("video_1", "", "tiny", "a", "4", "auto"))
    store.file("video_1", "video").write_bytes(b"half")
    store.close()
    again = VideoStore(tmp_path, Room(), Room(), 100)
    record = await again.get("", "video_1")
    assert (record.status, record.error["code"]) == ("failed", "server_restarted")
    assert not again.file("video_1", "video").exists()
    again.close()


async def test_a_client_that_leaves_is_not_waited_for(kit):
    """P10: on the route that waits."""
    service = kit.Service((FRAMES, asyncio.Event()), **SPEC)
    async with kit.server(service) as address:
        host, port = address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        data = b'{"model": "tiny", "prompt": "a bird"}'
        head = f"POST {URL}/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        while not (service.answers and service.answers[0].said):
            await asyncio.sleep(0.005)
        await kit.leave(writer)
        async with asyncio.timeout(5):
            await service.answers[0].cancelled.wait()
        del reader


async def test_other_tenants_videos_are_not_there(kit, monkeypatch):
    service = kit.Service((FRAMES,), **SPEC)
    async with kit.client(service) as client:
        tenant = "ann"
        monkeypatch.setattr(exchange.Exchange, "tenant", property(lambda self: tenant))
        video_id = (await client.post(URL, json=body())).json()["id"]
        await ended(client, video_id)
        tenant = "bob"
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", ""), ("POST", "/remix")):
            reply = await client.request(method, f"{URL}/{video_id}{path}")
            assert reply.status_code == 404, (method, path)
        assert (await client.get(URL)).json()["data"] == []
        assert (await client.get(URL, params={"after": video_id})).status_code == 400
        tenant = "ann"
        assert [video["id"] for video in (await client.get(URL)).json()["data"]] == [video_id]


async def fill(store, number, tenant="", size=10):
    record = VideoRecord(f"video_{number}", tenant, "tiny", "a", "4", "auto", created=1000.0 + number)
    await store.add(record)
    store.file(record.id, "video").write_bytes(b"x" * size)
    await store.update(record, status="completed", completed=time.time() + number, bytes=size)


@pytest.mark.parametrize(
    ("most", "most_bytes", "left"), [(3, 10**9, [4, 3, 2]), (100, 25, [4, 3]), (100, 10**9, [4, 3, 2, 1, 0])]
)
async def test_the_oldest_make_room(tmp_path, most, most_bytes, left):
    store = VideoStore(tmp_path, Room(most, most_bytes), Room(), 100)
    for number in range(5):
        await fill(store, number)
    page, more = await store.page("", 100, None, True)
    assert ([record.id for record in page], more) == ([f"video_{number}" for number in left], False)
    assert {file.name for file in tmp_path.glob("*.mp4")} == {f"video_{number}.mp4" for number in left}
    store.close()


@pytest.mark.parametrize(
    ("room", "each", "ann", "bob"),
    [
        (Room(4), Room(), [0], [5, 4, 3]),
        (Room(bytes=45), Room(), [0], [5, 4, 3]),
        (Room(), Room(2), [0], [5, 4]),
        (Room(), Room(bytes=25), [0], [5, 4]),
        (Room(1), Room(), [], [5]),
    ],
)
async def test_nobodys_videos_make_room_for_anothers(tmp_path, room, each, ann, bob):
    store = VideoStore(tmp_path, room, each, 100)
    await fill(store, 0, "ann")
    for number in range(1, 6):
        await fill(store, number, "bob")
    for tenant, left in (("ann", ann), ("bob", bob)):
        page, _ = await store.page(tenant, 100, None, True)
        assert [record.id for record in page] == [f"video_{number}" for number in left]
    assert {file.name for file in tmp_path.glob("*.mp4")} == {f"video_{number}.mp4" for number in (*ann, *bob)}
    store.close()


async def test_what_is_being_made_is_never_dropped(tmp_path):
    store = VideoStore(tmp_path, Room(2), Room(1), 100)
    for number in range(4):
        await store.add(VideoRecord(f"video_{number}", "ann", "tiny", "a", "4", "auto", created=float(number)))
    await fill(store, 9, "bob")
    assert len((await store.page("ann", 100, None, True))[0]) == 4
    assert (await store.page("bob", 100, None, True))[0] == []
    store.close()


async def test_a_job_counts_as_its_keys_request_until_it_ends(kit, keys):
    path, (ann, bob) = keys("ann", "bob", max_requests=2)
    going = asyncio.Event()
    service = kit.Service((FRAMES, going), **SPEC)
    async with kit.client(service, api_keys=path) as client:

        async def begin(key):
            return await client.post(URL, json=body(), headers={"authorization": f"Bearer {key}"})

        kept = [(await begin(ann)).json()["id"] for _ in range(2)]
        refused = await begin(ann)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (await begin(bob)).status_code == 200
        await client.delete(f"{URL}/{kept[0]}", headers={"authorization": f"Bearer {ann}"})
        assert (await begin(ann)).status_code == 200
        assert (await begin(ann)).status_code == 429
        going.set()
        client.headers["authorization"] = f"Bearer {ann}"
        await ended(client, kept[1])
        for _ in range(3):
            video = (await begin(ann)).json()
            assert (await ended(client, video["id"]))["status"] == "completed"
        limits = client._transport.app.state.mstar.exchanges.limits
        client.headers["authorization"] = f"Bearer {bob}"
        await asyncio.gather(*(ended(client, v["id"]) for v in (await client.get(URL)).json()["data"]))
        assert limits._running == {}


async def test_a_job_that_is_refused_does_not_count(kit, keys):
    path, (key,) = keys("ann", max_requests=1)
    service = kit.Service((TooBusy("the queue is full"),), **SPEC)
    async with kit.client(service, api_keys=path, headers={"authorization": f"Bearer {key}"}) as client:
        for _ in range(3):
            assert (await client.post(URL, json=body())).json()["error"]["code"] == "queue_full"


async def test_a_job_has_a_time(kit):
    service = kit.Service((FRAMES,), **SPEC)
    async with kit.client(service, video_timeout_s=77.0) as client:
        await client.post(URL, json=body(), headers={"X-Request-Timeout": "9"})
    assert service.tasks[0].timeout == 77.0


async def test_what_is_too_old_is_gone(tmp_path):
    store = VideoStore(tmp_path, Room(), Room(), -100)
    await fill(store, 0)
    with pytest.raises(RequestError):
        await store.get("", "video_0")
    assert (await store.page("", 100, None, True)) == ([], False)
    store.close()


async def test_a_deleted_job_is_not_written_down_again(tmp_path):
    store = VideoStore(None, Room(), Room(), 100)
    record = VideoRecord("video_1", "ann", "tiny", "a", "4", "auto")
    await store.add(record)
    await store.delete("ann", "video_1")
    await store.update(record, status="completed", completed=time.time())
    with pytest.raises(RequestError):
        await store.get("ann", "video_1")
    folder = store.folder
    store.close()
    assert not folder.exists()


def streams(path):
    with av.open(str(path)) as file:
        return {stream.type: float(stream.duration * stream.time_base) for stream in file.streams}


@pytest.mark.parametrize("channels", [None, 1, 2])
def test_sound_lies_beside_the_frames(tmp_path, channels):
    """Whatever comes first."""
    writer = ClipWriter(tmp_path / "a.mp4")
    samples = np.zeros((8000,) if channels is None else (8000, channels), np.float32)
    for number in range(3):
        writer.sound(samples, 8000)
        writer.frames(np.full((8, 31, 33, 3), number, np.uint8), 8)
    clip = writer.finish()
    writer.close()
    assert dataclasses.astuple(clip) == (33, 31, 24, 3.0, True)
    found = streams(tmp_path / "a.mp4")
    assert found["video"] == pytest.approx(3.0)
    assert found["audio"] == pytest.approx(3.0, abs=0.15)
    assert [file.name for file in tmp_path.iterdir()] == ["a.mp4"]
    head = (tmp_path / "a.mp4").read_bytes()
    assert head.index(b"moov") < head.index(b"mdat"), "a player can start before it has all of it"


@pytest.mark.parametrize(("count", "tiles"), [(1, (1, 1)), (5, (4, 2)), (16, (4, 4)), (200, (4, 4))])
def test_a_sheet_has_frames_of_the_whole_video(tmp_path, count, tiles):
    from PIL import Image

    writer = ClipWriter(tmp_path / "a.mp4", tmp_path / "t.webp", tmp_path / "s.jpg")
    for number in range(count):
        writer.frames(np.full((1, 16, 32, 3), number, np.uint8), 8)
    writer.finish()
    writer.close()
    with Image.open(tmp_path / "s.jpg") as sheet, Image.open(tmp_path / "t.webp") as thumbnail:
        assert sheet.size == (32 * tiles[0], 16 * tiles[1])
        assert thumbnail.size == (32, 16)
        last = min(count, 16) - 1
        left, top = last % 4 * 32 + 16, last // 4 * 16 + 8
        assert abs(sheet.convert("L").getpixel((left, top)) - (count - 1)) <= 0.1 * count + 2


def test_a_writer_that_is_given_up_leaves_nothing(tmp_path):
    writer = ClipWriter(tmp_path / "a.mp4")
    writer.frames(np.zeros((3, 16, 16, 3), np.uint8), 8)
    writer.sound(np.zeros(100, np.float32), 8000)
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []
    empty = ClipWriter(tmp_path / "b.mp4")
    with pytest.raises(ValueError, match="needs a frame"):
        empty.finish()
    empty.close()

"""``/generate/ws`` in binary frames: the same messages as in JSON, with arrays as their bytes."""

from __future__ import annotations

import asyncio
import json

import msgspec
import numpy as np
import pytest
from websockets.asyncio.client import connect

from mstar.spec.processor import ArrayDelta, AudioDelta, FramesDelta, TextDelta
from mstar.spec.tasks import File

LIMIT_S = 5.0
SOUND = np.linspace(-1, 1, 7, dtype=np.float32)
PIXELS = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)


def packed(array: np.ndarray) -> dict:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def unpacked(event: dict) -> np.ndarray:
    return np.frombuffer(event["data"], event["dtype"]).reshape(event["shape"])


async def say(socket, **message) -> None:
    await socket.send(msgspec.msgpack.encode(message))


async def hear(socket) -> dict:
    async with asyncio.timeout(LIMIT_S):
        frame = await socket.recv()
    assert isinstance(frame, bytes)
    return msgspec.msgpack.decode(frame)


async def test_every_modality_comes_as_its_array(kit):
    odd = np.asarray([[np.nan, np.inf], [1e-30, -0.0]], np.float64)
    script = [
        TextDelta("hällo", (1,)), AudioDelta(SOUND, 8000), FramesDelta(PIXELS[:1]),
        FramesDelta(PIXELS, 4.0, "video"), ArrayDelta(odd), ArrayDelta(np.int16([3])[::-1], "state", "s"),
    ]  # fmt: skip
    async with kit.server(kit.Service(script)) as address, connect(f"ws://{address}/generate/ws") as socket:
        await say(socket, id="r", text="hi")
        text, sound, image, video, action, state, done = [await hear(socket) for _ in range(7)]
    assert (text["modality"], text["text"]) == ("text", "hällo")
    assert (sound["modality"], sound["rate"]) == ("audio", 8000)
    np.testing.assert_array_equal(unpacked(sound), SOUND)
    assert (image["modality"], "fps" in image, video["modality"], video["fps"]) == ("image", False, "video", 4.0)
    np.testing.assert_array_equal(unpacked(image), PIXELS[:1])
    np.testing.assert_array_equal(unpacked(video), PIXELS)
    np.testing.assert_array_equal(unpacked(action), odd)
    assert (state["stream"], state["dtype"], unpacked(state).tolist()) == ("s", "int16", [3])
    assert (done["type"], done["usage"]["completion_tokens"]) == ("done", 1)


async def test_appends_and_files_as_bytes(kit):
    service = kit.Service(["echo"])
    frame = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
    async with kit.server(service) as address, connect(f"ws://{address}/generate/ws") as socket:
        files = [{"data": b"\x00\xff\x01", "name": "a.bin"}]
        await say(socket, id="r", live=["s"], files=files, append={"s": packed(frame)})
        np.testing.assert_array_equal(unpacked(await hear(socket)), frame * 2)
        flags = np.asarray([True, False])
        await say(socket, id="r", append={"s": {**packed(flags), "data": b"\x01\x00"}})
        assert unpacked(await hear(socket)).tolist() == [2, 0]
        await say(socket, id="r", append={"s": [1.5]}, end_input=True)
        assert unpacked(await hear(socket)).tolist() == [3.0]
        assert (await hear(socket))["type"] == "done"
    assert service.tasks[0].parts == (File(b"\x00\xff\x01", "a.bin"),)


async def test_one_socket_speaks_both_and_answers_in_kind(kit):
    service = kit.Service(["echo"])
    async with kit.server(service) as address, connect(f"ws://{address}/generate/ws") as socket:
        await socket.send(json.dumps({"id": "j", "live": ["s"], "append": {"s": [1]}}))
        assert json.loads(await socket.recv())["data"] == [2.0]
        await say(socket, id="m", live=["s"], append={"s": [2]})
        assert unpacked(await hear(socket)).tolist() == [4.0]
        await say(socket, id="j", append={"s": packed(np.float32([4]))})  # what a request was opened with counts
        heard = json.loads(await socket.recv())
        assert (heard["id"], heard["data"]) == ("j", [8.0])
        await socket.send(json.dumps({"id": "m", "append": {"s": 3}}))
        assert json.loads(await socket.recv())["error"]["param"] == "append.s"
        await socket.send(json.dumps({"id": "m", "append": {"s": [3]}}))
        assert unpacked(await hear(socket)).tolist() == [6.0]


@pytest.mark.parametrize(
    ("payload", "code", "param"),
    [
        (b"\xc1", "invalid_msgpack", None),
        (b"", "invalid_msgpack", None),
        (msgspec.msgpack.encode([1]), "invalid_msgpack", None),
        (msgspec.msgpack.encode({1: 2}), "invalid_msgpack", None),
        (b"\x81\xa1a" + b"\x91" * 5000 + b"\xc0", "invalid_msgpack", None),
        (msgspec.msgpack.encode({"id": b"x", "text": "x"}), "invalid_value", "id"),
        (msgspec.msgpack.encode({"text": "x", "model_kwargs": {"steps": b"1"}}), "invalid_value", "model_kwargs"),
        (msgspec.msgpack.encode({"text": msgspec.msgpack.Ext(5, b"x")}), "invalid_value", "text"),
        (msgspec.msgpack.encode({"live": ["s"], "append": {"s": {"data": b"123"}}}), "invalid_value", "append.s"),
        (
            msgspec.msgpack.encode({"live": ["s"], "append": {"s": {"data": b"1234", "shape": [2**62, 4]}}}),
            "invalid_value", "append.s",
        ),
        (msgspec.msgpack.encode({"text": "x" * 1000}), "too_large", None),
    ],
)  # fmt: skip
async def test_a_bad_frame_is_an_error_event_and_the_socket_lives(kit, payload, code, param):
    server = kit.server(kit.Service(["echo"]), max_socket_message_bytes=6000 if len(payload) > 2000 else 900)
    async with server as address, connect(f"ws://{address}/generate/ws") as socket:
        await socket.send(payload)
        event = await hear(socket)
        assert (event["type"], event["error"]["code"], event["error"]["param"]) == ("error", code, param)
        assert event["status"] == (413 if code == "too_large" else 400)
        await say(socket, id="f", live=["s"], append={"s": [1]})
        assert unpacked(await hear(socket)).tolist() == [2.0]


async def test_a_large_frame_is_read_in_order(kit):
    """A frame that is read in a thread does not fall behind the small one after it."""
    async with kit.server(kit.Service(["echo"])) as address, connect(f"ws://{address}/generate/ws") as socket:
        await say(socket, id="r", live=["s"])
        large = np.ones(100_000, np.float32)
        await say(socket, id="r", append={"s": packed(large)})
        await say(socket, id="r", append={"s": [7]})
        assert (unpacked(await hear(socket)).size, unpacked(await hear(socket)).tolist()) == (100_000, [14.0])


async def test_each_answer_names_the_newest_append_that_it_has_heard(kit):
    async with kit.server(kit.Service(["echo"])) as address, connect(f"ws://{address}/generate/ws") as socket:
        await say(socket, id="r", live=["a", "b"], append={"a": [1, 2]})
        await say(socket, id="r", append={"a": [3], "b": [4]})
        await say(socket, id="r", append={"b": [5]}, end_input=True)
        heard = [await hear(socket) for _ in range(5)]
    assert [(e["stream"], e["seq"]) for e in heard[:4]] == [("a", 0), ("a", 1), ("b", 1), ("b", 2)]
    assert heard[4]["type"] == "done"


async def test_a_request_without_live_input_has_no_seq(kit):
    async with kit.server(kit.Service(kit.HELLO)) as address, connect(f"ws://{address}/generate/ws") as socket:
        await say(socket, id="r", text="x")
        assert "seq" not in await hear(socket)


async def test_events_of_many_requests_are_whole_frames(kit):
    """Several requests write at once and pings are answered among them; nothing is torn."""
    script = [item for n in range(40) for item in (ArrayDelta(np.full(5000, n, np.float32)),)]
    async with kit.server(kit.Service(script)) as address, connect(f"ws://{address}/generate/ws") as socket:
        for number in range(8):
            await say(socket, id=str(number), text="x")
        pongs = [await socket.ping() for _ in range(3)]
        seen: dict[str, list[float]] = {}
        ended = 0
        while ended < 8:
            event = await hear(socket)
            if event["type"] == "done":
                ended += 1
                continue
            values = unpacked(event)
            assert (values == values[0]).all()
            seen.setdefault(event["id"], []).append(float(values[0]))
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*pongs)
    assert seen == {str(number): [float(n) for n in range(40)] for number in range(8)}

"""``/generate/ws`` on a real server: control loops, many clients, slow models, clients that vanish."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket as plain_socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.sync.client import connect as connect_sync

from mstar.testing.miniatures import MINIATURES, miniature

from .serving import Server, serving

SLOW = """
import time

from mstar.hookspecs import hookimpl
from mstar.spec.knobs import Knobs
from mstar.spec.model import Licence, ModelSpec
from mstar.testing.miniatures.worlds import Policy, PolicyNode


class SlowNode(PolicyNode):
    def forward(self, step, observation):
        time.sleep(0.4)
        return super().forward(step, observation)


class SlowPolicy(Policy):
    def build(self, node):
        return SlowNode()


@hookimpl
def mstar_models():
    return [ModelSpec(
        key="slow_policy", family="tests", summary="Thinks long.", weights=(), licence=Licence("Apache-2.0"),
        model="slow_policy_family:SlowPolicy", processor="slow_policy_family:Plain", knobs=Knobs,
        abilities=("generate",), outputs=("action",),
        deployment={"device": "cpu", "dtype": "float32", "engine": {"threads": 1}},
    )]


from mstar.testing.miniatures.common import MiniRenderer
from mstar.testing.miniatures.processors import LiveProcessor


class Plain(LiveProcessor):
    def renderer(self, task, prepared):
        return MiniRenderer({"actions": "action"}, task)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "slow_policy_family.py").write_text(SLOW, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        keys = [m.key for m in MINIATURES if m.live] + ["slow_policy", "mini_rollout"]
        plugins = ("mstar.testing.miniatures", "slow_policy_family")
        with serving(*keys, extra_plugins=plugins, executor="inline") as running:
            yield running


def address(server: Server) -> str:
    return server.url.replace("http", "ws") + "/generate/ws"


def packed(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def unpacked(event: dict[str, Any]) -> np.ndarray:
    if isinstance(event["data"], bytes):
        return np.frombuffer(event["data"], event["dtype"]).reshape(event["shape"])
    return np.asarray(event["data"], event["dtype"]).reshape(event["shape"])


def write(message: dict[str, Any], kind: str) -> str | bytes:
    return json.dumps(message) if kind == "json" else msgspec.msgpack.encode(message)


def read(frame: str | bytes) -> dict[str, Any]:
    event = json.loads(frame) if isinstance(frame, str) else msgspec.msgpack.decode(frame)
    assert event["type"] != "error", event
    return dict(event)


def items(array: np.ndarray, kind: str) -> Any:
    return array.tolist() if kind == "json" else packed(array)


@pytest.mark.parametrize("kind", ["json", "msgpack"])
def test_pipelined_observations_name_their_answers(server: Server, kind: str) -> None:
    rng = np.random.default_rng(1)
    observations = [rng.integers(-8, 8, (count, 3)).astype(np.float32) for count in (1, 2, 1, 4, 1, 1, 3)]
    gains = np.arange(1, 5, dtype=np.float32)[:, None]
    with connect_sync(address(server)) as socket:
        socket.send(write({"id": "r", "model": "mini_policy", "live": ["observations"]}, kind))
        for observation in observations:  # all of them before the first answer is read
            socket.send(write({"id": "r", "append": {"observations": items(observation, kind)}}, kind))
        for seq, observation in enumerate(observations):
            for row in observation:
                event = read(socket.recv(timeout=30))
                assert event["seq"] == seq
                np.testing.assert_array_equal(unpacked(event)[0], row * gains)
        socket.send(write({"id": "r", "end_input": True}, kind))
        assert read(socket.recv(timeout=30))["type"] == "done"


def test_json_and_msgpack_say_the_same(server: Server) -> None:
    heard: dict[str, dict[str, list[Any]]] = {}
    sound = np.asarray([3, -1, 4, 1, 5, -9, 2, 6, 5, 3], np.float32) / 16
    for kind in ("json", "msgpack"):
        with connect_sync(address(server)) as socket:
            opening = {"id": "r", "model": "mini_duplex", "live": ["audio_in"], "end_input": True}
            socket.send(write({**opening, "append": {"audio_in": items(sound, kind)}}, kind))
            streams: dict[str, list[Any]] = heard.setdefault(kind, {})
            while (event := read(socket.recv(timeout=30)))["type"] != "done":
                streams.setdefault(event["modality"], []).append(event)
    assert [e["text"] for e in heard["json"]["text"]] == [e["text"] for e in heard["msgpack"]["text"]]
    for one, other in zip(heard["json"]["audio"], heard["msgpack"]["audio"], strict=True):
        assert (one["rate"], one["index"], one["seq"]) == (other["rate"], other["index"], other["seq"])
        rounded = np.frombuffer(base64.b64decode(one["data"]), "<i2")
        np.testing.assert_allclose(rounded, unpacked(other).clip(-1, 1) * 32767, atol=0.6)


async def test_pings_are_answered_while_a_step_runs(server: Server) -> None:
    async with connect(address(server), ping_interval=None) as socket:
        await socket.send(write({"id": "r", "model": "slow_policy", "live": ["observations"]}, "msgpack"))
        for _ in range(3):
            await socket.send(write({"id": "r", "append": {"observations": [[1, 2, 3]]}}, "msgpack"))
        waits = []
        for _ in range(5):
            begin = time.perf_counter()
            async with asyncio.timeout(5):
                await (await socket.ping())
            waits.append(time.perf_counter() - begin)
            await asyncio.sleep(0.1)
        for seq in range(3):
            assert read(await socket.recv())["seq"] == seq
    assert sorted(waits)[2] < 0.3, waits  # a step takes 0.4 s


async def test_a_second_client_is_served_while_the_first_one_infers(server: Server) -> None:
    """Handshake and another model's answer, during a step of the first client."""
    async with connect(address(server)) as first:
        await first.send(write({"id": "r", "model": "slow_policy", "live": ["observations"]}, "msgpack"))
        for _ in range(5):
            await first.send(write({"id": "r", "append": {"observations": [[1, 2, 3]]}}, "msgpack"))
        await first.recv()
        begin = time.perf_counter()
        async with connect(address(server)) as second:
            opening = {"id": "x", "model": "mini_policy", "live": ["observations"]}
            await second.send(write({**opening, "append": {"observations": [[1, 0, 0]]}}, "msgpack"))
            event = read(await second.recv())
        waited = time.perf_counter() - begin
        assert event["seq"] == 0
        remaining = [read(await first.recv())["seq"] for _ in range(4)]
    assert remaining == [1, 2, 3, 4]
    assert waited < 1.2, waited  # the first client's four steps take 1.6 s


@pytest.mark.parametrize("key", ["mini_world", "mini_duplex", "mini_policy"])
def test_a_client_that_vanishes_holds_nothing(server: Server, key: str) -> None:
    """No closing handshake, no end of input: the connection is reset in the middle of a session."""
    mini = miniature(key)
    (stream,) = mini.live
    shape = {"mini_world": (4, 3), "mini_duplex": (8,), "mini_policy": (2, 3)}[key]
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(connect_sync(address(server))) for _ in range(4)]
        for socket in sockets:
            for name in "ab":
                opening = {"id": name, "model": key, "live": [stream]}
                socket.send(write({**opening, "append": {stream: packed(np.ones(shape, np.float32))}}, "msgpack"))
                read(socket.recv(timeout=30))
        while server.http.get("/health").json()["models"][key]["worker"]["running"] < 8:
            time.sleep(0.01)
        for socket in sockets:
            linger = struct.pack("ii", 1, 0)  # close() sends a reset
            socket.socket.setsockopt(plain_socket.SOL_SOCKET, plain_socket.SO_LINGER, linger)
            socket.socket.shutdown(plain_socket.SHUT_RDWR)
    for name, usage in server.pools()[key].items():
        assert usage["used"] == 0, f"{name} of {key} still holds {usage}"


async def test_a_hundred_control_loops_at_once(server: Server) -> None:
    gains = np.arange(1, 5, dtype=np.float32)[:, None]

    async def robot(number: int) -> None:
        kind = ("json", "msgpack")[number % 2]
        async with connect(address(server), open_timeout=60) as socket:
            await socket.send(write({"id": "r", "model": "mini_policy", "live": ["observations"]}, kind))
            for step in range(10):
                observation = np.asarray([[number, step, 1]], np.float32)
                await socket.send(write({"id": "r", "append": {"observations": items(observation, kind)}}, kind))
                event = read(await socket.recv())
                assert event["seq"] == step
                np.testing.assert_array_equal(unpacked(event)[0], observation * gains)
            await socket.send(write({"id": "r", "end_input": True}, kind))
            assert read(await socket.recv())["type"] == "done"

    async with asyncio.timeout(120):
        await asyncio.gather(*(robot(number) for number in range(100)))

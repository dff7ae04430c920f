"""Round trips of a control loop over ``/generate/ws``: ``python benchmarks/control_loop.py [--steps N] [--loops N]``.

A server of its own serves the policy among the miniatures, whose step costs almost nothing: what is measured is the way
from an observation to its actions. Each loop waits for its actions before it sends the next observation, alone and
beside others, in JSON and in msgpack; then one loop with several observations under way. A camera's picture (uint8,
480 x 640) is written and read in both kinds, without a model. The figures go to
``benchmarks/results/control_loop.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import numpy as np
from common import environment, percentiles, table, write_result
from websockets.asyncio.client import connect

from mstar_server.native.frames import JSON, MSGPACK, Kind
from mstar_server.native.socket_messages import parse_follow

WARM_UP = 50
COLUMNS = ("kind", "loops", "in_flight", "p50", "p95", "p99", "per_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="observations of a loop (default: 1000)")
    parser.add_argument("--loops", type=int, default=8, help="loops at once in the second measure (default: 8)")
    parser.add_argument("--in-flight", type=int, default=8, help="observations under way in the third (default: 8)")
    arguments = parser.parse_args()
    facts = environment(("torch",))
    with serving("mini_policy") as address:
        rows = [
            asyncio.run(measure(address, kind, loops, in_flight, arguments.steps))
            for loops, in_flight in ((1, 1), (arguments.loops, 1), (1, arguments.in_flight))
            for kind in ("json", "msgpack")
        ]
    pictures = [picture(kind) for kind in (JSON, MSGPACK)]
    table("milliseconds from an observation to its actions", rows, COLUMNS)
    table("a picture of 480 x 640: milliseconds to write and to read", pictures, ("kind", "bytes", "write", "read"))
    settings = {"steps": arguments.steps, "loops": arguments.loops, "in_flight": arguments.in_flight}
    write_result("control_loop", {"loops": rows, "picture": pictures}, settings, facts)


@contextmanager
def serving(key: str) -> Iterator[str]:
    """A server of miniature *key* in a process of its own; gives its ``host:port``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [sys.executable, "-m", "mstar", "serve", key, "--port", address.rpartition(":")[2]]
    process = subprocess.Popen(words, env={**os.environ, "MSTAR_EXTRA_PLUGINS": "mstar.testing.miniatures"})
    try:
        deadline = time.monotonic() + 120
        while not ready(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def ready(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


async def measure(address: str, kind: str, loops: int, in_flight: int, steps: int) -> dict[str, Any]:
    """*loops* at once, each with *in_flight* observations under way."""
    begin = time.perf_counter()
    waits = await asyncio.gather(*(loop(address, kind, in_flight, steps) for _ in range(loops)))
    rate = loops * (steps + WARM_UP) / (time.perf_counter() - begin)
    times = percentiles([wait * 1e3 for one in waits for wait in one[WARM_UP:]])
    return {"kind": kind, "loops": loops, "in_flight": in_flight, **times, "per_s": rate}


async def loop(address: str, kind: str, in_flight: int, steps: int) -> list[float]:
    """Seconds from each observation to its actions."""
    write: Callable[[Any], Any] = msgspec.msgpack.encode if kind == "msgpack" else json.dumps
    sent, waits = [0.0] * (steps + WARM_UP), []
    slots = asyncio.Semaphore(in_flight)
    # a request may send 1024 observations to this model: a new one begins where one is full
    async with connect(f"ws://{address}/generate/ws", compression=None) as robot:
        for first in range(0, len(sent), 1024):
            last = min(first + 1024, len(sent))
            name = str(first)
            await robot.send(write({"id": name, "model": "mini_policy", "live": ["observations"]}))

            async def observe(first: int = first, last: int = last, name: str = name) -> None:
                for step in range(first, last):
                    await slots.acquire()
                    observation = np.full((1, 3), step, np.float32)
                    sent[step] = time.perf_counter()
                    items = observation.tolist() if kind == "json" else packed(observation)
                    await robot.send(write({"id": name, "append": {"observations": items}}))
                await robot.send(write({"id": name, "end_input": True}))

            sending = asyncio.create_task(observe())
            async for frame in robot:
                event = msgspec.msgpack.decode(frame) if isinstance(frame, bytes) else json.loads(frame)
                if event["type"] == "done":
                    break
                assert event["type"] == "delta", event
                waits.append(time.perf_counter() - sent[first + event["seq"]])
                slots.release()
            await sending
    return waits


def packed(array: Any) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def picture(kind: Kind) -> dict[str, Any]:
    """What one camera frame costs a client to write and the server to read; JSON carries it in base64."""

    pixels = np.random.default_rng(1).integers(0, 255, (1, 480, 640, 3), np.uint8)

    def write() -> Any:
        if kind is MSGPACK:
            return msgspec.msgpack.encode({"append": {"camera": packed(pixels)}})
        data = base64.b64encode(pixels.tobytes()).decode()
        return json.dumps({"append": {"camera": {**packed(pixels), "data": data}}})

    frame = write()
    cost = {"write": timed(write), "read": timed(lambda: parse_follow(kind.message(frame)))}
    return {"kind": kind.name, "bytes": len(frame), **cost}


def timed(work: Callable[[], Any], runs: int = 50) -> float:
    """The median time of *work* in milliseconds."""
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return percentiles(times, (50,))["p50"]


if __name__ == "__main__":
    main()

"""Damaged media through a real server: every request gets an answer or a 4xx, no process is lost, memory stays flat.

The server listens on loopback; the model behind it answers "ok" to anything, so that what is exercised is the server's:
parsing, decoding in its processes, errors. Files of every kind are cut, flipped, overwritten and mixed; they go to
``/generate`` as uploads and to ``/v1/chat/completions`` as data URLs. The program fails on a 5xx, and when the server's
memory in the last quarter is more than 10 % and 64 MiB above that in the second.

    python benchmarks/media_fuzz.py                  # 20,000 requests, writes benchmarks/results/media_fuzz.json
    python benchmarks/media_fuzz.py --requests 500   # less, prints only
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import psutil
import soundfile
from common import environment, percentiles, table, write_result
from PIL import Image

from mstar.cluster.base import Phase
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.spec.knobs import SamplingKnobs
from mstar.spec.model import Licence, ModelSpec
from mstar.spec.processor import TextDelta
from mstar.spec.request import Usage
from mstar.spec.tasks import Audio
from mstar_server.media.encode.audio import encode_audio
from mstar_server.media.encode.video import mp4
from mstar_server.options import ServerOptions
from mstar_server.run import bind, serve_async

FIELDS = (b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\x4e\x20")
MIB = 1 << 20


class OkAnswer:
    """Says "ok"."""

    def __init__(self, request_id: str):
        self.id, self.prompt_tokens, self.completion_tokens = request_id, 1, 1
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.follow, self.heard = None, dict[str, int]()

    def close(self) -> None:
        self.cancel()

    def cancel(self, reason: str = "cancelled") -> None:
        self.finish_reason = self.finish_reason or reason

    async def push(self, stream: str, part: Any, end: bool = False) -> None:
        raise NotImplementedError("this model has no live streams")

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        yield TextDelta("ok", (1,))
        self.usage, self.finish_reason = Usage(input={"text": 1}, output={"text": 1}), "stop"


class OkService:
    """A model that takes every kind of file."""

    def __init__(self) -> None:
        self.spec = ModelSpec(
            key="ok", family="benchmarks", summary="Says ok.", weights=(), licence=Licence("Apache-2.0"),
            model="nowhere:Model", processor="nowhere:Processor", knobs=SamplingKnobs, abilities=("chat", "generate"),
            inputs=("text", "image", "audio", "video"), outputs=("text",),
        )  # fmt: skip
        self.processor: Any = SimpleNamespace()
        self.phase, self.limits, self.canvas = Phase(name="ready"), dict[str, Any](), None

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def drain(self, seconds: float) -> bool:
        return True

    async def status(self) -> dict[str, Any]:
        return {}

    async def generate(self, task: Any, request_id: str | None = None, sibling_of: str | None = None) -> OkAnswer:
        return OkAnswer(request_id or "ok")


def seeds() -> dict[str, tuple[str, bytes]]:
    """Name → kind of content part, and a small valid file."""
    pixels = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    tone = (0.4 * np.sin(np.arange(8000) / 6)).astype(np.float32)
    found: dict[str, tuple[str, bytes]] = {}
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, kind)
        found[kind.lower()] = ("image_url", out.getvalue())
    for kind in ("WAV", "AIFF", "OGG", "FLAC", "MP3"):
        out = io.BytesIO()
        soundfile.write(out, tone, 16_000, format=kind)
        found[kind.lower()] = ("audio_url", out.getvalue())
    for kind in ("opus", "aac"):
        found[kind] = ("audio_url", encode_audio(tone, 16_000, kind))
    found["mp4"] = ("video_url", mp4(pixels[None].repeat(8, axis=0), 8, Audio(tone, 16_000)))
    return found


def damaged(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """*data* after one to five accidents, each at a random place or near the head."""
    made = bytearray(data)
    for _ in range(dice.randint(1, 5)):
        if not made:
            break
        at = dice.randrange(min(len(made), 64) if dice.random() < 0.4 else len(made))
        match dice.randrange(5):
            case 0:
                del made[at:]
            case 1:
                made[at] ^= 1 << dice.randrange(8)
            case 2:
                made[at : at + 4] = dice.choice(FIELDS)
            case 3:
                made[at : at + 16] = dice.randbytes(dice.randrange(32))
            case 4:
                made[at:] = other[dice.randrange(len(other)) :]
    return bytes(made)


async def ask(client: httpx.AsyncClient, name: str, kind: str, data: bytes, upload: bool) -> tuple[int, str]:
    """Status and error code."""
    if upload:
        reply = await client.post("/generate", data={"text": "x"}, files={"files": (name, data)})
    else:
        part = {"type": kind, kind: {"url": "data:;base64," + base64.b64encode(data).decode()}}
        messages = [{"role": "user", "content": [part]}]
        reply = await client.post("/v1/chat/completions", json={"model": "ok", "messages": messages})
    return reply.status_code, "" if reply.status_code == 200 else reply.json()["error"]["code"]


def memory() -> tuple[int, int]:
    """Bytes of this process and of its decoders, and how many those are."""
    process = psutil.Process()
    total, children = process.memory_info().rss, process.children()
    for child in children:
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:  # replaced just now
            continue
    return total, len(children)


async def storm(address: str, count: int, clients: int, seed: int) -> dict[str, Any]:
    """Send *count* requests over *clients* connections; what came of them."""
    files, dice = seeds(), random.Random(seed)
    names = list(files)
    outcomes: Counter[tuple[int, str]] = Counter()
    seconds: list[float] = []
    memories: list[int] = []
    most_decoders = sent = 0
    bad: list[str] = []

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal sent, most_decoders
        while sent < count:
            number, sent = sent, sent + 1
            name = dice.choice(names)
            kind, whole = files[name]
            data = damaged(whole, files[dice.choice(names)][1], dice) if number % 20 else whole
            begun = time.perf_counter()
            outcome = await ask(client, name, kind, data, upload=bool(number % 2))
            seconds.append(time.perf_counter() - begun)
            outcomes[outcome] += 1
            if outcome[0] >= 500 or (not number % 20 and outcome[0] != 200):
                bad.append(f"request {number} ({name}): {outcome}")
            if number % max(1, count // 200) == 0:
                total, decoders = memory()
                memories.append(total)
                most_decoders = max(most_decoders, decoders)

    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=120) as client:
        begun = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(clients)))
        wall = time.perf_counter() - begun
    quarter = max(1, len(memories) // 4)
    second, last = (
        sum(part) / len(part) for part in (memories[quarter : 2 * quarter] or memories, memories[-quarter:])
    )
    return {
        "requests": count,
        "requests_a_second": count / wall,
        "outcomes": {f"{status} {code}".strip(): n for (status, code), n in sorted(outcomes.items())},
        "seconds": percentiles(seconds),
        "memory_mib": {"second_quarter": second / MIB, "last_quarter": last / MIB, "most": max(memories) / MIB},
        "most_decoders": most_decoders,
        "faults": bad,
        "flat": last < max(1.1 * second, second + 64 * MIB),
    }


async def run(count: int, clients: int, seed: int, decoders: int) -> dict[str, Any]:
    options = ServerOptions(port=0, drain_s=1, media_processes=decoders)
    listener = bind(options)
    host, port = listener.getsockname()[:2]
    registry = Registry(load_plugins(Settings()))
    serving = asyncio.create_task(serve_async({"ok": OkService()}, registry, options, listener))
    try:
        return await storm(f"{host}:{port}", count, clients, seed)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--decoders", type=int, default=2, help="decoders' processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    facts = environment(("av", "pillow", "soundfile", "httpx"))
    found = asyncio.run(run(arguments.requests, arguments.clients, arguments.seed, arguments.decoders))
    rows = [{"outcome": outcome, "requests": count} for outcome, count in found["outcomes"].items()]
    table("media fuzz", rows, ("outcome", "requests"))
    print({key: value for key, value in found.items() if key not in ("outcomes", "faults")})
    if arguments.requests >= 20_000:
        write_result(Path(__file__).stem, found, vars(arguments), facts)
    if found["faults"] or not found["flat"]:
        sys.exit("\n".join(found["faults"][:20]) or "memory grew")


if __name__ == "__main__":
    main()

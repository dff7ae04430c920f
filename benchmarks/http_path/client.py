"""A client that costs little beside what it measures: raw sockets; it counts events and takes the time, no more."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, cast

import uvloop

__all__ = ["Stream", "load"]

LIMIT_S = 120.0
"""How long one round may take."""


class Stream(asyncio.Protocol):
    """One streamed request. Times are monotonic seconds."""

    def __init__(self, request: bytes, done: asyncio.Future[None]):
        self.request, self.done = request, done
        self.events = 0
        self.complete = False
        self.began = self.first = self.ended = 0.0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self.began = time.monotonic()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        found = data.count(b'"delta":')
        if found and not self.first:
            self.first = time.monotonic()
        self.events += found
        if b"[DONE]" in data:
            self.complete, self.ended = True, time.monotonic()
            self.transport.close()
        self._tail = data[-7:]  # shorter than either mark

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def _load(port: int, streams: int, tokens: int, model: str, path: str) -> list[Stream]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": tokens,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    opened: list[Stream] = []

    async def one() -> None:
        done = loop.create_future()
        _, stream = await loop.create_connection(lambda: Stream(head.encode() + data, done), "127.0.0.1", port)
        opened.append(stream)
        await done

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(one() for _ in range(streams)))
    return opened


def load(
    port: int, streams: int, tokens: int, model: str, times: int = 1, path: str = "/v1/chat/completions"
) -> dict[str, Any]:
    """*streams* at once, each of *tokens* events, *times* in a row. ``lost``: streams without an end, or with an event
    too few."""
    found: list[Stream] = []
    began = time.monotonic()
    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        for _ in range(times):
            found += runner.run(_load(port, streams, tokens, model, path))
    whole = [stream for stream in found if stream.complete and stream.events >= tokens]
    return {
        "seconds": max(stream.ended for stream in found) - began,
        "lost": len(found) - len(whole),
        "events": sum(stream.events for stream in found),
        "first": [stream.first - stream.began for stream in whole],
        "took": [stream.ended - stream.began for stream in whole],
    }

"""The server to compare with: FastAPI on the same uvicorn, uvloop and httptools, which streams chunks that it makes up.

A chunk has the fields of a chat's, and is encoded whole for each event, as servers that are not tuned do.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import StreamingResponse

__all__ = ["serve_bare"]


class Body(BaseModel, extra="allow"):
    model: str
    messages: list[dict[str, Any]]
    max_tokens: int
    stream: bool


app = FastAPI()
_encode = msgspec.json.Encoder().encode


@app.post("/v1/chat/completions")
async def chat(body: Body) -> StreamingResponse:
    return StreamingResponse(_events(body), media_type="text/event-stream")


async def _events(body: Body) -> AsyncIterator[bytes]:
    created = int(time.time())
    step_s = float(os.environ.get("HTTP_COST_STEP_S", "0"))
    for number in range(body.max_tokens):
        delta = {"content": chr(97 + number % 26)}
        chunk = {
            "id": "chatcmpl-bare",
            "object": "chat.completion.chunk",
            "created": created,
            "model": body.model,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}],
        }
        yield b"data: " + _encode(chunk) + b"\n\n"
        await asyncio.sleep(step_s)  # 0: every stream gets its turn
    yield b"data: [DONE]\n\n"


def serve_bare(port: int) -> None:
    """Serve until the process is ended."""
    listener = socket.create_server(("127.0.0.1", port), backlog=2048)
    config = uvicorn.Config(app, http="httptools", log_config=None, access_log=False, lifespan="off")
    asyncio.Runner(loop_factory=uvloop.Loop).run(uvicorn.Server(config).serve(sockets=[listener]))

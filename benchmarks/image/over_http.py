"""Clients of a server of pictures, which keep their connections, and what encoding its answers costs."""

from __future__ import annotations

import base64
import http.client
import io
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from image.steady import seconds
from mstar_server.media.encode.images import encode_image

__all__ = ["Clients", "encoding_seconds"]


class Clients:
    """As many as ask at once, each a thread with a connection of its own. They read answers and do not look into them:
    a client that takes JSON of megabytes apart would be measured with the server.

    :param body: of each request; the seed is added.
    """

    def __init__(self, port: int, body: Mapping[str, Any], most: int):
        self._port, self._body = port, body
        self._threads = ThreadPoolExecutor(most)
        self._own = threading.local()

    def ask(self, count: int) -> list[bytes]:
        """The answers of *count* requests at once."""
        return list(self._threads.map(self._ask, range(count)))

    def _ask(self, seed: int) -> bytes:
        if not hasattr(self._own, "connection"):
            self._own.connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection: http.client.HTTPConnection = self._own.connection
        said = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/images/generations", json.dumps({**self._body, "seed": seed}), said)
        reply = connection.getresponse()
        data = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {data[:500]!r}")
        return data

    def __enter__(self) -> Clients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)


def encoding_seconds(answer: bytes, rounds: int) -> float:
    """How long the picture of *answer* takes to become what it is there, alone in this process: a file, as text."""
    file = base64.b64decode(json.loads(answer)["data"][0]["b64_json"])
    pixels = np.asarray(Image.open(io.BytesIO(file)))
    encode = msgspec.json.Encoder().encode
    return seconds(lambda: encode({"b64_json": encode_image(pixels, "png")}), torch.device("cpu"), rounds)

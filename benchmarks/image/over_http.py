"""Pictures over HTTP: a server, clients that keep their connections, and what encoding its answers costs."""

from __future__ import annotations

import argparse
import base64
import http.client as http_client
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import msgspec
import numpy as np
import torch
from PIL import Image

from image.engine import PROMPT, deployment, rates, settings_of
from image.shapes import Shape
from image.steady import seconds
from mstar_server.media.encode.images import encode_image

__all__ = ["Clients", "encoding_seconds", "http"]


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
            self._own.connection = http_client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection: http_client.HTTPConnection = self._own.connection
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


def http(shape: Shape, folder: Path, at_once: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """The figures of ``graphs`` behind ``mstar serve``, and ``encode_s``. It tells how far it is."""
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"http: {what} after {time.perf_counter() - began:.1f} s", flush=True)

    fields = deployment(shape, "graphs", args.device, at_once)
    config = folder.parent / "serve.yaml"
    config.write_text(json.dumps({"model": shape.key, "weights": str(folder), "device": args.device, **fields}))
    more = {"MSTAR_EXTRA_PLUGINS": ",".join(settings_of().extra_plugins), "PYTHONPATH": os.pathsep.join(sys.path)}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = "from mstar.cli.app import main; main()"
    words = [sys.executable, "-c", command, "serve", shape.key, "--config", str(config), "--port", str(port)]
    with subprocess.Popen(words, env={**os.environ, **more}, stdout=sys.stderr) as server:
        try:
            _until_ready(url, server)
            say("ready")
            ready_s = time.perf_counter() - began
            body = {"model": shape.key, "prompt": PROMPT, "size": f"{shape.size}x{shape.size}"}
            with Clients(port, {**body, "num_inference_steps": shape.steps}, max(at_once)) as clients:
                for count in at_once:
                    clients.ask(count)
                    say(f"warm with {count} at once")
                found = rates(clients.ask, at_once, args.rounds)
                say("measured")
                encode_s = encoding_seconds(clients.ask(1)[0], args.rounds)
                return found | {"encode_s": encode_s, "start_s": ready_s}
        finally:
            server.terminate()
            server.wait(30)


def _until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the server ended with status {server.returncode} before it was ready")

"""Pictures over HTTP: a server, clients that keep their connections, and what encoding its answers costs."""

from __future__ import annotations

import argparse
import base64
import http.client as http_client
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from chat_servers import Contestant, RunningServer, ServerError
from PIL import Image

from image.engine import PLUGINS, PROMPT, deployment, rates
from image.shapes import Shape
from image.steady import seconds
from mstar_server.media.encode.images import image_text

__all__ = ["Clients", "encoding_seconds", "http"]

_START_S, _LOOK_S = 150.0, 10.0
"""So long a server may take to be ready; so often it is told what it said last."""
_ANSWER_S = 120.0


class Clients:
    """As many as ask at once, each a thread with a connection of its own. They read answers and do not look into them:
    a client that takes JSON of megabytes apart would be measured with the server.

    :param address: host and port. :param body: of each request; the seed is added.
    """

    def __init__(self, address: str, body: Mapping[str, Any], most: int):
        self._address, self._body = address, body
        self._threads = ThreadPoolExecutor(most)
        self._own = threading.local()

    def ask(self, count: int) -> list[bytes]:
        """The answers of *count* requests at once."""
        return list(self._threads.map(self._ask, range(count)))

    def _ask(self, seed: int) -> bytes:
        if not hasattr(self._own, "connection"):
            self._own.connection = http_client.HTTPConnection(self._address, timeout=_ANSWER_S)
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
    """How long the picture of *answer* takes to become what it is there, alone in this process, whose idle threads help
    as the server's do: a file, as text."""
    file = base64.b64decode(json.loads(answer)["data"][0]["b64_json"])
    pixels = np.asarray(Image.open(io.BytesIO(file)))
    return seconds(lambda: image_text(pixels, "png"), torch.device("cpu"), rounds)


def http(shape: Shape, folder: Path, at_once: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """The figures of ``graphs`` behind ``mstar serve``, and ``encode_s``. It tells how far it is."""
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"http: {what} after {time.perf_counter() - began:.1f} s", flush=True)

    fields = deployment(shape, "graphs", args.device, at_once)
    config = folder.parent / "serve.yaml"
    config.write_text(json.dumps({"model": shape.key, "weights": str(folder), "device": args.device, **fields}))
    plugins = ",".join(("mstar_server.plugin", *PLUGINS))  # its routes are a plugin's too
    more = {"MSTAR_PLUGINS": "", "MSTAR_EXTRA_PLUGINS": plugins, "PYTHONPATH": os.pathsep.join(sys.path)}
    serve = ["-m", "mstar", "serve", shape.key, "--config", str(config)]

    def command(weights: Path, port: int) -> list[str]:
        return [
            "env",
            *(f"{name}={value}" for name, value in more.items()),
            sys.executable,
            *serve,
            "--port",
            str(port),
        ]

    contestant = Contestant("mstar", command, "/health/ready", {}, lambda weights: shape.key, "")
    with RunningServer(contestant, folder) as server:
        _until_ready(server, say)
        ready_s = time.perf_counter() - began
        body = {"model": shape.key, "prompt": PROMPT, "size": f"{shape.size}x{shape.size}"}
        address = server.url.removeprefix("http://")
        with Clients(address, {**body, "num_inference_steps": shape.steps}, max(at_once)) as clients:

            def ask(count: int) -> list[bytes]:
                answers = clients.ask(count)
                say(f"{count} at once")
                return answers

            for count in at_once:
                ask(count)
            say("warm")
            found = rates(ask, at_once, args.rounds)
            encode_s = encoding_seconds(ask(1)[0], args.rounds)
    say("stopped")
    return found | {"encode_s": encode_s, "start_s": ready_s}


def _until_ready(server: RunningServer, say: Callable[[str], None]) -> None:
    """Raises :class:`ServerError` if it ends, or takes longer than :data:`_START_S`."""
    until = time.monotonic() + _START_S
    while True:
        try:
            server.wait_ready(_LOOK_S)
        except ServerError as error:
            server.check()
            if time.monotonic() > until:
                raise
            say(str(error))
        else:
            say("ready")
            return

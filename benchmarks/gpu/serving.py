"""The HTTP server: its start with its phases, and its speed under many streams."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from chat_client import summary
from chat_prompts import SENTENCES
from chat_servers import SERVING_SAMPLE_S, Contestant, RunningServer, ServerError

from gpu.load_client import FOLDER, run_shares
from gpu.shapes import Sizes

__all__ = ["ShapeServer", "evict", "http", "start", "text_of"]

LOG_LINES = 60


class ShapeServer(RunningServer):
    """``mstar serve`` of one shape, with the plugin of these benchmarks, in a process group of its own.

    :param options: the deployment. :param caches: folder for all that a start leaves for the next one.
    """

    def __init__(self, shape: str, weights: Path, options: Mapping[str, Any], caches: Path):
        caches.mkdir(parents=True, exist_ok=True)
        self.shape = shape
        file = caches / f"{shape}.json"  # JSON is YAML
        file.write_text(json.dumps(options))
        environment = _environment(caches)

        def command(folder: Path, port: int) -> list[str]:
            return [
                "env", *(f"{name}={value}" for name, value in environment.items()),
                sys.executable, "-m", "mstar", "serve", shape,
                "--weights", str(folder), "--config", str(file), "--port", str(port),
            ]  # fmt: skip

        contestant = Contestant("mstar", command, "/health/ready", {"ignore_eos": True}, lambda _: shape, "")
        super().__init__(contestant, weights)
        self.weights = weights

    def phases(self, timeout: float) -> dict[str, float]:
        """Seconds from the process's start until each phase was first seen, ``listening`` (the first answer of the
        port) and ``ready`` among them; looked at fifty times a second.

        :raises ServerError: it ended, failed, or is not ready in time.
        """
        seen: dict[str, float] = {}
        with httpx.Client(base_url=self.url, timeout=5, trust_env=False) as client:
            while (spent := time.perf_counter() - self.began) < timeout:
                self.check()
                try:
                    answer = client.get("/health/ready")
                except httpx.TransportError:
                    time.sleep(0.02)
                    continue
                spent = time.perf_counter() - self.began
                seen.setdefault("listening", spent)
                for model in answer.json().get("models", {}).values():
                    seen.setdefault(model["phase"], spent)
                if answer.status_code == 200:
                    seen.setdefault("ready", spent)
                    self._sample_every = SERVING_SAMPLE_S
                    return seen
                time.sleep(0.02)
        raise ServerError(f"not ready after {timeout:.0f} s; seen: {seen}; its last words: {self.reason()}")

    def __enter__(self) -> ShapeServer:
        self.began = time.perf_counter()
        super().__enter__()
        return self

    def log(self) -> list[str]:
        """The last lines that the server wrote."""
        size = os.fstat(self._output.fileno()).st_size
        text = os.pread(self._output.fileno(), 1 << 16, max(0, size - (1 << 16))).decode(errors="replace")
        return [line for line in text.replace("\r", "\n").splitlines() if line.strip()][-LOG_LINES:]


def _environment(caches: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
    return {
        "PYTHONPATH": path,
        "MSTAR_PLUGINS": "",
        "MSTAR_EXTRA_PLUGINS": "mstar_server.plugin,gpu.plugin",
        "MSTAR_CACHE": str(caches / "mstar"),
        "XDG_CACHE_HOME": str(caches / "xdg"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "FLASHINFER_WORKSPACE_BASE": str(caches / "flashinfer"),
        "CUDA_CACHE_PATH": str(caches / "cuda"),
    }


@contextmanager
def start(
    shape: str, weights: Path, options: Mapping[str, Any], caches: Path, timeout: float
) -> Iterator[tuple[ShapeServer, dict[str, Any]]]:
    """A ready server, and how it started: seconds until each phase, and between them."""
    with ShapeServer(shape, weights, options, caches) as server:
        try:
            reached = server.phases(timeout)
        except ServerError as error:
            raise ServerError("\n".join((str(error), *server.log()))) from None
        moments = sorted(reached.items(), key=lambda item: item[1])
        parts = {f"{a} → {b}": then - now for (a, now), (b, then) in itertools.pairwise(moments)}
        yield server, {"ready_s": reached["ready"], "reached_s": reached, "parts_s": parts, "log": server.log()}


def http(server: ShapeServer, sizes: Sizes, timeout: float) -> dict[str, Any]:
    """Tokens a second at many streams with long prompts; time to the first token at few streams with short ones."""
    streams, tokens = sizes.http
    few, short, rounds = sizes.first_token
    draw = random.Random(11)

    def level(streams: int, prompt: int, tokens: int, count: int) -> dict[str, Any]:
        contestant = server.contestant
        bodies = [contestant.body(server.weights, text_of(draw, prompt), tokens) for _ in range(count)]
        return summary(run_shares(server.url, bodies, streams, timeout))

    level(streams, sizes.prompt, 16, streams)  # warm-up
    found = {"throughput": level(streams, sizes.prompt, tokens, streams)}
    level(few, short, 8, few)
    found["first_token"] = level(few, short, 32, few * rounds)
    found["first_token"]["ttft_ms_p50"] = 1e3 * found["first_token"]["ttft"]["p50"]
    return found


def evict(folder: Path) -> None:
    """Drop the files of *folder* from the system's cache, so that the next reader gets them from the disk."""
    for file in folder.glob("*.safetensors"):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


_TEMPLATE_TOKENS = 20
"""About what the chat template adds to a message."""
_LETTERS_A_TOKEN = 1.2
"""Of the tokenizer of these checkpoints, in English."""


def text_of(draw: random.Random, tokens: int) -> str:
    """A text of about *tokens* tokens with its template, which begins like no other."""
    letters = max(12, int(_LETTERS_A_TOKEN * (tokens - _TEMPLATE_TOKENS)))
    text = f"{draw.randrange(10**9):09} "
    while len(text) < letters:
        text += draw.choice(SENTENCES) + " "
    return text[:letters]

"""The servers of the chat benchmark: how each is started, asked and stopped, and how much memory it takes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

__all__ = ["CONTESTANTS", "Contestant", "RunningServer", "ServerError", "miniature"]

STOP_S = 10.0
"""Seconds that a server has to stop by itself."""


class ServerError(Exception):
    """A server could not be started, or ended; the message gives the reason."""


LOADING_SAMPLE_S, SERVING_SAMPLE_S = 0.05, 0.5
"""Seconds between two looks at the memory: loading has short peaks, and serving must not be disturbed."""


@dataclass(frozen=True)
class Contestant:
    """A server that can be measured.

    :param command: from the weights' folder and a port to the command line.
    :param ready: path that answers 200 once the model is loaded.
    :param extras: fields of a request beside the common ones.
    :param model: from the weights' folder to the model's name in requests.
    :param hint: how to get what it needs.
    """

    name: str
    command: Callable[[Path, int], Sequence[str]]
    ready: str
    extras: Mapping[str, Any]
    model: Callable[[Path], str]
    hint: str

    def body(self, weights: Path, prompt: str, tokens: int) -> dict[str, Any]:
        """A streamed, greedy chat request for *tokens* new tokens."""
        return {
            "model": self.model(weights),
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extras,
        }


class RunningServer:
    """A server process, in a process group of its own: ``with RunningServer(...) as server:`` until it is stopped.

    Its output goes to a file of which :meth:`reason` gives the end. A thread samples the resident memory of the process
    and its descendants, often while the model is loaded and rarely while the clock runs; pages that several of them
    share count in each.
    """

    def __init__(self, contestant: Contestant, weights: Path):
        self.contestant = contestant
        self.peak_rss = 0
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = list(contestant.command(weights, port))
        self._stopping = threading.Event()
        self._sample_every = LOADING_SAMPLE_S

    def __enter__(self) -> RunningServer:
        self._output = tempfile.TemporaryFile()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._output.close()
            raise ServerError(
                f"{self._command[0]} cannot be started ({error.strerror}); {self.contestant.hint}"
            ) from None
        self._sampler = threading.Thread(target=self._sample, name="memory sampler", daemon=True)
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        family = self._family()  # before the parent ends: afterwards its descendants are no longer found by it
        self._process.terminate()  # the parent alone: it stops its children in order
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        _kill_group(self._process.pid)
        for process in family:  # and what has left the group
            _kill(process)
        self._process.wait(STOP_S)
        _wait_gone(family)
        self._sampler.join()
        self._output.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout: float) -> float:
        """Wait until the server is ready; returns the seconds since this call.

        :raises ServerError: it ended, or it is not ready after *timeout* seconds.
        """
        began = time.monotonic()
        with httpx.Client(base_url=self.url, timeout=5, trust_env=False) as client:
            while (waited := time.monotonic() - began) < timeout:
                self.check()
                try:
                    if client.get(self.contestant.ready).status_code == 200:
                        self._sample_every = SERVING_SAMPLE_S
                        return waited
                except httpx.TransportError:  # nothing listens yet
                    pass
                time.sleep(0.2)
        raise ServerError(f"not ready after {timeout:.0f} s; its last words: {self.reason()}")

    def check(self, grace: float = 0.0) -> None:
        """Raise :class:`ServerError` when the process has ended, or ends within *grace* seconds."""
        try:
            status = self._process.wait(grace)
        except subprocess.TimeoutExpired:
            return
        raise ServerError(f"ended with status {status}: {self.reason()} ({self.contestant.hint})")

    def reason(self) -> str:
        """The last line that the server wrote."""
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), 4096, max(0, size - 4096)).decode(errors="replace")
        lines = [line.strip() for line in tail.splitlines() if line.strip()]
        return lines[-1] if lines else "nothing"

    def _family(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _sample(self) -> None:
        while True:
            self.peak_rss = max(self.peak_rss, sum(_rss(process) for process in self._family()))
            if self._stopping.wait(self._sample_every):
                return


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(group, signal.SIGKILL)


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _wait_gone(processes: Sequence[psutil.Process]) -> None:
    """Wait until killed *processes* run no more. One that its new parent has not reaped yet holds nothing."""
    deadline = time.monotonic() + STOP_S
    while any(not _ended(process) for process in processes):
        if time.monotonic() > deadline:
            raise ServerError(f"killed, and still there: {processes}")
        time.sleep(0.01)


def _ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _program(name: str) -> str:
    """The command *name* beside this Python, or else on the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name


def _mstar(*options: str) -> Callable[[Path, int], list[str]]:
    def command(weights: Path, port: int) -> list[str]:
        where = ("--device", "cpu", "--weights", str(weights), "--host", "127.0.0.1", "--port", str(port))
        return [_program("mstar"), "serve", "smollm2", *where, *options]

    return command


def _transformers(*options: str) -> Callable[[Path, int], list[str]]:
    def command(weights: Path, port: int) -> list[str]:
        where = ("--device", "cpu", "--host", "127.0.0.1", "--port", str(port))
        return [_program("transformers"), "serve", str(weights), *where, *options]

    return command


def miniature(key: str) -> Contestant:
    """Our server with a model that computes next to nothing and needs no weights (:mod:`mstar.testing.miniatures`)."""

    def command(weights: Path, port: int) -> list[str]:
        del weights
        plugins = "MSTAR_EXTRA_PLUGINS=mstar.testing.miniatures"
        return ["env", plugins, sys.executable, "-m", "mstar", "serve", key, "--port", str(port)]

    return Contestant("mstar", command, "/health/ready", {}, lambda weights: key, "it comes with mstar-core")


# An end token that no vocabulary has: the answers run to max_tokens, as ours do with ignore_eos. do_sample must be said
# again, since this replaces the model's generation config.
_NO_END = {"generation_config": json.dumps({"eos_token_id": -1, "pad_token_id": 0, "do_sample": False})}
_OURS = "needed: pip install mstar-core mstar-demo"
_SERVING = 'needed: pip install "transformers[serving]" accelerate'

CONTESTANTS: Mapping[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        Contestant("mstar", _mstar(), "/health/ready", {"ignore_eos": True}, lambda weights: "smollm2", _OURS),
        Contestant(
            "mstar-bf16", _mstar("--dtype", "bfloat16"), "/health/ready", {"ignore_eos": True},
            lambda weights: "smollm2", _OURS,
        ),
        Contestant("transformers", _transformers(), "/health", _NO_END, str, _SERVING),
        Contestant(
            "transformers-cb", _transformers("--continuous-batching"), "/health", _NO_END, str, _SERVING
        ),
    )
}  # fmt: skip
"""By name: ours in its default dtype (float32) and in that of the weights, which the others use; ``transformers
serve``, and that with its continuous batching."""

"""Requests through real servers and real worker processes: time limits, cancelling, workers that hang or are killed,
models on demand."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from .serving import Server, serving

LONG = {"model": "mini_chat", "text": "say much", "model_kwargs": {"max_tokens": 200}}
PLUGINS = ("mstar.testing.miniatures", "tests.impatient")


def until(condition: Callable[[], Any], seconds: float = 180.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def workers(*keys: str) -> list[psutil.Process]:
    """The worker processes of models *keys* that live."""
    found = []
    for process in psutil.Process().children():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue  # it is ending
        if words[-2:-1] == ["mstar-worker"] and words[-1] in keys:
            found.append(process)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("mini_chat", extra_plugins=PLUGINS, executor="impatient") as running:
        yield running


def test_a_cancel_by_id_ends_the_request_and_frees_all(server: Server) -> None:
    headers = {"X-Request-ID": "to-be-cancelled"}
    # a slow reader: its request waits for it (back-pressure) until it is cancelled
    with server.http.stream("POST", "/generate", json={**LONG, "streaming": True}, headers=headers) as answer:
        assert answer.headers["x-request-id"] == "to-be-cancelled"
        reply = server.http.delete("/v1/requests/to-be-cancelled")
        lines = [json.loads(line) for line in answer.iter_lines()]
    if reply.status_code == 404:  # it had ended before: a whole answer, then
        assert lines[-1]["finish_reason"] != "cancelled"
    else:
        assert lines[-1]["type"] == "done"
    assert all(pool["used"] == 0 for pool in server.pools()["mini_chat"].values())


def test_a_worker_that_hangs(server: Server) -> None:
    """Its requests end: at their own time limit, else when the worker is given up; and another one takes its place."""
    (worker,) = workers("mini_chat")
    os.kill(worker.pid, signal.SIGSTOP)
    answers: dict[str, Any] = {}

    def ask(name: str, **headers: str) -> None:
        began = time.monotonic()
        answers[name] = (server.http.post("/generate", json=LONG, headers=headers), time.monotonic() - began)

    threads = [
        threading.Thread(target=ask, args=("limited",), kwargs={"X-Request-Timeout": "0.5"}),
        threading.Thread(target=ask, args=("patient",)),
    ]
    for thread in threads:
        thread.start()
    until(lambda: server.http.get("/health/ready").status_code == 503)
    for thread in threads:
        thread.join()
    limited, seconds = answers["limited"]
    assert (limited.status_code, limited.json()["error"]["code"]) == (504, "timeout")
    assert "the request took longer than 0." in limited.json()["error"]["message"]
    assert seconds < 7.0, "before the worker was given up"
    patient, _ = answers["patient"]
    assert (patient.status_code, patient.json()["error"]["code"]) == (503, "worker_died")
    assert "no sign of life" in patient.json()["error"]["message"]
    assert int(patient.headers["retry-after"]) >= 1
    until(lambda: server.http.get("/health/ready").status_code == 200)
    assert server.http.post("/generate", json=LONG).status_code == 200
    assert not worker.is_running()
    assert len(workers("mini_chat")) == 1


def test_a_worker_that_is_killed_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    figures = importlib.import_module("kill_worker").run(kills=2, clients=4, seed=1, ready_within_s=90.0)
    assert figures["faults"] == []
    assert figures["kills"] == 2
    assert any("worker_died" in code for code in figures["errors"])


def test_models_on_demand_have_a_worker_only_while_they_are_used() -> None:
    keys = ("mini_tts", "mini_seq2seq")
    with serving(
        on_demand=keys, extra_plugins=PLUGINS,
        server_options={"idle_unload_s": 0.0, "max_loaded": 1, "load_wait_s": 90.0},
    ) as server:  # fmt: skip
        before = set(os.listdir("/dev/shm"))
        assert workers(*keys) == []
        voices = server.http.get("/v1/audio/voices").json()["data"]
        assert [(voice["id"], voice["models"]) for voice in voices][:1] == [("ann", ["mini_tts"])]
        assert workers(*keys) == [], "nothing is loaded for a list"
        for key in keys:
            reply = server.http.post("/generate", json={**LONG, "model": key}, timeout=120)
            assert reply.status_code == 200, reply.text
            until(lambda: workers(*keys) == [])
            listing = server.http.get("/v1/models").json()["data"]
            assert [model["state"] for model in listing] == ["unloaded", "unloaded"]
        until(lambda: not {name for name in set(os.listdir("/dev/shm")) - before if _mine(name)})


def _mine(name: str) -> bool:
    """Whether folder *name* of shared memory is open in this process."""
    links = (os.path.realpath(f"/proc/self/fd/{entry}") for entry in os.listdir("/proc/self/fd"))
    return name.startswith("mstar-") and any(f"/dev/shm/{name}" in link for link in links)


if sys.platform != "linux":
    pytest.skip("processes are looked at through /proc", allow_module_level=True)

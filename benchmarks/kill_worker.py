"""Kills the worker of a server under load: ``python benchmarks/kill_worker.py [--kills N] [--clients N]``.

The server is `mstar serve` with a miniature; clients ask it without a pause, half of them for streams. Each kill is a
``SIGKILL`` of the worker process at a random moment. Promises P4 and P8: every request ends with a result or a typed
error, the server is ready again within 10 s, and nothing is left behind: the pools are empty, and the server has as
many open files, shared-memory folders and processes as before. Ends with status 1 if any of that does not hold. The
figures go to ``benchmarks/results/kill_worker.json``, unless ``--quick`` is given.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from chat_servers import RunningServer, miniature
from common import environment, percentiles, table, write_result

MODEL = "mini_chat"
SETTLE_S, GIVE_UP_S = 15.0, 120.0
SHARED = Path("/dev/shm")


@dataclass
class Ends:
    """How requests ended. *untyped*: what no client can make sense of, in words."""

    results: int = 0
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    untyped: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.results + self.errors.total() + len(self.untyped)


class Load:
    """Clients that ask one request after the other until :meth:`stop`."""

    def __init__(self, url: str, clients: int):
        self.ends, self._stopping, self._lock = Ends(), threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(url, number)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        hanging = sum(thread.is_alive() for thread in self._threads)
        if hanging:
            self.ends.untyped.append(f"{hanging} requests have not ended a minute later")

    def _ask(self, url: str, number: int) -> None:
        streaming = number % 2 == 1
        body = {"model": MODEL, "text": f"client {number}", "streaming": streaming, "model_kwargs": {"max_tokens": 200}}
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
            while not self._stopping.is_set():
                try:
                    with client.stream("POST", "/generate", json=body) as answer:
                        answer.read()
                    self._note(answer, streaming)
                    if answer.status_code != 200:
                        time.sleep(0.25)  # a client that is turned away waits a moment, far less than it is told to
                except httpx.HTTPError as error:
                    with self._lock:
                        self.ends.untyped.append(f"{type(error).__name__}: {error}")

    def _note(self, answer: httpx.Response, streaming: bool) -> None:
        code, fault = "", ""
        try:
            last = json.loads(answer.text.strip().splitlines()[-1])
            if "error" in last:
                code = f"{answer.status_code if answer.status_code != 200 else 'in the stream'} {last['error']['code']}"
                if answer.status_code in (429, 503) and "retry-after" not in answer.headers:
                    fault = f"{code} without Retry-After"
                if last["error"]["code"] == "internal_error":
                    fault = code
            elif streaming and last["type"] != "done":
                fault = "a stream without an end"
        except (ValueError, LookupError, TypeError):
            fault = f"status {answer.status_code}: {answer.text[-80:]!r}"
        with self._lock:
            if fault:
                self.ends.untyped.append(fault)
            elif code:
                self.ends.errors[code] += 1
            else:
                self.ends.results += 1


def holdings(server: RunningServer) -> dict[str, int]:
    """What the server has open: files, folders of shared memory, processes below it."""
    process = psutil.Process(server.pid)
    links = []
    for entry in Path(f"/proc/{server.pid}/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue  # it was closed meanwhile
    files = [link for link in links if not link.startswith("socket:")]
    folders = {Path(*Path(link).parts[:4]) for link in links if link.startswith(f"{SHARED}/mstar-")}
    return {"files": len(files), "sockets": len(links) - len(files), "folders": len(folders),
            "processes": len(process.children(recursive=True))}  # fmt: skip


def worker_of(server: RunningServer) -> psutil.Process | None:
    """The worker process, once there is one."""
    found = [child for child in psutil.Process(server.pid).children() if "mstar-worker" in " ".join(child.cmdline())]
    return found[0] if found else None


def at_rest(server: RunningServer, client: httpx.Client, want: dict[str, int] | None) -> tuple[dict[str, int], str]:
    """What the server holds when it has nothing to do, and what its pools still hold (in words, empty if nothing).
    Waits until it has no more than *want*, for a while."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        worker: Any = client.get("/health").json()["models"][MODEL].get("worker") or {}
        used = {name: pool["used"] for name, pool in worker.get("resources", {}).items() if pool["used"]}
        busy = not worker or worker["running"] or worker["waiting"] or used
        now = holdings(server)
        more = want is not None and any(now[name] > want[name] for name in want)
        if (not busy and not more) or time.monotonic() > deadline:
            return now, f"{worker}" if busy else ""
        time.sleep(0.1)


def kill_once(server: RunningServer, client: httpx.Client, pause: float) -> float:
    """Kill the worker after *pause* seconds. Returns the seconds until the server was ready again, having said in
    between that it was not. Raises :class:`TimeoutError` when it does not."""
    time.sleep(pause)
    worker = worker_of(server)
    assert worker is not None, "a ready server has a worker"
    worker.kill()
    began, told = time.monotonic(), False
    while (waited := time.monotonic() - began) < GIVE_UP_S:
        status = client.get("/health/ready").status_code
        told = told or status == 503
        if status == 200 and told:
            return waited
        time.sleep(0.01)
    raise TimeoutError(f"not ready {waited:.0f} s after a kill")


def run(kills: int, clients: int, seed: int, ready_within_s: float, minutes: float = 60.0) -> dict[str, Any]:
    """The figures, with ``faults``: sentences about what does not hold."""
    rng, faults, back = random.Random(seed), [], []
    until = time.monotonic() + 60 * minutes
    with RunningServer(miniature(MODEL), Path()) as server:
        server.wait_ready(120)
        with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:
            Load(server.url, clients).stop()  # what is made once is there: threads, caches
            before, _ = at_rest(server, client, None)
            load = Load(server.url, clients)
            try:
                while len(back) < kills and time.monotonic() < until:
                    seconds = kill_once(server, client, rng.uniform(0.2, 1.0))
                    back.append(seconds)
            except TimeoutError as error:
                faults.append(str(error))
            finally:
                load.stop()
            after, held = at_rest(server, client, before)
    ends = load.ends
    faults += [f"ready only {seconds:.1f} s after a kill" for seconds in back if seconds > ready_within_s]
    faults += [
        f"{after[name]} {name} open afterwards, {before[name]} before" for name in before if after[name] > before[name]
    ]
    faults += [f"the pools hold something: {held}"] if held else []
    faults += sorted(set(ends.untyped))
    if not ends.results or (kills and not ends.errors):
        faults.append("the load was no load: no results, or nobody noticed a kill")
    return {
        "kills": len(back),
        "ready_again_s": back,
        "requests": ends.total,
        "results": ends.results,
        "errors": dict(ends.errors),
        "untyped": ends.untyped,
        "before": before,
        "after": after,
        "faults": faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ready-within", type=float, default=10.0, help="seconds, on an idle machine")
    parser.add_argument("--minutes", type=float, default=60.0, help="kill no more after so long")
    parser.add_argument("--quick", action="store_true", help="print, write nothing")
    options = parser.parse_args()
    facts = environment(("torch",))
    figures = run(options.kills, options.clients, options.seed, options.ready_within, options.minutes)
    shown = {
        key: value for key, value in figures.items() if key not in ("ready_again_s", "errors", "untyped", "faults")
    }
    if figures["ready_again_s"]:
        again = percentiles(figures["ready_again_s"])
        shown["ready again, s: median, worst"] = f"{again['p50']:.1f}, {again['max']:.1f}"
    rows = [{"figure": name, "value": str(value)} for name, value in (*shown.items(), *figures["errors"].items())]
    table("worker killed under load", rows, ["figure", "value"])
    for fault in figures["faults"]:
        print(f"FAULT: {fault}")
    if not options.quick:
        settings = {"kills": options.kills, "clients": options.clients, "seed": options.seed, "model": MODEL}
        write_result("kill_worker", figures, settings, facts)
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())

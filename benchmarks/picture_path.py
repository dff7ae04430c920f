"""A picture's way from its worker to a client, without a model: what HTTP adds to a picture that is there already.

A worker in a process of its own gives the noise of 1024 x 1024 pixels as soon as it is asked. Two ways take turns, one
picture at a time and several at once: *http*, ``POST /v1/images/generations`` read by a client on a plain socket, and
*offline*, the same service read in the process that has it, to the pixels. Their difference is what HTTP costs a
picture on this machine, the file and its text (*file*, alone in a process) with it.

    python benchmarks/picture_path.py                      # writes benchmarks/results/picture_path.json
    python benchmarks/picture_path.py --quick              # prints only
    python benchmarks/picture_path.py --before CHECKOUT    # the server as it is there takes turns too
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import environment, table, write_result
from http_cost import Served
from http_path.pictures import SIDE

MODEL = "flux2_klein"
PACKAGES = ("isal", "pybase64", "uvicorn", "uvloop", "msgspec", "numpy")
_BODY = {"prompt": "noise", "size": f"{SIDE}x{SIDE}", "model": MODEL}


def service_of(folder: str) -> tuple[Any, Any]:
    """The service under test, of the checkpoint in *folder*, and its registry."""
    from mstar.plugins import load_plugins
    from mstar.registry import Registry
    from mstar.runtime.service import open_service
    from mstar.settings import Settings

    plugins = ("mstar_server.plugin", "mstar_diffusion.plugin", "http_path.pictures")
    settings = Settings(plugins=(), extra_plugins=plugins)
    registry = Registry(load_plugins(settings))
    deployment = {"executor": "noise", "weights": folder, "max_concurrent_requests": 64}
    return open_service(MODEL, settings, deployment, registry), registry


def serve_pictures(port: int, folder: str, checkout: Path | None = None) -> None:
    """Serve until SIGTERM. *checkout*: whose code; default: that which is installed."""
    if checkout is not None:  # nothing of mstar has been imported in the process that forks
        parts = ("core", "server", "plugins/mstar-diffusion")
        sys.path[:0] = [str(checkout / part / "src") for part in parts]
    from mstar_server.options import ServerOptions
    from mstar_server.run import serve

    service, registry = service_of(folder)
    serve({MODEL: service}, registry, ServerOptions(port=port, drain_s=1))


class _Http:
    """A server and clients that keep their connections."""

    def __init__(self, folder: str, most: int, checkout: Path | None = None):
        self._served, self._most = Served(serve_pictures, folder, checkout), most

    def connect(self) -> None:
        from image.over_http import Clients  # imports mstar: after every server has been forked

        self._served.wait("/health/ready")
        self._clients = Clients(f"127.0.0.1:{self._served.port}", _BODY, self._most)

    def ask(self, count: int) -> tuple[float, float]:
        """Seconds until *count* pictures that were asked for at once are there, and seconds of the server's CPU."""
        cpu, began = self._served.cpu(), time.perf_counter()
        self.answers = self._clients.ask(count)
        return time.perf_counter() - began, self._served.cpu() - cpu

    def end(self) -> None:
        self._served.end()


class _Offline:
    """The service in this process."""

    def __init__(self, folder: str):
        self._folder = folder

    def connect(self) -> None:
        import uvloop

        self._runner = asyncio.Runner(loop_factory=uvloop.Loop)
        self._service, _ = service_of(self._folder)
        self._runner.run(self._service.start())

    def ask(self, count: int) -> tuple[float, float]:
        cpu, began = time.process_time(), time.perf_counter()
        self._runner.run(self._read(count))
        return time.perf_counter() - began, time.process_time() - cpu

    async def _read(self, count: int) -> None:
        from mstar.spec.processor import FramesDelta
        from mstar.spec.tasks import ImageTask

        async def one() -> int:
            task = ImageTask(prompt=_BODY["prompt"], size=(SIDE, SIDE), knobs=self._service.spec.knobs())
            answer = await self._service.generate(task)
            return sum([delta.frames.size async for delta in answer if isinstance(delta, FramesDelta)])

        sizes = await asyncio.gather(*(one() for _ in range(count)))
        if set(sizes) != {SIDE * SIDE * 3}:
            raise RuntimeError(f"pictures of {sizes} bytes")

    def end(self) -> None:
        self._runner.run(self._service.stop())
        self._runner.close()


def compare(at_once: Sequence[int], rounds: int, checkout: Path | None) -> list[dict[str, Any]]:
    """For each number at once and each way the median milliseconds until all are there, and of CPU a picture."""
    with tempfile.TemporaryDirectory() as name:
        _write_checkpoint(name)
        ways: dict[str, Any] = {"http": _Http(name, max(at_once))}
        if checkout is not None:
            ways["before"] = _Http(name, max(at_once), checkout)
        ways["offline"] = _Offline(name)
        begun = []
        try:
            for way in ways.values():
                begun.append(way)
                way.connect()
            rows = [row for count in at_once for row in _rounds(ways, count, rounds)]
            return [*rows, _file_row(ways["http"].answers[0], rounds)]
        finally:
            for way in begun:
                way.end()


def _rounds(ways: dict[str, Any], count: int, rounds: int) -> list[dict[str, Any]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, way in ways.items():
            times = way.ask(count)
            if number >= 2:  # warm
                found[name].append(times)
    return [
        {
            "way": name,
            "at once": count,
            "ms": statistics.median(wall for wall, _ in times) * 1e3,
            "least ms": min(wall for wall, _ in times) * 1e3,
            "cpu ms a picture": statistics.median(cpu for _, cpu in times) * 1e3 / count,
        }
        for name, times in found.items()
    ]


def _file_row(answer: bytes, rounds: int) -> dict[str, Any]:
    from image.over_http import encoding_seconds

    return {"way": "file", "at once": 1, "ms": encoding_seconds(answer, rounds) * 1e3}


def _write_checkpoint(folder: str) -> None:
    """In a process of its own: this one imports nothing of mstar before it forks."""
    import subprocess

    subprocess.run([sys.executable, "-m", "mstar_diffusion.flux2.tiny", folder], check=True)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--at-once", default="1,4")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="the server as it is there takes turns too")
    parser.add_argument("--quick", action="store_true", help="prints only")
    args = parser.parse_args(words)
    facts = environment(PACKAGES)
    rows = compare([int(count) for count in args.at_once.split(",")], args.rounds, args.before)
    shown = [{name: f"{fact:.1f}" if isinstance(fact, float) else fact for name, fact in row.items()} for row in rows]
    table("milliseconds", shown, ["way", "at once", "ms", "least ms", "cpu ms a picture"])
    if not args.quick:
        write_result("picture_path", rows, {"rounds": args.rounds, "side": SIDE}, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

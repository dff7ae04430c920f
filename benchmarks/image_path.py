"""What HTTP adds to a picture of 1024 x 1024: its file, the file's text, and their way to the client.

A worker without a model gives a picture of noise some time after it was asked (:mod:`http_path.painter`); all the rest
is what a picture passes. Contenders take turns: *offline*, the service alone, read in the process that has it; *http*,
``POST /v1/images/generations``, whose clients read answers and do not look into them; *before*, with ``--before
CHECKOUT``, the same from another checkout of this repository. What http takes longer than offline is what it adds.

    python benchmarks/image_path.py --out FILE.json
    python benchmarks/image_path.py --at-once 1 --before ../before
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from common import environment, table
from http_cost import Served

MODEL, PROMPT = "z_image_turbo", "A lighthouse on a cliff at dawn"


def service_of(folder: str) -> tuple[Any, Any]:
    """The service under test and its registry."""
    from mstar.plugins import load_plugins
    from mstar.registry import Registry
    from mstar.runtime.service import open_service
    from mstar.settings import Settings

    settings = Settings(
        plugins=(), extra_plugins=("mstar_server.plugin", "mstar_diffusion.plugin", "http_path.painter")
    )
    registry = Registry(load_plugins(settings))
    deployment = {"executor": "painter", "weights": folder, "max_concurrent_requests": 64}
    return open_service(MODEL, settings, deployment, registry), registry


def serve_pictures(port: int, folder: str, checkout: Path | None = None) -> None:
    """Serve until SIGTERM. *checkout*: whose code; default: that which is on the path."""
    if checkout is not None:  # nothing of mstar has been imported in the process that forks
        sys.path[:0] = [str(checkout / part / "src") for part in ("core", "server", "plugins/mstar-diffusion")]
    from mstar_server.options import ServerOptions
    from mstar_server.run import serve

    service, registry = service_of(folder)
    serve({MODEL: service}, registry, ServerOptions(port=port, drain_s=1))


def over_http(port: int, count: int, rounds: int) -> list[float]:
    """Seconds of each of *rounds* in which *count* pictures are asked for at once; run in a process of its own."""
    from image.over_http import Clients

    body = {"model": MODEL, "prompt": PROMPT, "size": "1024x1024", "num_inference_steps": 1}
    with Clients(f"127.0.0.1:{port}", body, count) as clients:
        clients.ask(count)
        return [_took(lambda: clients.ask(count)) for _ in range(rounds)]


def offline(folder: str, count: int, rounds: int) -> list[float]:
    """The same by the service alone; run in a process of its own."""
    import uvloop

    from mstar.spec.processor import FramesDelta
    from mstar.spec.tasks import ImageTask

    async def one(service: Any) -> None:
        knobs = service.spec.knobs(num_inference_steps=1, seed=0)
        answer = await service.generate(ImageTask(prompt=PROMPT, images=(), size=(1024, 1024), knobs=knobs))
        assert [delta async for delta in answer if isinstance(delta, FramesDelta)]

    async def main() -> list[float]:
        service, _ = service_of(folder)
        await service.start()
        took = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            await asyncio.gather(*(one(service) for _ in range(count)))
            took.append(time.perf_counter() - began)
        await service.stop()
        return took[1:]

    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        return runner.run(main())


def _took(run: Any) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(folder: str, count: int, rounds: int, before: Path | None) -> dict[str, Any]:
    """Milliseconds, medians over all rounds, and CPU milliseconds a picture of the serving process."""
    servers = {"http": Served(serve_pictures, folder)}
    if before is not None:
        servers["before"] = Served(serve_pictures, folder, before)
    took: dict[str, list[float]] = {name: [] for name in (*servers, "offline")}
    cpu: dict[str, list[float]] = {name: [] for name in servers}
    try:
        for server in servers.values():
            server.wait("/health/ready")
        for _ in range(3):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                for name, server in servers.items():
                    pool.apply(over_http, (server.port, count, 1))
                    began = server.cpu()
                    took[name] += pool.apply(over_http, (server.port, count, rounds))
                    cpu[name].append((server.cpu() - began) / (count * (rounds + 1)))
                took["offline"] += pool.apply(offline, (folder, count, rounds))
    finally:
        for server in servers.values():
            server.end()
    found = {f"{name}_ms": 1e3 * statistics.median(each) for name, each in took.items()}
    found |= {f"{name}_least_ms": 1e3 * min(each) for name, each in took.items()}
    found |= {f"{name}_cpu_ms": 1e3 * statistics.median(each) for name, each in cpu.items()}
    added = {f"{name}_adds_ms": found[f"{name}_ms"] - found["offline_ms"] for name in servers}
    return {"at_once": count, **added, **found}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", default="1,4", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="three times so many (default: %(default)s)")
    parser.add_argument("--work-ms", type=float, default=50.0, help="how long a picture takes (default: %(default)s)")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="mstar as it is there takes turns too")
    parser.add_argument("--out", type=Path, help="write the results to this file (JSON)")
    args = parser.parse_args(words)
    os.environ["IMAGE_PATH_WORK_S"] = str(args.work_ms / 1e3)
    with tempfile.TemporaryDirectory() as folder:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(_write, (folder,))
        counts = [int(number) for number in args.at_once.split(",")]
        rows = [measure(folder, count, args.rounds, args.before) for count in counts]
    figures = [name for name in rows[0] if name != "at_once"]
    table("a picture's way", [{"figure": name, **{str(r["at_once"]): r[name] for r in rows}} for name in figures],
          ["figure", *(str(row["at_once"]) for row in rows)])  # fmt: skip
    if args.out is not None:
        facts = environment(("isal", "pybase64", "uvicorn", "uvloop", "httptools", "msgspec"))
        args.out.write_text(
            json.dumps({"environment": facts, "work_ms": args.work_ms, "results": rows}, indent=2) + "\n"
        )


def _write(folder: str) -> None:
    from mstar_diffusion.z_image import tiny

    tiny.write(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])

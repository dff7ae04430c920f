"""What the HTTP path costs for each event and each request: beside the same path without HTTP, and beside a bare server.

A worker without a model gives a token a step to each request, in a process of its own as always; all the rest is what a
chat passes: processor, transport, renderer, adapter, chunks, uvicorn. Three contenders take turns, several rounds in one
run, with the same number of streams and tokens:

- *mstar*: ``/v1/chat/completions``, streamed;
- *offline*: the same service and worker, read in the process that has it;
- *bare*: FastAPI and uvicorn alone, whose events come from nowhere (:mod:`http_path.bare`).

Each server, the worker and the client are processes. CPU time is that of the serving process alone: on a machine that
has other things to do it says more than the clock.

    python benchmarks/http_cost.py                 # writes benchmarks/results/http_cost.json
    python benchmarks/http_cost.py --quick         # prints only
    python benchmarks/http_cost.py --profile FILE  # mstar only, under cProfile
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from common import environment, percentiles, table, write_result

FOLDER = Path(__file__).parent
MODEL = "mini_chat"


def service_of() -> tuple[Any, Any]:
    """The service under test and its registry."""
    from mstar.plugins import load_plugins
    from mstar.registry import Registry
    from mstar.runtime.service import open_service
    from mstar.settings import Settings

    settings = Settings(extra_plugins=("mstar.testing.miniatures", "http_path.worker"))
    registry = Registry(load_plugins(settings))
    deployment = {"executor": "path", "max_concurrent_requests": 4096}
    return open_service(MODEL, settings, deployment, registry), registry


def serve_mstar(listener: socket.socket, profile: str | None) -> None:
    """Serve until SIGTERM."""
    import uvloop

    from mstar_server.options import ServerOptions
    from mstar_server.run import serve_async

    async def main() -> None:
        service, registry = service_of()
        await serve_async({MODEL: service}, registry, ServerOptions(drain_s=1), listener)

    watch = cProfile.Profile() if profile else None
    if watch:
        watch.enable()
    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        runner.run(main())
    if watch:
        watch.disable()
        watch.dump_stats(str(profile))


class Served:
    """A server in a process of its own."""

    def __init__(self, target: Any, *arguments: Any):
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port = self._listener.getsockname()[1]
        self.process = multiprocessing.get_context("fork").Process(target=target, args=(self._listener, *arguments))
        self.process.start()
        self._facts = psutil.Process(self.process.pid)

    def wait(self, path: str) -> None:
        import httpx

        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}{path}").status_code < 500:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise SystemExit("a server did not become ready")

    def cpu(self) -> float:
        """Seconds of this process, its worker not included."""
        times = self._facts.cpu_times()
        return float(times.user + times.system)

    def end(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGTERM)
        self.process.join(30)
        self._listener.close()


def measure(server: Served, streams: int, tokens: int) -> dict[str, Any]:
    """One round of load on *server*."""
    from http_path.client import load

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(os.getpid)  # it has started and imported
        before = server.cpu()
        found: dict[str, Any] = pool.apply(load, (server.port, streams, tokens, MODEL))
    events = streams * tokens
    return {
        "events_s": events / found["seconds"],
        "cpu_us_event": (server.cpu() - before) / events * 1e6,
        "lost": found["lost"],
        "took": percentiles(found["took"]),
        "first": percentiles(found["first"]),
    }


def measure_offline(streams: int, tokens: int) -> dict[str, Any]:
    """The same through the service alone; run in a process of its own."""
    import uvloop

    from mstar.registry import Registry  # noqa: F401  (before the clock)
    from mstar.spec.tasks import ChatTask, Message, Text

    async def read(service: Any, task: Any) -> int:
        seen = 0
        async for _ in await service.generate(task):
            seen += 1
        return seen

    async def main() -> dict[str, Any]:
        service, _ = service_of()
        await service.start()
        knobs = service.spec.knobs(max_tokens=tokens)
        task = ChatTask(knobs=knobs, messages=(Message("user", (Text("hello"),)),))
        began, cpu = time.monotonic(), time.process_time()
        seen = await asyncio.gather(*(read(service, task) for _ in range(streams)))
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        await service.stop()
        events = streams * tokens
        return {
            "events_s": events / seconds,
            "cpu_us_event": cpu / events * 1e6,
            "lost": sum(count < tokens for count in seen),
        }

    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        return runner.run(main())


def compare(streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Medians of *rounds*, and the ratios of each round."""
    from http_path.bare import serve_bare

    mstar, bare = Served(serve_mstar, None), Served(serve_bare)
    found: dict[str, list[dict[str, Any]]] = {"mstar": [], "offline": [], "bare": []}
    try:
        mstar.wait("/health/ready")
        bare.wait("/docs")
        for server in (mstar, bare):
            measure(server, min(streams, 32), tokens)  # warm
        for _ in range(rounds):
            found["mstar"].append(measure(mstar, streams, tokens))
            found["bare"].append(measure(bare, streams, tokens))
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found["offline"].append(pool.apply(measure_offline, (streams, tokens)))
    finally:
        mstar.end()
        bare.end()
    return {"streams": streams, "tokens": tokens, **_summary(found)}


def _summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    def median(name: str, figure: str) -> float:
        return statistics.median(each[figure] for each in found[name])

    facts: dict[str, Any] = {}
    for name in found:
        facts[name] = {figure: median(name, figure) for figure in ("events_s", "cpu_us_event")}
        facts[name]["lost"] = sum(each["lost"] for each in found[name])
    for name in ("mstar", "bare"):
        facts[name]["took_p50"] = statistics.median(each["took"]["p50"] for each in found[name])
        facts[name]["took_p99"] = statistics.median(each["took"]["p99"] for each in found[name])
        facts[name]["first_p50"] = statistics.median(each["first"]["p50"] for each in found[name])
        facts[name]["first_p99"] = statistics.median(each["first"]["p99"] for each in found[name])
    for other in ("bare", "offline"):
        pairs = list(zip(found["mstar"], found[other], strict=True))
        facts[f"over_{other}"] = statistics.median(mine["events_s"] / its["events_s"] for mine, its in pairs)
        facts[f"cpu_{other}_over_mstar"] = statistics.median(
            its["cpu_us_event"] / mine["cpu_us_event"] for mine, its in pairs
        )
    return facts


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round; prints, writes nothing")
    parser.add_argument("--streams", default="1,64,1000", help="how many at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="events of each stream (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=0.0, help="least time of the worker's step (default: none)")
    parser.add_argument("--profile", metavar="FILE", help="only mstar, once for each number of streams")
    arguments = parser.parse_args(words)
    streams = [int(number) for number in arguments.streams.split(",")]
    rounds = 1 if arguments.quick else arguments.rounds
    os.environ["HTTP_COST_STEP_S"] = str(arguments.step_ms / 1e3)
    if arguments.profile:
        server = Served(serve_mstar, arguments.profile)
        server.wait("/health/ready")
        for number in streams:
            print(number, measure(server, number, arguments.tokens))
        server.end()
        return
    facts = environment(("fastapi", "starlette", "uvicorn", "uvloop", "httptools"))
    # with few streams, more tokens: a round should last
    results = [compare(n, arguments.tokens * max(1, min(16, 256 // n)), rounds) for n in streams]
    rows = [
        {"streams": result["streams"], "server": name, **result[name]}
        for result in results
        for name in ("mstar", "bare", "offline")
    ]
    table("HTTP path", rows, ("streams", "server", "events_s", "cpu_us_event", "lost", "took_p50", "took_p99"))
    ratios = [{k: v for k, v in result.items() if not isinstance(v, dict)} for result in results]
    columns = ("streams", "tokens", "over_bare", "over_offline", "cpu_bare_over_mstar", "cpu_offline_over_mstar")
    table("mstar's events a second over the others', and CPU", ratios, columns)
    if not arguments.quick:
        settings = {"tokens": arguments.tokens, "rounds": rounds, "step_ms": arguments.step_ms}
        write_result("http_cost", results, settings, facts)


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))
    main(sys.argv[1:])

"""What the HTTP path costs for each event and each request: beside the same path without HTTP, and a bare server.

A worker without a model gives a token a step to each request, in a process of its own as always; all the rest is what
a chat passes: processor, transport, renderer, adapter, chunks, uvicorn. Three contenders take turns, several rounds in
one run, with the same number of streams and tokens:

- *mstar*: ``/v1/chat/completions``, streamed;
- *offline*: the same service and worker, read in the process that has it;
- *bare*: FastAPI and uvicorn alone, whose events come from nowhere (:mod:`http_path.bare`);
- *before*, with ``--before CHECKOUT``: mstar from another checkout of this repository.

Each server, the worker and the client are processes. CPU time is that of the serving process alone: on a machine that
has other things to do it says more than the clock. Each round is made twice, with streams of many events and of one:
what a stream of one costs is a request's cost, and the difference is that of the events.

    python benchmarks/http_cost.py                 # writes benchmarks/results/http_cost.json
    python benchmarks/http_cost.py --step-ms 5 --streams 16,64   # at a pace, as a model has one: http_cost_paced.json
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


def serve_mstar(port: int, profile: str | None, checkout: Path | None = None) -> None:
    """Serve until SIGTERM. *checkout*: whose code; default: that which is installed."""
    if checkout is not None:  # nothing of mstar has been imported in the process that forks
        sys.path[:0] = [str(checkout / part / "src") for part in ("core", "server")]
    from mstar_server.options import ServerOptions
    from mstar_server.run import serve

    service, registry = service_of()
    watch = cProfile.Profile(time.thread_time) if profile else None
    if watch:
        watch.enable()
    serve({MODEL: service}, registry, ServerOptions(port=port, drain_s=1))
    if watch:
        watch.disable()
        watch.dump_stats(str(profile))


class Served:
    """A server in a process of its own: *target* is called with a port."""

    def __init__(self, target: Any, *arguments: Any):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.process = multiprocessing.get_context("fork").Process(target=target, args=(self.port, *arguments))
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
        """Seconds of this process, its worker not included. The kernel's scheduler counts nanoseconds, where it tells;
        of others there are hundredths of a second."""
        if (tasks := Path(f"/proc/{self.process.pid}/task")).is_dir():
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9
        times = self._facts.cpu_times()
        return float(times.user + times.system)

    def end(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGTERM)
        self.process.join(30)


def measure(server: Served, streams: int, tokens: int) -> dict[str, Any]:
    """One round of load on *server*."""
    from http_path.client import load

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(os.getpid)  # it has started and imported
        times = _times(streams)
        before = server.cpu()
        short: dict[str, Any] = pool.apply(load, (server.port, streams, 1, MODEL, times))
        between = server.cpu()
        found: dict[str, Any] = pool.apply(load, (server.port, streams, tokens, MODEL))
        after = server.cpu()
    return {
        "events_s": streams * tokens / found["seconds"],
        **_costs(between - before, after - between, streams, tokens),
        "lost": found["lost"] + short["lost"],
        "took": percentiles(found["took"]),
        "first": percentiles(found["first"]),
    }


def _times(streams: int) -> int:
    """How often streams of one event are asked for: enough of them to measure."""
    return max(1, 256 // streams)


def _costs(short_s: float, long_s: float, streams: int, tokens: int) -> dict[str, float]:
    """CPU in microseconds, of requests with one event and of each event after that."""
    request = short_s / (streams * _times(streams))
    return {
        "cpu_us_event_all": long_s / (streams * tokens) * 1e6,
        "cpu_us_event": (long_s / streams - request) / (tokens - 1) * 1e6,
        "cpu_us_request": request * 1e6,
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

    async def ask(service: Any, number: int) -> tuple[float, float, int]:
        """Seconds, seconds of CPU, and how many streams had events too few."""
        knobs = service.spec.knobs(max_tokens=number)
        task = ChatTask(knobs=knobs, messages=(Message("user", (Text("hello"),)),))
        began, cpu = time.monotonic(), time.process_time()
        seen = await asyncio.gather(*(read(service, task) for _ in range(streams)))
        return time.monotonic() - began, time.process_time() - cpu, sum(count < number for count in seen)

    async def main() -> dict[str, Any]:
        service, _ = service_of()
        await service.start()
        await ask(service, 1)  # warm, as the servers are
        short = [await ask(service, 1) for _ in range(_times(streams))]
        seconds, cpu, lost = await ask(service, tokens)
        await service.stop()
        return {
            "events_s": streams * tokens / seconds,
            **_costs(sum(each[1] for each in short), cpu, streams, tokens),
            "lost": lost + sum(each[2] for each in short),
        }

    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        return runner.run(main())


def compare(streams: int, tokens: int, rounds: int, checkout: Path | None) -> dict[str, Any]:
    """Medians of *rounds*, and the ratios of each round."""
    from http_path.bare import serve_bare

    servers = {"mstar": Served(serve_mstar, None), "bare": Served(serve_bare)}
    if checkout is not None:
        servers["before"] = Served(serve_mstar, None, checkout)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*servers, "offline")}
    try:
        for name, server in servers.items():
            server.wait("/docs" if name == "bare" else "/health/ready")
            measure(server, min(streams, 32), tokens)  # warm
        for _ in range(rounds):
            for name, server in servers.items():
                found[name].append(measure(server, streams, tokens))
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found["offline"].append(pool.apply(measure_offline, (streams, tokens)))
    finally:
        for server in servers.values():
            server.end()
    return {"streams": streams, "tokens": tokens, **_summary(found)}


def _summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    def median(name: str, figure: str) -> float:
        return statistics.median(each[figure] for each in found[name])

    facts: dict[str, Any] = {}
    for name in found:
        figures = ("events_s", "cpu_us_event", "cpu_us_event_all", "cpu_us_request")
        facts[name] = {figure: median(name, figure) for figure in figures}
        facts[name]["lost"] = sum(each["lost"] for each in found[name])
        if name != "offline":
            for what in ("took", "first"):
                for point in ("p50", "p99"):
                    facts[name][f"{what}_{point}"] = statistics.median(each[what][point] for each in found[name])
    for other in found.keys() - {"mstar"}:
        pairs = list(zip(found["mstar"], found[other], strict=True))
        facts[f"over_{other}"] = statistics.median(mine["events_s"] / its["events_s"] for mine, its in pairs)
        for figure in ("cpu_us_event", "cpu_us_request"):
            facts[f"{figure}_over_{other}"] = statistics.median(mine[figure] / its[figure] for mine, its in pairs)
    return facts


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round; prints, writes nothing")
    parser.add_argument("--streams", default="1,64,1000", help="how many at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="events of each stream (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=0.0, help="least time of the worker's step (default: none)")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="mstar as it is there takes turns too")
    parser.add_argument("--profile", metavar="FILE", help="only mstar, once for each number of streams")
    arguments = parser.parse_args(words)
    streams = [int(number) for number in arguments.streams.split(",")]
    rounds = 1 if arguments.quick else arguments.rounds
    os.environ["HTTP_COST_STEP_S"] = str(arguments.step_ms / 1e3)
    if arguments.profile:
        server = Served(serve_mstar, arguments.profile)
        server.wait("/health/ready")
        for number in streams:
            print(number, measure(server, number, max(2, arguments.tokens)))
        server.end()
        return
    facts = environment(("fastapi", "starlette", "uvicorn", "uvloop", "httptools"))
    # with few streams, more tokens: a round should last
    counts = [max(2, arguments.tokens * max(1, min(16, 256 // n))) for n in streams]
    results = [compare(n, count, rounds, arguments.before) for n, count in zip(streams, counts, strict=True)]
    names = [name for name in ("mstar", "before", "bare", "offline") if name in results[0]]
    rows = [{"streams": result["streams"], "server": name, **result[name]} for result in results for name in names]
    columns = ("streams", "server", "events_s", "cpu_us_event", "cpu_us_request", "lost", "took_p50", "took_p99")
    table("HTTP path", rows, columns)
    ratios = [{k: v for k, v in result.items() if not isinstance(v, dict)} for result in results]
    for other in names[1:]:
        names_of = (f"over_{other}", f"cpu_us_event_over_{other}", f"cpu_us_request_over_{other}")
        table(f"mstar's events a second and CPU over those of {other}", ratios, ("streams", "tokens", *names_of))
    if not arguments.quick:
        settings = {"tokens": arguments.tokens, "rounds": rounds, "step_ms": arguments.step_ms}
        write_result("http_cost_paced" if arguments.step_ms else "http_cost", results, settings, facts)


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))
    main(sys.argv[1:])

"""Chat on the CPU: M* and ``transformers serve`` on the same weights, at several numbers of concurrent streams.

Each server runs alone, once for each number of streams, and answers the same prompts (short, about 100, about 400
tokens) greedily. The linear floor, the speed of the model's linear layers alone at that batch, is the yardstick.

    python benchmarks/chat_cpu.py               # writes benchmarks/results/chat_cpu.json; an hour on two cores
    python benchmarks/chat_cpu.py --quick       # a few tokens, prints only
    python benchmarks/chat_cpu.py --servers mstar --streams 8

NOTES.md says what each figure means. ``transformers serve`` needs: pip install "transformers[serving]" accelerate
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from chat_client import AnswerError, run_level, summary
from chat_floor import floor
from chat_prompts import LENGTHS, prompts
from chat_servers import CONTESTANTS, Contestant, RunningServer, ServerError
from common import environment, table, write_result
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["Plan", "measure", "table_row"]

PACKAGES = ("torch", "transformers", "accelerate", "mstar-core", "mstar-server", "mstar-demo")
WARM_UP_TOKENS = 8
SPEED = ("server", "streams", "tokens/s", "of floor", "decode", "of floor ", "floor")
LATENCY = ("server", "streams", "first token ms", "inter-token ms", "peak RSS MB")

Say = Callable[[str, int | None], None]
"""Takes the phase, and how many answers are complete where that has changed."""


@dataclass(frozen=True)
class Plan:
    """What to measure. *timeout*: seconds that a start, a warm-up or a measurement may take, each."""

    weights: Path
    servers: Sequence[str]
    streams: Sequence[int]
    tokens: int
    rounds: int
    timeout: float

    def requests(self, streams: int) -> int:
        """Requests of a level: enough that every prompt length occurs."""
        return max(streams * self.rounds, len(LENGTHS))


def measure(contestant: Contestant, streams: int, plan: Plan, say: Say) -> dict[str, Any]:
    """Start *contestant*, warm it up, and measure it at *streams* concurrent streams.

    Returns the figures, or ``{"server", "streams", "failed": reason}``.
    """
    row: dict[str, Any] = {"server": contestant.name, "streams": streams}
    try:
        with RunningServer(contestant, plan.weights) as server:
            say("starting", None)
            row["start_s"] = server.wait_ready(plan.timeout)
            try:
                row |= _measure_ready(server, streams, plan, say)
            except (AnswerError, httpx.HTTPError):
                server.check(grace=1.0)  # when the server has ended, that is the reason
                raise
            row["peak_rss_mb"] = server.peak_rss / 1e6
    except (ServerError, AnswerError, TimeoutError, httpx.HTTPError) as error:
        reason = str(error).replace(str(plan.weights), "WEIGHTS")  # result files name no folder
        row["failed"] = f"{type(error).__name__}: {reason}"
    return row


def _measure_ready(server: RunningServer, streams: int, plan: Plan, say: Say) -> dict[str, Any]:
    contestant, count = server.contestant, plan.requests(streams)
    warm_up = min(WARM_UP_TOKENS, plan.tokens)
    first = [contestant.body(plan.weights, p, warm_up) for p in prompts(max(streams, len(LENGTHS)), 2 * streams)]
    then = [contestant.body(plan.weights, p, plan.tokens) for p in prompts(count, 2 * streams + 1)]
    say("warming up", None)
    asyncio.run(run_level(server.url, first, streams, plan.timeout))
    done = 0

    def count_up(answer: object) -> None:
        nonlocal done
        done += 1
        say("measuring", done)

    say("measuring", None)
    return summary(asyncio.run(run_level(server.url, then, streams, plan.timeout, count_up)))


def run(plan: Plan, floors: dict[int, float], rows: list[dict[str, Any]]) -> None:
    """Measure everything in *plan*, one server after the other, adding to *rows*."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), refresh_per_second=2) as progress:
        for name in plan.servers:
            for streams in plan.streams:
                what = f"{name}, {streams} streams"
                task = progress.add_task(what, total=plan.requests(streams))

                def say(phase: str, done: int | None, task: TaskID = task, what: str = what) -> None:
                    progress.update(task, description=f"{what}: {phase}", completed=done)

                row = measure(CONTESTANTS[name], streams, plan, say)
                rows.append(_with_floor(row, floors[streams]))
                say("failed" if "failed" in row else "done", None)


def _with_floor(row: dict[str, Any], floor_rate: float) -> dict[str, Any]:
    row["floor_tokens_per_s"] = floor_rate
    for rate, share in (("tokens_per_s", "share_of_floor"), ("decode_tokens_per_s", "decode_share_of_floor")):
        if row.get(rate) is not None:
            row[share] = row[rate] / floor_rate
    return row


def table_row(row: dict[str, Any]) -> dict[str, str]:
    """The cells of :data:`SPEED` and :data:`LATENCY`; a figure that was not measured is a dash."""
    cells = {"server": row["server"], "streams": str(row["streams"]), "floor": _rate(row["floor_tokens_per_s"])}
    if "failed" in row:
        return {**dict.fromkeys((*SPEED, *LATENCY), "–"), **cells, "tokens/s": "failed"}
    return {
        **cells,
        "tokens/s": _rate(row["tokens_per_s"]),
        "of floor": _percent(row["share_of_floor"]),
        "decode": _rate(row["decode_tokens_per_s"]),
        "of floor ": _percent(row.get("decode_share_of_floor")),
        "first token ms": _p50_p95(row["ttft"]),
        "inter-token ms": _p50_p95(row["inter_token"]),
        "peak RSS MB": f"{row['peak_rss_mb']:.0f}",
    }


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _p50_p95(found: dict[str, float] | None) -> str:
    return "–" if found is None else f"{1e3 * found['p50']:.0f} / {1e3 * found['p95']:.0f}"


def report(rows: Sequence[dict[str, Any]], tokens: int) -> None:
    """The tables, then why what failed did, and how busy this client was."""
    if not rows:
        return
    cells = [table_row(row) for row in rows]
    table(f"{tokens} new tokens each: all streams together", cells, SPEED)
    table("p50 / p95", cells, LATENCY)
    for row in rows:
        if "failed" in row:
            print(f"{row['server']} at {row['streams']} failed. {row['failed']}")
    if shares := [row["client_cpu_share"] for row in rows if "client_cpu_share" in row]:
        print(f"The client took at most {100 * max(shares):.1f} % of one core.")


def default_weights() -> Path:
    """The folder that ``mstar serve smollm2`` uses, fetched if need be."""
    from mstar.plugins import load_plugins
    from mstar.registry import Registry
    from mstar.runtime.opening import prepare_config
    from mstar.settings import Settings

    settings = Settings.from_env()
    registry = Registry(load_plugins(settings))
    folder = prepare_config(registry.model("smollm2"), settings, {}, registry).weights
    assert folder is not None, "smollm2 has weights"
    return Path(folder)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in CONTESTANTS]:
        raise argparse.ArgumentTypeError(f"no server {unknown[0]!r}; there are {', '.join(CONTESTANTS)}")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_positive(part.strip()) for part in text.split(",")]


def _plan(words: Sequence[str] | None) -> tuple[Plan, bool]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=_names, default=list(CONTESTANTS), help=f"from {','.join(CONTESTANTS)}")
    parser.add_argument("--streams", type=_counts, help="numbers of concurrent streams (default: 1,8,32; quick: 1,4)")
    parser.add_argument("--tokens", type=_positive, help="new tokens per answer (default: 64; quick: 12)")
    parser.add_argument("--rounds", type=_positive, help="requests per stream (default: 3; quick: 1)")
    parser.add_argument("--weights", type=Path, help="a SmolLM2 folder (default: the one that mstar serve uses)")
    parser.add_argument("--timeout", type=_positive, default=1800, help="seconds for each phase (default: 1800)")
    parser.add_argument(
        "--quick", action="store_true", help="little of everything, to see that it works; writes nothing"
    )
    options = parser.parse_args(words)
    streams, tokens, rounds = ([1, 4], 12, 1) if options.quick else ([1, 8, 32], 64, 3)
    plan = Plan(
        weights=(options.weights or default_weights()).resolve(),
        servers=options.servers,
        streams=options.streams or streams,
        tokens=options.tokens or tokens,
        rounds=options.rounds or rounds,
        timeout=options.timeout,
    )
    if not (plan.weights / "config.json").is_file():
        parser.error(f"--weights {plan.weights}: no config.json there")
    return plan, options.quick


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # SIGTERM ends the servers too


def main(words: Sequence[str] | None = None) -> int:
    plan, quick = _plan(words)
    signal.signal(signal.SIGTERM, _stop)
    facts = environment(packages=PACKAGES)
    found = floor(plan.weights / "config.json", plan.streams)
    rows: list[dict[str, Any]] = []
    try:
        run(plan, found["tokens_per_s"], rows)
    except KeyboardInterrupt:
        report(rows, plan.tokens)
        print("Interrupted; nothing is written.", file=sys.stderr)
        return 130
    report(rows, plan.tokens)
    if not quick:
        settings = {
            "streams": list(plan.streams),
            "tokens": plan.tokens,
            "rounds": plan.rounds,
            "floor": {"dtype": found["dtype"], "threads": found["threads"]},
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        }
        write_result("chat_cpu", rows, settings, facts)
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

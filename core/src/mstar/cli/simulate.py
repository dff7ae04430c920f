"""``mstar simulate``: what a fleet would do under a load, on virtual time, without the machines.

``measure`` writes down what the steps of a model cost on this machine, ``fit`` makes the same of a benchmark's results,
``run`` plays a load to any number of such replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mstar.cli.commands import Commands, Context, Parser, one_of
from mstar.cli.options import accepting, engine_options, model_options, positive, with_json
from mstar.cli.output import note, print_json, table
from mstar.spec.errors import SetupError, counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from mstar.simulate.load import Asked
    from mstar.simulate.profile import Profile

__all__ = ["register"]

_ACTIONS = ("run", "measure", "fit")
_ROUTERS = ("least", "two", "in-turn", "random")


def register(commands: Commands) -> None:
    """Add the command."""
    commands.add("simulate", _run, help="Predict what a fleet does under a load.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    parser.add_argument("action", type=one_of(*_ACTIONS), metavar="run|measure|fit", help="what to do")
    parser.add_argument(
        "what", metavar="PROFILE|KEY|RESULTS", help="a profile to run, a model to measure, results to fit"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="measure, fit: where the profile goes")
    parser.add_argument("--shape", metavar="NAME", help="fit: which of the results' shapes")
    parser.add_argument(
        "--longest", type=positive, default=2048, metavar="TOKENS", help="measure: most of a prompt (default: 2048)"
    )
    parser.add_argument(
        "--replicas",
        type=_at_most(100_000, "replicas"),  # each is a scheduler in this process
        default=1,
        metavar="N",
        help="run: how many (default: 1)",
    )
    parser.add_argument(
        "--router", type=one_of(*_ROUTERS), default="least", metavar="|".join(_ROUTERS), help="run: default: least"
    )
    parser.add_argument("--load", type=Path, metavar="FILE", help="run: requests, a JSON object a line")
    parser.add_argument("--rate", type=_rate, metavar="PER_S", help="run, without a file: requests that come a second")
    parser.add_argument(
        "--requests",
        type=_at_most(10_000_000, "requests"),  # all are drawn before the first is played
        metavar="N",
        help="run: how many (default: 1000)",
    )
    parser.add_argument("--prompt", type=positive, metavar="TOKENS", help="run: default: 512")
    parser.add_argument("--output", type=positive, metavar="TOKENS", help="run: default: 128")
    parser.add_argument(
        "--spread",
        type=_spread,
        metavar="SIGMA",
        help="run: how much lengths differ, as the deviation of their logarithms (default: 0, not at all)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="run: of what is drawn (default: 0)")
    for name, text in _CHANGES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=positive, dest=name, metavar="N", help=f"run, fit: {text}"
        )
    model_options(parser)
    with_json(parser)


_DRAWN = {"requests": 1000, "prompt": 512, "output": 128, "spread": 0.0}
"""What requests are drawn with where it is not said."""
_CHANGES = {
    "max_concurrent_requests": "requests that a replica runs at once, in the profile's place",
    "max_step_tokens": "tokens of a step, likewise",
    "kv_tokens": "tokens that a replica's KV cache holds, likewise",
    "ranks": "devices of a replica, likewise",
}


def _run(arguments: argparse.Namespace, context: Context) -> None:
    {"run": _simulate, "measure": _measure, "fit": _fit}[arguments.action](arguments, context)


# --- run ----------------------------------------------------------------------------------------------------------


def _simulate(arguments: argparse.Namespace, context: Context) -> None:
    from mstar.simulate.fleet import simulate
    from mstar.simulate.profile import read_profile

    profile = _changed(read_profile(Path(arguments.what)), arguments)
    load = _load(arguments)
    with _progress(counted(arguments.replicas, "replica"), len(load)) as progress:
        outcome = simulate(profile, load, arguments.replicas, arguments.router, seed=arguments.seed, progress=progress)
    report = outcome.report()
    if arguments.json:
        print_json(_finite(report))
    else:
        _print(report)


def _load(arguments: argparse.Namespace) -> Sequence[Asked]:
    from mstar.simulate.load import drawn, read_load

    given = {name: value for name in ("rate", *_DRAWN) if (value := getattr(arguments, name)) is not None}
    if arguments.load is not None:
        if given:
            options = ", ".join(f"--{name}" for name in given)
            raise SetupError(f"--load says which requests come, and when: leave {options} out")
        return read_load(arguments.load)
    if arguments.rate is None:
        raise SetupError("mstar simulate run: which load? --rate PER_S draws one, --load FILE reads one")
    count, prompt, output, spread = ({**_DRAWN, **given}[name] for name in _DRAWN)
    return drawn(arguments.rate, count, prompt, output, spread, arguments.seed)


def _changed(profile: Profile, arguments: argparse.Namespace) -> Profile:
    changes = {name: getattr(arguments, name) for name in _CHANGES if getattr(arguments, name) is not None}
    return profile.model_copy(update=changes)


def _print(report: dict[str, Any]) -> None:
    devices = "" if report["devices"] == report["replicas"] else f" on {report['devices']:,} devices"
    many = "replica" if report["replicas"] == 1 else "replicas"
    print(f"{report['replicas']:,} {many}{devices} of {report['model']}, {report['seconds']:,.1f} s on their clock")
    print(
        f"{report['completed']:,} requests done, {report['refused']:,} refused (queue full): "
        f"{report['requests_per_s']:,.1f} requests/s, {report['output_tokens_per_s']:,.0f} tokens/s written, "
        f"{report['prompt_tokens_per_s']:,.0f} read"
    )
    rows = [
        (words, *(_time(report[name][share]) for share in ("p50", "p95", "p99", "mean")))
        for name, words in (
            ("first_token", "first token"),
            ("between_tokens", "between tokens"),
            ("queued", "in the queue"),
            ("whole", "whole request"),
        )
    ]
    print(table(("", "P50", "P95", "P99", "MEAN"), rows))
    busy, share = report["busy_share"], report["kv_share_most"]
    memory = "" if share is None else f"; KV cache at most {share:.0%} reserved"
    print(
        f"replicas busy {busy['mean']:.0%} of the time ({busy['least']:.0%} to {busy['most']:.0%}){memory}; longest "
        f"queue of one {report['queue_most']}"
    )


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.2f} ms"


def _finite(report: Any) -> Any:
    """*report* with ``None`` for what is no number: JSON has no word for that."""
    if isinstance(report, dict):
        return {key: _finite(value) for key, value in report.items()}
    return None if isinstance(report, float) and not math.isfinite(report) else report


# --- profiles -----------------------------------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace, context: Context) -> None:
    out = _out(arguments)
    from mstar.runtime.checking import check_model
    from mstar.simulate.cost import check_can_learn, fit
    from mstar.simulate.profile import Profile, write_profile
    from mstar.spec.resources import PagedKV

    check_can_learn()
    spec = context.registry.model(arguments.what)
    arguments.key = spec.key
    settings = accepting(arguments, context)
    checked = check_model(
        spec,
        settings,
        context.registry,
        config=arguments.config,
        layout=arguments.layout,
        weights=arguments.weights,
    )
    pools = {name: pool for name, pool in checked.declared.items() if isinstance(pool, PagedKV)}
    if not pools:
        raise SetupError(f"{spec.key!r} has no KV cache that grows token by token: such models are not simulated")
    name, pool = next(iter(pools.items()))
    longest = min(arguments.longest, pool.max_tokens // 2)
    device = arguments.device or str(checked.device or "cpu")
    samples, facts = asyncio.run(_on_engine(arguments, context, settings, longest, name, device))
    learned = fit(samples)
    profile = Profile(
        model=spec.key,
        device=facts.pop("device"),
        costs={"llm": dict(learned.cost.parts)},
        request_s=learned.request_s,
        kv_tokens=facts.pop("pages") * pool.page_size,
        page=pool.page_size,
        max_context=pool.max_tokens,
        error={"median": learned.median_error, "largest": learned.largest_error},
        **facts,
    )
    write_profile(profile, out)
    _tell(profile, learned.samples, out, arguments)


async def _on_engine(
    arguments: argparse.Namespace, context: Context, settings: Any, longest: int, pool: str, device: str
) -> tuple[list[Any], dict[str, Any]]:
    from mstar.runtime.service import open_service
    from mstar.simulate.measure import measure
    from mstar.spec.placement import ranks_of

    flags = {
        "weights": arguments.weights,
        "layout": arguments.layout,
        "device": arguments.device,
        "dtype": arguments.dtype,
        **engine_options(arguments),
    }
    service = open_service(arguments.key, settings, flags, context.registry, config=arguments.config)
    await service.start()
    try:
        deployment = service.config.deployment
        tokens = deployment.scheduler.step_tokens(device.partition(":")[0])
        streams = deployment.max_concurrent_requests
        with _progress("measuring", 1) as progress:
            samples = await measure(service, longest=longest, streams=streams, step_tokens=tokens, tell=progress.of)
        status = await service.status()
        return samples, {
            "device": device,
            "pages": status["resources"][pool]["total"],
            "ranks": ranks_of(deployment.placement),
            "max_step_tokens": tokens,
            "max_step_rows": deployment.scheduler.max_step_rows,
            "max_mixed_rows": deployment.scheduler.mixed_rows(device.partition(":")[0]),
            "max_queue": deployment.scheduler.max_queue,
            "max_concurrent_requests": streams,
        }
    finally:
        await service.stop()


def _fit(arguments: argparse.Namespace, context: Context) -> None:
    out = _out(arguments)
    from mstar.simulate.cost import fit
    from mstar.simulate.profile import Profile, write_profile
    from mstar.simulate.results import read_results
    from mstar.spec.deployment import SchedulerOptions

    results = read_results(Path(arguments.what), arguments.shape)
    learned = fit(results.samples, results.known)
    profile = Profile(
        model=results.shape,
        device=results.device,
        costs={"llm": dict(learned.cost.parts)},
        max_step_tokens=1024,
        max_mixed_rows=SchedulerOptions().mixed_rows("cuda"),
        max_concurrent_requests=128,
        error={"median": learned.median_error, "largest": learned.largest_error},
    )
    write_profile(_changed(profile, arguments), out)
    _tell(profile, learned.samples, out, arguments)


def _out(arguments: argparse.Namespace) -> Path:
    if arguments.out is None:
        raise SetupError(f"mstar simulate {arguments.action}: where to? --out FILE.json")
    out: Path = arguments.out
    return out


def _tell(profile: Profile, samples: int, out: Path, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(profile.model_dump())
        return
    error = profile.error
    off = f"{error['median']:.0%} (at most {error['largest']:.0%})"
    print(f"wrote {out}: learned from {samples} measurements, off by {off}")
    if error["median"] > 0.1:
        note("that is a lot: was the machine busy with something else?")


# --- progress -----------------------------------------------------------------------------------------------------


class _Bar:
    """Called with what is done; :meth:`of` also says of how much."""

    def __init__(self, update: Callable[..., Any], total: int):
        self._update, self._total = update, total

    def __call__(self, done: int) -> None:
        self._update(completed=done, total=self._total)

    def of(self, done: int, total: int) -> None:
        self._update(completed=done, total=total)


@contextmanager
def _progress(words: str, total: int) -> Iterator[_Bar]:
    """A bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()) as display:
        task = display.add_task(words, total=total)

        def update(**state: Any) -> None:
            display.update(task, **state)

        yield _Bar(update, total)


def _at_most(most: int, what: str) -> Callable[[str], int]:
    def read(value: str) -> int:
        number = positive(value)
        if number > most:
            raise argparse.ArgumentTypeError(f"{number:,} {what} are too many: {most:,} at most")
        return number

    return read


def _rate(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 1e-6 <= number <= 1e9:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of requests a second, from 1e-6 to 1e9")
    return number


def _spread(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 3:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number from 0 to 3")
    return number

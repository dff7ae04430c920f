"""Does ``mstar simulate`` tell the truth? One load, played to a real engine on this CPU and to a simulated one.

The engine's steps are measured as ``mstar simulate measure`` does it; then requests that come at random moments and
have random lengths are asked of it, and of a simulated replica with the costs that were learned. Both see the same
moments and the same lengths. Steps are measured before and after each load: a machine that others use, too, may be a
quarter slower from one minute to the next, which is nothing that a simulation could know.

    python benchmarks/simulate_cpu.py            # writes benchmarks/results/simulate_cpu.json; on an idle machine
    python benchmarks/simulate_cpu.py --quick    # a few requests, prints only
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from common import environment, percentiles, table, write_result

from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.runtime.service import Service, open_service
from mstar.settings import Settings
from mstar.simulate.cost import Fit, Sample, fit
from mstar.simulate.fleet import simulate
from mstar.simulate.load import Asked, drawn
from mstar.simulate.measure import Told, ask, measure, random_text
from mstar.simulate.profile import Profile

PACKAGES = ("torch", "mstar-core", "scipy")
KEY, LONGEST, STREAMS, PAGE = "smollm2", 512, 16, 16
LIMIT = 0.15
"""Largest share by which throughput and the middle times may be off."""


async def play(service: Service, load: Sequence[Asked], first_seed: int) -> list[Told]:
    """Ask each at its moment. Texts have seeds from *first_seed* on: nothing of one is in the cache from another."""
    began = time.monotonic()

    async def one(asked: Asked, seed: int) -> Told:
        await asyncio.sleep(began + asked.at - time.monotonic())
        return await ask(service, random_text(asked.prompt, seed), asked.output)

    return await asyncio.gather(*(one(asked, seed) for seed, asked in enumerate(load, first_seed)))


def report(told: Sequence[Told]) -> dict[str, Any]:
    tokens = sum(len(one.times) for one in told)
    seconds = max(one.times[-1] for one in told) - min(one.began for one in told)
    return {
        "output_tokens_per_s": tokens / seconds,
        "first_token": percentiles([one.times[0] - one.began for one in told])["p50"],
        "between_tokens": percentiles([b - a for one in told for a, b in pairwise(one.times)])["p50"],
        "whole": percentiles([one.times[-1] - one.began for one in told])["p50"],
    }


async def run(quick: bool) -> dict[str, Any]:
    settings = Settings.from_env()
    service = open_service(KEY, settings, {"device": "cpu", "executor": "processes"}, Registry(load_plugins(settings)))
    await service.start()
    try:
        rows, fits, profile = [], [], None
        before = await _samples(service, quick, 0)
        for rate in (1.0,) if quick else (0.5, 1.0, 2.0):
            load = drawn(rate, 4 if quick else 60, 100, 24, 0.5, seed=int(rate * 100))
            told = await play(service, load, int(rate * 1_000_000))
            after = await _samples(service, quick, len(fits) + 1)
            learned = fit([*before, *after])
            before, profile = after, _profile(service, learned)
            fits.append({"rate": rate, "median": learned.median_error, "largest": learned.largest_error})
            began = min(one.began for one in told)
            seen = [
                replace(asked, at=one.began - began, prompt=one.prompt, output=len(one.times))
                for asked, one in zip(load, told, strict=True)
            ]
            real = report(told)
            outcome = simulate(profile, sorted(seen, key=lambda asked: asked.at)).report()
            predicted = {
                "output_tokens_per_s": outcome["output_tokens_per_s"],
                **{name: outcome[name]["p50"] for name in ("first_token", "between_tokens", "whole")},
            }
            rows += [
                {"rate": rate, "what": name, "real": real[name], "simulated": predicted[name],
                 "off": predicted[name] / real[name] - 1}
                for name in real
            ]  # fmt: skip
        return {"rows": rows, "profile": profile and profile.model_dump(), "fits": fits}
    finally:
        await service.stop()


async def _samples(service: Service, quick: bool, sitting: int) -> list[Sample]:
    tokens = service.config.deployment.scheduler.step_tokens("cpu")
    longest = 64 if quick else LONGEST
    seed = (1 << 32) + sitting * 100_000  # other texts each time: nothing of them is in the cache
    return await measure(
        service, longest=longest, streams=STREAMS, step_tokens=tokens, tell=lambda *_: None, first_seed=seed
    )


def _profile(service: Service, learned: Fit) -> Profile:
    deployment = service.config.deployment
    return Profile(
        model=KEY,
        costs={"llm": dict(learned.cost.parts)},
        request_s=learned.request_s,
        max_step_tokens=deployment.scheduler.step_tokens("cpu"),
        max_concurrent_requests=deployment.max_concurrent_requests,
        page=PAGE,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few requests; writes nothing")
    options = parser.parse_args()
    facts = environment(PACKAGES)
    results = asyncio.run(run(options.quick))
    table("seconds and tokens/s, middle values", results["rows"], ["rate", "what", "real", "simulated", "off"])
    worst = max(abs(row["off"]) for row in results["rows"])
    fitted = max(fit["median"] for fit in results["fits"])
    print(f"largest difference {worst:.0%} (limit {LIMIT:.0%}); the costs are off by {fitted:.0%}")
    if not options.quick:
        write_result("simulate_cpu", results, {"model": KEY, "limit": LIMIT}, facts)


if __name__ == "__main__":
    main()

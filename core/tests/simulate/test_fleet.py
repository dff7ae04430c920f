"""Fleets on virtual time: what a replica does with requests, how a router shares them, and what is reported."""

from __future__ import annotations

import math

import pytest

from mstar.simulate.cost import StepCost, StepShape
from mstar.simulate.fleet import ROUTERS, simulate
from mstar.simulate.load import Asked, drawn
from mstar.simulate.profile import Profile
from mstar.spec.errors import SetupError

STEP, TOKEN = 0.01, 0.001


def profile(**changes: object) -> Profile:
    costs = {"llm": {"step": STEP, "token": TOKEN}, "encoder": {"step": 0.5}}
    return Profile.model_validate({"model": "m", "costs": costs, "max_step_tokens": 100, **changes})


def test_one_request_takes_its_steps() -> None:
    """A prompt of 250 tokens in chunks of 100, then five tokens one by one; the first comes with the last chunk."""
    outcome = simulate(profile(request_s=0.002), [Asked(3.0, 250, 6)])
    first = 3 * STEP + 250 * TOKEN
    report = outcome.report()
    assert report["first_token"]["mean"] == pytest.approx(first + 0.002)
    assert outcome.between_tokens.count == 5
    assert report["between_tokens"]["mean"] == pytest.approx(STEP + TOKEN)
    assert report["whole"]["mean"] == pytest.approx(first + 0.002 + 5 * (STEP + TOKEN))
    assert (report["completed"], report["steps"]) == (1, 8)
    assert report["busy_share"]["mean"] == pytest.approx(1.0)
    assert report["output_tokens_per_s"] == pytest.approx(6 / (first + 5 * (STEP + TOKEN)))


def test_prompts_come_in_between_tokens_without_stopping_them() -> None:
    """The real scheduler: a long prompt is cut beside the loops, so each step has a token of every loop."""
    lone = simulate(profile(), [Asked(0.0, 10, 50)]).report()
    outcome = simulate(profile(), [Asked(0.0, 10, 50), Asked(0.1, 1000, 1)])
    report = outcome.report()
    assert report["between_tokens"]["p99"] == pytest.approx(STEP + 100 * TOKEN, rel=0.01)
    assert report["between_tokens"]["p50"] == pytest.approx(lone["between_tokens"]["p50"], rel=0.01)


def test_memory_bounds_what_runs_at_once() -> None:
    """Each takes 7 pages of 16; there are 20, so the third waits until the first has ended."""
    load = [Asked(0.0, 50, 50) for _ in range(3)]
    outcome = simulate(profile(kv_tokens=320, page=16), load)
    report = outcome.report()
    assert report["kv_pages_most"] == 14
    assert report["queued"]["p99"] > 50 * STEP
    assert report["queued"]["p50"] < 0.01
    assert report["queue_most"] == 1


def test_what_a_client_may_write_is_reserved_whatever_it_writes() -> None:
    report = simulate(profile(kv_tokens=320, page=16), [Asked(0.0, 50, 10, limit=150) for _ in range(2)]).report()
    assert report["kv_pages_most"] == 13
    assert report["queue_most"] == 1


def test_a_full_queue_refuses() -> None:
    report = simulate(profile(max_concurrent_requests=1, max_queue=2), [Asked(0.0, 10, 10) for _ in range(5)]).report()
    assert (report["completed"], report["refused"]) == (3, 2)


def test_an_encoder_comes_before_the_prompt() -> None:
    report = simulate(profile(), [Asked(0.0, 10, 1, before=(("encoder", 1500),))]).report()
    assert report["first_token"]["mean"] == pytest.approx(0.5 + STEP + 10 * TOKEN)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Asked(0.0, 400, 1), "a replica has 20"),
        (Asked(0.0, 200, 150), "longer than the context of 300"),
        (Asked(0.0, 1, 10**12), "a request of 1000000000000 tokens is too long to be played: 10,000,000 at most"),
        (Asked(0.0, 1, 1, before=(("vit", 1),)), "'vit' costs; it knows encoder, llm"),
    ],
)
def test_what_could_never_run_is_named(asked: Asked, words: str) -> None:
    limit = 300 if asked.prompt == 200 else None
    with pytest.raises(SetupError, match=words):
        simulate(profile(kv_tokens=320, page=16, max_context=limit), [asked])


@pytest.mark.parametrize("router", ROUTERS)
def test_a_thousand_replicas_share_a_load(router: str) -> None:
    load = drawn(rate=2000.0, count=4000, prompt=60, output=20, spread=0.5, seed=1)
    report = simulate(profile(ranks=2), load, 1000, router).report()
    assert report["completed"] == 4000
    assert report["devices"] == 2000
    assert report["busy_share"]["most"] <= 1.0
    assert report["first_token"]["p50"] < 0.2


def test_routers_that_look_beat_those_that_do_not() -> None:
    load = drawn(rate=60.0, count=2000, prompt=100, output=40, spread=1.0, seed=2)
    waits = {name: simulate(profile(), load, 40, name).report()["whole"]["p99"] for name in ROUTERS}
    assert waits["least"] <= waits["two"] * 1.05 < waits["random"]
    assert waits["least"] < waits["in-turn"]


def test_twice_the_replicas_take_twice_the_load() -> None:
    loads = {n: drawn(rate=1000.0 * n, count=1000 * n, prompt=100, output=20, seed=3) for n in (4, 8)}
    rates = {n: simulate(profile(), load, n).report()["output_tokens_per_s"] for n, load in loads.items()}
    assert rates[8] / rates[4] == pytest.approx(2.0, rel=0.05)


def test_the_same_seed_gives_the_same_again() -> None:
    load = drawn(rate=50.0, count=200, prompt=100, output=20, spread=1.0, seed=4)
    assert load == drawn(rate=50.0, count=200, prompt=100, output=20, spread=1.0, seed=4)
    reports = [simulate(profile(), load, 7, "two", seed=5).report() for _ in range(2)]
    assert reports[0] == reports[1]


def test_lengths_are_spread_around_the_middle() -> None:
    load = drawn(rate=10.0, count=4001, prompt=300, output=50, spread=1.0, seed=6)
    prompts = sorted(asked.prompt for asked in load)
    assert prompts[2000] == pytest.approx(300, rel=0.1)
    assert prompts[int(4001 * 0.84)] == pytest.approx(300 * math.e, rel=0.15)
    assert load[-1].at == pytest.approx(400, rel=0.1)


def test_a_step_costs_by_what_is_in_it() -> None:
    cost = StepCost({"step": 1.0, "row": 0.1, "token": 0.01, "token_over_64": 0.02, "context": 1e-3, "pair": 1e-6})
    assert cost.seconds(StepShape(3, 3, 300)) == pytest.approx(1 + 0.3 + 0.03 + 0.3)
    assert cost.seconds(StepShape(1, 100, 100, 5050)) == pytest.approx(1 + 0.1 + 1 + 36 * 0.02 + 0.1 + 0.00505)
    with pytest.raises(SetupError, match="no part 'rows'"):
        StepCost({"rows": 1.0})
    with pytest.raises(SetupError, match="must be a number of seconds"):
        StepCost({"row": -1.0})


def test_an_urgent_request_goes_first_while_it_waits_and_while_it_runs() -> None:
    """One row fits into a step, and it is its row, but for what impatient prompts take."""
    load = [Asked(0.0, 1, 30, priority=n == 2) for n in range(3)]
    alone = simulate(profile(max_step_rows=1), load[2:]).report()["whole"]["mean"]
    outcome = simulate(profile(max_step_rows=1), load)
    assert outcome.whole.quantile(0.01) < 1.1 * alone
    assert outcome.whole.quantile(0.5) > 2 * alone


def test_prompts_take_turns_with_many_decodes() -> None:
    """A step of a prompt and one of those that decode, where it was one step."""
    load = [Asked(0.0, 1, 200), Asked(0.5, 200, 2)]
    together = simulate(profile(), load).report()
    apart = simulate(profile(max_mixed_rows=0), load).report()
    assert apart["steps"] > together["steps"]

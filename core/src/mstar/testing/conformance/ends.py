"""Checks that whatever ends a request, nothing leaks and nobody else notices (promises P4, P7, P10)."""

from __future__ import annotations

import random

import pytest

from mstar.spec.request import Done, Failed
from mstar.testing.conformance.subject import Subject, fail, quiet
from mstar.testing.drive import Driver
from mstar.testing.faults import doom, watch_cuts

__all__ = ["EndChecks"]

_REQUESTS = 8
_DRAWN = 50
"""The seed of the requests that are ended in every way. One set: most time goes into their right answers."""


class EndChecks:
    """Cancelled, closed, failed."""

    @pytest.mark.parametrize("seed", range(3))
    def test_cancel(self, mstar_model: Subject, seed: int) -> None:
        """Cancelled at random points: it ends at once, frees everything, and the others go on unchanged."""
        rng = random.Random(seed)
        driver = mstar_model.driver(max_concurrent_requests=5)
        asked = mstar_model.examples(_REQUESTS, seed=_DRAWN)
        for request, example in asked.items():
            driver.submit(request, example)
        for _ in range(_REQUESTS // 2):
            driver.run(until=lambda: rng.random() < 0.4)
            running = sorted(asked.keys() - driver.ended.keys())
            if not running:
                break
            _cancel(driver, rng.choice(running))
        driver.run()
        mstar_model.check_same(driver, asked, "because other requests were cancelled")
        mstar_model.check_empty(driver, "requests were cancelled at random points")

    def test_cancel_between_chunks(self, mstar_model: Subject) -> None:
        """Cancelled while half of its prompt is computed: it frees everything, and the others go on unchanged."""
        driver = mstar_model.driver(scheduler={"max_step_tokens": 3})
        cut = watch_cuts(driver)
        asked = mstar_model.examples(_REQUESTS, seed=_DRAWN)
        for request, example in asked.items():
            driver.submit(request, example)
        for _ in range(_REQUESTS // 2):
            driver.run(until=lambda: bool(cut - driver.ended.keys()))
            for victim in cut - driver.ended.keys():
                _cancel(driver, victim)
        driver.run()
        mstar_model.check_same(driver, asked, "because other requests were cancelled between two chunks")
        mstar_model.check_empty(driver, "requests were cancelled between two chunks of their prompts")

    @pytest.mark.parametrize("steps", [0, 1, 4])
    def test_close(self, mstar_model: Subject, steps: int) -> None:
        """A worker that is closed at any point gives every request an end and frees everything."""
        driver = mstar_model.driver()
        asked = mstar_model.examples(_REQUESTS, seed=_DRAWN)
        for request, example in asked.items():
            driver.submit(request, example)
        for _ in range(steps):
            driver.worker.step()
            driver.take()
        driver.worker.close()
        driver.take()
        for request in asked:
            end = driver.ended.get(request)
            if end is None:
                fail(f"{mstar_model.spec.key!r}: request {request!r} got no end when its worker was closed")
            if isinstance(end, Failed) and end.code != "shutting_down":
                fail(
                    f"{mstar_model.spec.key!r}: request {request!r} failed before its worker was closed: {end.message}"
                )
        mstar_model.check_empty(driver, f"the worker was closed after {steps} steps")

    @pytest.mark.parametrize("at", [1, 6, None])
    def test_a_failing_request_fails_alone(self, mstar_model: Subject, at: int | None) -> None:
        """A fault in a node's forward pass ends the request at fault, and only that one.

        *at*: in which torch call inside the node the fault is; ``None``: after it.
        """
        driver = mstar_model.driver()
        asked = mstar_model.examples(_REQUESTS - 1, seed=_DRAWN)
        doomed = {"r1", "r4"}
        runner = doom(driver, doomed, at)
        for request, example in asked.items():
            driver.submit(request, example)
        with quiet():
            driver.run()
        if runner.swallowed:
            fail(
                f"{mstar_model.spec.key!r}: {', '.join(sorted(runner.swallowed))} caught an exception of its own "
                "forward pass and went on: the client gets a wrong answer instead of an error. Let exceptions out of "
                "nodes"
            )
        for request in sorted(doomed):
            end = driver.ended.get(request)
            if isinstance(end, Done):
                fail(f"{mstar_model.spec.key!r}: request {request!r} ended well although each of its steps failed")
            if end is None:
                fail(f"{mstar_model.spec.key!r}: request {request!r}, whose steps fail, never ended")
        others = {request: example for request, example in asked.items() if request not in doomed}
        mstar_model.check_same(driver, others, "because another request of its batch failed")
        mstar_model.check_empty(driver, "requests failed")


def _cancel(driver: Driver, request: str) -> None:
    driver.cancel(request)
    driver.take()
    if request not in driver.ended:
        fail(f"{driver.spec.key!r}: a cancelled request went on: it must end within one step")

"""Checks that batching never changes what a request means (promise P6)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mstar.spec.errors import RequestError
from mstar.spec.request import Failed
from mstar.testing.conformance.subject import Subject, fail
from mstar.testing.examples import Example

__all__ = ["BatchChecks"]

_REQUESTS = 7
_DRAWN = 43
"""The seed of the requests that are asked in every order. One set: most time goes into their right answers."""


class BatchChecks:
    """Alone, among others, in chunks, with a seed: one request, one answer."""

    def test_requests_end_well(self, mstar_model: Subject) -> None:
        """Sample requests end well, give something, and leave nothing behind."""
        driver = mstar_model.driver()
        asked = mstar_model.examples(3, seed=41)
        for request, example in asked.items():
            try:
                driver.submit(request, example)
            except RequestError as error:
                fail(f"{mstar_model.spec.key!r}: a sample request was refused: {error}\n  {example}")
            driver.run()
            mstar_model.answer(driver, request, example)
        if not any(driver.emitted.values()):
            fail(f"{mstar_model.spec.key!r}: no request emitted anything: does a call emit to a stream to the client?")
        mstar_model.check_empty(driver, "three requests ended one after the other")

    def test_one_after_the_other(self, mstar_model: Subject) -> None:
        """What a worker did before does not show in an answer."""
        driver = mstar_model.driver()
        asked = mstar_model.examples(_REQUESTS, seed=_DRAWN)
        for request, example in asked.items():
            driver.submit(request, example)
            driver.run()
        mstar_model.check_same(driver, asked, "because other requests ran before it on the same worker")

    def test_prompts_that_begin_alike(self, mstar_model: Subject) -> None:
        """Prompts whose head a worker knows from others give what they give on a worker that knows nothing."""
        driver = mstar_model.driver()
        for number, example in enumerate(mstar_model.examples(2, seed=48).values()):
            text = example.text
            made = {"longer": f"{text} {text}", "longer again": f"{text} {text}", "parted": f"{text} {text[::-1]}"}
            asked = {f"drawn{number}": example, f"again{number}": example}
            asked |= {f"{name}{number}": replace(example, text=long) for name, long in made.items() if text}
            for request, each in [*asked.items()]:
                try:
                    driver.submit(request, each)
                    driver.run()
                except RequestError:
                    del asked[request]
                else:
                    end = driver.ended.get(request)
                    if each is not example and isinstance(end, Failed) and end.status < 500:
                        del asked[request]  # a text that nobody would draw
            mstar_model.check_same(driver, asked, "because prompts before it on the same worker began alike")
        mstar_model.check_empty(driver, "requests with prompts that begin alike ended")

    def test_batch_invariance(self, mstar_model: Subject) -> None:
        """A request alone and the same request among others of mixed lengths give the same."""
        driver = mstar_model.driver()
        asked = mstar_model.examples(_REQUESTS, seed=_DRAWN)
        for request, example in asked.items():
            driver.submit(request, example)
        driver.run()
        mstar_model.check_same(driver, asked, "in a batch with other requests")
        mstar_model.check_empty(driver, "a batch of requests ended")

    def test_mixed_knobs(self, mstar_model: Subject) -> None:
        """Each request of a batch has its own knobs, whatever the others have set."""
        driver = mstar_model.driver()
        asked = mstar_model.mixed(_REQUESTS, seed=47)
        for request, example in asked.items():
            driver.submit(request, example)
        driver.run()
        mstar_model.check_same(driver, asked, "in a batch with requests of other knobs")

    def test_late_arrivals(self, mstar_model: Subject) -> None:
        """Requests that join a running batch change nothing for those in it."""
        driver = mstar_model.driver()
        asked = mstar_model.examples(_REQUESTS, seed=_DRAWN)
        for request, example in asked.items():
            driver.submit(request, example)
            driver.worker.step()
            driver.take()
        driver.run()
        mstar_model.check_same(driver, asked, "because others arrived while it ran")

    @pytest.mark.parametrize("budget", [3, 16])
    def test_chunked_prefill(self, mstar_model: Subject, budget: int) -> None:
        """Prompts cut into chunks of a few tokens give what whole prompts give."""
        driver = mstar_model.driver(scheduler={"max_step_tokens": budget})
        asked = mstar_model.examples(_REQUESTS, seed=_DRAWN)
        for request, example in asked.items():
            driver.submit(request, example)
        driver.run()
        mstar_model.check_same(driver, asked, f"when steps may have {budget} tokens, so that its prompt is cut")

    def test_seeds(self, mstar_model: Subject) -> None:
        """The same seed gives the same answer, alone, again and among others."""
        knobs = mstar_model.spec.knobs.model_fields
        if "seed" not in knobs:
            pytest.skip(f"{mstar_model.spec.key!r} has no knob 'seed'")
        hot = {"temperature": 1.0} if "temperature" in knobs else {}
        asked = {
            request: _with(example, seed=number, **hot)
            for number, (request, example) in enumerate(mstar_model.examples(4, seed=46).items())
        }
        for request, example in asked.items():
            driver = mstar_model.driver()
            driver.submit(request, example)
            driver.run()
            mstar_model.check_same(driver, {request: example}, "from one run to the next with the same seed")
        driver = mstar_model.driver()
        for request, example in asked.items():
            driver.submit(request, example)
        driver.run()
        mstar_model.check_same(driver, asked, "in a batch, though it has a seed")


def _with(example: Example, **knobs: object) -> Example:
    return replace(example, knobs={**example.knobs, **knobs})

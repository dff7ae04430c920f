"""Random arrivals, lengths, cancels, failures, slow clients and full pools (promises P4, P6, P7, P10).

Whatever happens, books balance after every action; at the end every pool is empty, every request has ended exactly
once, and every answer that came to its end equals the closed form, which is what the request gives alone.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mstar.registry import Registry
from mstar.spec.request import Done, Failed
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.faults import doom
from mstar.testing.miniatures import Example, miniature
from mstar.testing.miniatures.common import decode

REGISTRY: Registry = miniature_registry()


class WorkerMachine(RuleBasedStateMachine):
    """Small pools, so that admission has to wait; *key* and *overrides* say what is served."""

    key: ClassVar[str] = "mini_chat"
    constrained: ClassVar[bool] = True
    overrides: ClassVar[dict[str, Any]] = {
        "resources": {"kv": {"tokens": 256}},
        "max_concurrent_requests": 5,
        "scheduler": {"max_step_tokens": 7, "max_queue": 6},
    }

    @initialize(lookahead=st.booleans())
    def start(self, lookahead: bool) -> None:
        self.mini = miniature(self.key)
        self.driver = Driver(self.mini, REGISTRY, engine={"lookahead": lookahead}, **self.overrides)
        self.doomed: set[str] = set()
        doom(self.driver, self.doomed)
        self.asked: dict[str, Example] = {}
        self.cancelled: set[str] = set()
        self.patterns: dict[str, str] = {}

    @precondition(lambda self: self.constrained)
    @rule(
        rng=st.randoms(use_true_random=False),
        pattern=st.sampled_from(["[a-f]{2,9}", "(ab|cd)+e", "[0-9]{40}"]),
        penalty=st.sampled_from([0.0, 0.5]),
    )
    def arrive_constrained(self, rng: Any, pattern: str, penalty: float) -> None:
        name = f"r{len(self.asked)}"
        text = "".join(rng.choices("abcdef", k=rng.randint(1, 20)))
        knobs = {"temperature": 2.0, "seed": 1, "max_tokens": 12, "frequency_penalty": penalty}
        self.asked[name], self.patterns[name] = Example(text, knobs), pattern
        self.driver.submit(name, self.asked[name], response_format={"type": "regex", "regex": pattern})
        self.driver.take()

    @rule(rng=st.randoms(use_true_random=False), count=st.integers(1, 4))
    def arrive(self, rng: Any, count: int) -> None:
        for _ in range(count):
            name = f"r{len(self.asked)}"
            self.asked[name] = self.mini.example(rng)
            self.driver.submit(name, self.asked[name])
        self.driver.take()

    @rule(steps=st.integers(1, 6))
    def work(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.worker.step()
            self.driver.take()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        if name not in self.driver.ended:
            self.cancelled.add(name)
        self.driver.cancel(name)
        self.driver.take()
        assert name in self.driver.ended

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def break_one(self, data: st.DataObject) -> None:
        self.doomed.add(data.draw(st.sampled_from(sorted(self.asked))))

    @rule(reading=st.booleans())
    def read_or_stall(self, reading: bool) -> None:
        """While clients stall, emissions go unacknowledged."""
        self.driver.ack = reading

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "driver"):
            self.driver.worker.check()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.ack = True
        for name, events in driver.emitted.items():  # the clients wake up and take everything
            for event in events:
                driver.worker.ack(name, event.stream, 1)
        driver.run()
        for name, example in self.asked.items():
            end = driver.ended[name]
            if isinstance(end, Failed):
                assert end.code == "queue_full" or name in self.doomed, end
            elif end.reason == "cancelled":
                assert name in self.cancelled
            elif name in self.patterns:
                self.assert_obeys(self.patterns[name], decode(driver.result(name)["text"]), end.reason)
            else:
                self.assert_right(example, dict(driver.result(name)))
        driver.assert_empty()

    def assert_right(self, example: Example, got: dict[str, Any]) -> None:
        for stream, want in self.mini.expected(example).items():
            if isinstance(want, str):
                assert decode(got.get(stream, [])) == want
            else:
                np.testing.assert_allclose(got[stream], want, rtol=1e-6, atol=self.mini.tolerance)

    def assert_obeys(self, pattern: str, text: str, reason: str) -> None:
        if reason == "stop":
            assert re.fullmatch(pattern, text.removesuffix("."))
        else:
            assert (reason, len(text)) == ("length", 12)
            assert re.fullmatch("[a-f]+|[0-9]+", text)


class OmniMachine(WorkerMachine):
    constrained = False
    key = "mini_omni"


class HybridMachine(WorkerMachine):
    """Prompts begin like earlier ones, or like their answers; there are too few checkpoints for all."""

    constrained = False
    key = "mini_hybrid"
    longest = 1000  # characters of a text that is like another
    overrides: ClassVar[dict[str, Any]] = {
        **WorkerMachine.overrides,
        "resources": {"kv": {"tokens": 256}, "state": {"checkpoints": 4}},
    }

    @precondition(lambda self: self.asked)
    @rule(rng=st.randoms(use_true_random=False), samples=st.integers(1, 3))
    def arrive_like_another(self, rng: Any, samples: int) -> None:
        like = rng.choice(sorted(self.asked))
        text = self.asked[like].text
        if isinstance(self.driver.ended.get(like), Done) and self.driver.emitted.get(like) and rng.random() < 0.5:
            text += decode(self.driver.result(like)["text"])
        text = text[: min(rng.randint(1, len(text)), self.longest)] + "".join(rng.choices("abc", k=rng.randint(0, 6)))
        first = f"r{len(self.asked)}"
        for _ in range(samples):
            name = f"r{len(self.asked)}"
            self.asked[name] = Example(text, {"max_tokens": rng.randint(1, 9)})
            prepared = self.driver.prepare(name, self.asked[name])
            prepared.request.sibling_of = None if name == first else first
            self.driver.submit_prepared(prepared, self.asked[name])
        self.driver.take()


class LookMachine(HybridMachine):
    """Pictures come again, give way, and stand in heads that are known; there is no room for all requests' at once."""

    key = "mini_look"
    longest = 24
    overrides: ClassVar[dict[str, Any]] = {
        **WorkerMachine.overrides,
        "resources": {"kv": {"tokens": 256}, "media": {"tokens": 192, "max_tokens": 192}},
    }


class DenoiseMachine(WorkerMachine):
    constrained = False
    key = "mini_denoise"
    overrides: ClassVar[dict[str, Any]] = {**WorkerMachine.overrides, "scheduler": {"max_step_rows": 3, "max_queue": 6}}


class DuplexMachine(WorkerMachine):
    constrained = False
    key = "mini_duplex"
    overrides: ClassVar[dict[str, Any]] = {"max_concurrent_requests": 3, "scheduler": {"max_queue": 6}}


class Seq2SeqMachine(WorkerMachine):
    constrained = False
    key = "mini_seq2seq"


class TransducerMachine(WorkerMachine):
    constrained = False
    key = "mini_transducer"
    overrides: ClassVar[dict[str, Any]] = {"max_concurrent_requests": 3, "scheduler": {"max_queue": 6}}


class WorldMachine(TransducerMachine):
    key = "mini_world"


class RolloutMachine(TransducerMachine):
    key = "mini_rollout"


def case(machine: type[WorkerMachine], examples: int) -> Any:
    test = machine.TestCase
    test.settings = settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    return test


TestChat = case(WorkerMachine, 40)
TestOmni = case(OmniMachine, 15)
TestHybrid = case(HybridMachine, 25)
TestLook = case(LookMachine, 20)
TestDenoise = case(DenoiseMachine, 15)
TestDuplex = case(DuplexMachine, 15)
TestSeq2Seq = case(Seq2SeqMachine, 12)
TestTransducer = case(TransducerMachine, 12)
TestWorld = case(WorldMachine, 12)
TestRollout = case(RolloutMachine, 12)

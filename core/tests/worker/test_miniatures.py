"""Every shape of model, through the real worker: alone, in batches of mixed lengths, cancelled, refused, failing.

"Right" is always the miniature's closed form.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from mstar.registry import Registry
from mstar.spec.errors import RequestError
from mstar.spec.request import Done, Failed, Push
from mstar.spec.tasks import Text
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.faults import doom
from mstar.testing.miniatures import MINIATURES, Example, Miniature, miniature, text
from mstar.testing.miniatures.common import decode

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("loop")]
ALL = pytest.mark.parametrize("mini", MINIATURES, ids=lambda m: m.key)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


def assert_right(mini: Miniature, example: Example, got: dict[str, Any]) -> None:
    for stream, want in mini.expected(example).items():
        if isinstance(want, str):
            assert decode(got.get(stream, [])) == want
        else:
            assert got[stream].shape == want.shape
            np.testing.assert_allclose(got[stream], want, rtol=1e-6, atol=mini.tolerance)


def examples(mini: Miniature, count: int, seed: int) -> dict[str, Example]:
    rng = random.Random(seed)
    return {f"r{i}": mini.example(rng) for i in range(count)}


@ALL
def test_alone(mini: Miniature, registry: Registry) -> None:
    driver = Driver(mini, registry)
    for name, example in examples(mini, 4, seed=1).items():
        driver.submit(name, example)
        driver.run()
        assert_right(mini, example, dict(driver.result(name)))
    driver.assert_empty()


@ALL
@pytest.mark.parametrize("budget", [512, 3])
def test_in_a_batch_of_mixed_lengths(mini: Miniature, budget: int, registry: Registry) -> None:
    """*budget*: tokens a step; 3 cuts every prompt into chunks that mix with decodes."""
    driver = Driver(mini, registry, scheduler={"max_step_tokens": budget})
    asked = examples(mini, 12, seed=2)
    for name, example in asked.items():
        driver.submit(name, example)
    driver.run()
    for name, example in asked.items():
        assert_right(mini, example, dict(driver.result(name)))
    driver.assert_empty()


def steps_for(mini: Miniature, registry: Registry, asked: Mapping[str, Example]) -> int:
    driver = Driver(mini, registry)
    for name, example in asked.items():
        driver.submit(name, example)
    driver.run()
    steps: int = driver.worker.engine.steps
    return steps


@ALL
def test_requests_share_steps(mini: Miniature, registry: Registry) -> None:
    asked = examples(mini, 8, seed=3)
    alone = sum(steps_for(mini, registry, {name: example}) for name, example in asked.items())
    assert steps_for(mini, registry, asked) < alone


@ALL
def test_cancelled_at_random_points(mini: Miniature, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)  # nobody is slow: no sound is held, to be sent at the end
    rng = random.Random(4)
    driver = Driver(mini, registry, max_concurrent_requests=6)
    asked = examples(mini, 12, seed=4)
    for name, example in asked.items():
        driver.submit(name, example)
    victims = rng.sample(sorted(asked), 6)
    for victim in victims:
        driver.run(until=lambda: rng.random() < 0.4)
        driver.cancel(victim)
        before = len(driver.emitted.get(victim, ()))
        driver.take()
        assert len(driver.emitted.get(victim, ())) == before  # nothing after the cancel
        assert victim in driver.ended  # P10: not even one step later
    driver.run()
    for name, example in asked.items():
        end = driver.ended[name]
        assert isinstance(end, Done)
        if end.reason != "cancelled":
            assert_right(mini, example, dict(driver.result(name)))
        else:
            assert name in victims
    driver.assert_empty()


@ALL
def test_a_full_queue_refuses_and_serves_the_rest(mini: Miniature, registry: Registry) -> None:
    driver = Driver(mini, registry, max_concurrent_requests=2, scheduler={"max_queue": 3})
    asked = examples(mini, 9, seed=5)
    for name, example in asked.items():
        driver.submit(name, example)
    driver.take()
    refused = [name for name, end in driver.ended.items() if isinstance(end, Failed)]
    assert len(refused) == 4  # of nine that come at once, 2 run and 3 wait
    for name in refused:
        end = driver.ended[name]
        assert isinstance(end, Failed)
        assert (end.status, end.code) == (429, "queue_full")
        assert end.retry_after is not None
        assert end.retry_after > 0
    driver.run()
    for name in asked.keys() - set(refused):
        assert_right(mini, asked[name], dict(driver.result(name)))
    driver.assert_empty()


@ALL
def test_a_failing_request_fails_alone(mini: Miniature, registry: Registry) -> None:
    driver = Driver(mini, registry)
    doomed: set[str] = set()
    doom(driver, doomed)
    asked = examples(mini, 7, seed=6)
    for name, example in asked.items():
        driver.submit(name, example)
    driver.run(until=lambda: driver.worker.engine.steps >= 2)
    alive = sorted(asked.keys() - driver.ended.keys())
    doomed.update(alive[1:3])
    driver.run()
    for name, example in asked.items():
        end = driver.ended[name]
        if name in doomed and isinstance(end, Failed):
            assert end.status == 500
            assert "Boom" in end.message
        else:
            assert_right(mini, example, dict(driver.result(name)))
    if alive[1:3]:
        assert any(isinstance(driver.ended[name], Failed) for name in doomed)
    driver.assert_empty()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_values_that_are_no_numbers_fail_their_request_alone(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    mini = miniature("mini_chat")
    plain = text.token_logits

    def poisoned(token: torch.Tensor) -> torch.Tensor:
        logits = plain(token)
        logits[token == 7, 3] = float("nan")  # "h"
        return logits

    driver = Driver(mini, registry)
    monkeypatch.setattr(text, "token_logits", poisoned)
    asked = {f"r{i}": Example("abc"[: i % 3 + 1] * (i + 1), {"max_tokens": 6}) for i in range(8)}
    bad = {name for name, example in asked.items() if "h" in mini.expected(example)["text"]}
    assert 0 < len(bad) < len(asked)
    for name, example in asked.items():
        driver.submit(name, Example(example.text, {**example.knobs, "temperature": temperature, "top_k": 1}))
    driver.run()
    for name, example in asked.items():
        end = driver.ended[name]
        if name in bad:
            assert isinstance(end, Failed)
            assert (end.status, end.code) == (500, "numerical_error")
        else:
            assert_right(mini, example, dict(driver.result(name)))
    driver.assert_empty()


@ALL
def test_bad_knobs_are_refused_before_anything_runs(mini: Miniature, registry: Registry) -> None:
    from mstar.spec.errors import RequestError

    driver = Driver(mini, registry)
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        driver.submit("r0", Example("abc", {"temprature": 1}))
    with pytest.raises(RequestError, match=r"nearest valid value is 1"):
        driver.submit("r0", Example("abc", {"max_tokens": 0}))
    assert driver.worker.engine.steps == 0


def test_prefix_reuse_skips_what_is_cached(registry: Registry) -> None:
    mini = miniature("mini_chat")
    driver = Driver(mini, registry)
    example = Example("abcdefghijklmnopqrst", {"max_tokens": 5})
    for name in ("first", "second"):
        driver.submit(name, example)
        driver.run()
        assert_right(mini, example, dict(driver.result(name)))
    first, second = driver.ended["first"], driver.ended["second"]
    assert isinstance(first, Done)
    assert isinstance(second, Done)
    assert (first.usage.cached, second.usage.cached) == (0, 16)  # whole pages of 4, never the last token
    longer = Example("abcdefghijklmnopqrst" + driver_text(driver, "second") + "xyz", {"max_tokens": 5})
    driver.submit("turn two", longer)
    driver.run()
    assert_right(mini, longer, dict(driver.result("turn two")))
    end = driver.ended["turn two"]
    assert isinstance(end, Done)
    assert end.usage.cached >= 24  # the first answer's tokens are cached as well
    driver.assert_empty()


def driver_text(driver: Driver, request: str) -> str:
    return decode(driver.result(request)["text"])


def test_salts_keep_tenants_apart(registry: Registry) -> None:
    driver = Driver(miniature("mini_chat"), registry)
    example = Example("abcdefghijklmnopqrst", {"max_tokens": 2})
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        request = driver.prepare(name, example).request
        request.cache_salt = salt
        driver.worker.submit(request)
        driver.run()
    ends = [driver.ended[name] for name in "abc"]
    assert [e.usage.cached for e in ends if isinstance(e, Done)] == [0, 0, 16]


def test_siblings_share_one_prefill(registry: Registry) -> None:
    mini = miniature("mini_chat")
    driver = Driver(mini, registry, scheduler={"max_step_tokens": 8})
    example = Example("abcdefghijklmnopqrstuvwxyz", {"max_tokens": 6})
    for name in ("a", "b", "c"):
        request = driver.prepare(name, example).request
        request.sibling_of = None if name == "a" else "a"
        driver.worker.submit(request)
    driver.run()
    for name in ("a", "b", "c"):
        assert_right(mini, example, dict(driver.result(name)))
    ends = [driver.ended[name] for name in "abc"]
    assert [e.usage.cached for e in ends if isinstance(e, Done)] == [0, 25, 25]
    driver.assert_empty()


def test_siblings_survive_their_parent(registry: Registry) -> None:
    mini = miniature("mini_chat")
    driver = Driver(mini, registry, scheduler={"max_step_tokens": 8})
    example = Example("abcdefghijklmnopqrstuvwxyz", {"max_tokens": 6})
    for name in ("a", "b"):
        request = driver.prepare(name, example).request
        request.sibling_of = None if name == "a" else "a"
        driver.worker.submit(request)
    driver.run(until=lambda: driver.worker.engine.steps == 1)
    driver.cancel("a")
    driver.run()
    assert_right(mini, example, dict(driver.result("b")))
    driver.assert_empty()


def test_a_session_is_resumed_bounded_and_exclusive(registry: Registry) -> None:
    mini = miniature("mini_rollout")
    driver = Driver(mini, registry, max_sessions=2)
    whole = dict(driver_run(driver, "whole", {"windows": 4, "drive": 2.0}))["state"]
    first = dict(driver_run(driver, "one", {"windows": 4, "drive": 2.0}, session="w"))["state"]
    np.testing.assert_allclose(first, whole)
    then = dict(driver_run(driver, "two", {"windows": 2, "drive": 2.0}, session="w"))["state"]
    x = whole[-1]
    for index in range(2):
        x = x * 0.5 + 2.0 + index
        np.testing.assert_allclose(then[index], x, rtol=1e-5)
    driver.submit("busy", Example(knobs={"windows": 9}), session="w")
    driver.submit("second", Example(knobs={"windows": 1}), session="w")
    driver.take()
    end = driver.ended["second"]
    assert isinstance(end, Failed)
    assert (end.status, end.code) == (409, "session_busy")
    driver.run()
    for name in ("v", "u"):  # more sessions than may be kept: the one unused longest goes
        driver_run(driver, name, {"windows": 1}, session=name)
    assert driver.worker.status()["sessions"] == 2
    again = dict(driver_run(driver, "fresh", {"windows": 4, "drive": 2.0}, session="w"))["state"]
    np.testing.assert_allclose(again, whole)
    driver.assert_empty()


def driver_run(driver: Driver, name: str, knobs: dict[str, Any], **task: Any) -> Any:
    driver.submit(name, Example(knobs=knobs), **task)
    driver.run()
    return driver.result(name)


def test_a_slow_client_slows_only_itself(registry: Registry) -> None:
    mini = miniature("mini_duplex")
    driver = Driver(mini, registry)
    driver.ack = False
    slow = Example(appends=(("audio_in", np.ones(64, dtype=np.float32)),))  # 16 frames; the stream holds 8
    quick = Example(appends=(("audio_in", np.ones(8, dtype=np.float32)),))
    driver.submit("slow", slow)
    driver.submit("quick", quick)
    driver.run()
    assert list(driver.ended) == ["quick"]
    sent = [e for e in driver.emitted["slow"] if e.stream == "audio"]
    assert len(sent) == 8
    driver.ack = True
    driver.worker.ack("slow", "audio", len(sent))
    driver.run()
    assert_right(mini, slow, dict(driver.result("slow")))
    assert_right(mini, quick, dict(driver.result("quick")))
    driver.assert_empty()


@pytest.mark.parametrize("data", [{"text": "hi"}, "hi", [{}], np.ones((2, 2, 2), dtype=np.float32)])
def test_what_a_client_pushes_can_only_fail_its_own_request(registry: Registry, data: Any) -> None:
    mini = miniature("mini_duplex")
    driver = Driver(mini, registry)
    good = Example(appends=(("audio_in", np.ones(8, dtype=np.float32)),))
    driver.worker.submit(driver.prepare("bad", Example()).request)
    driver.worker.push(Push(id="bad", stream="audio_in", data=data))
    driver.submit("good", good)
    driver.run()
    end = driver.ended["bad"]
    assert isinstance(end, Failed)
    assert (end.status, end.code) == (400, "invalid_value")
    assert_right(mini, good, dict(driver.result("good")))
    driver.assert_empty()


def test_a_bug_behind_a_push_fails_its_request_only(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(miniature("mini_duplex"), registry)
    driver.worker.submit(driver.prepare("r", Example()).request)
    driver.run()
    monkeypatch.setattr(driver.worker.requests.live["r"].run, "push", lambda push: 1 / 0)
    driver.worker.push(Push(id="r", stream="audio_in", end=True))
    driver.run()
    end = driver.ended["r"]
    assert isinstance(end, Failed)
    assert (end.status, end.code) == (500, "internal_error")
    driver.assert_empty()


def test_a_text_is_no_item_of_a_stream_of_arrays(registry: Registry) -> None:
    with pytest.raises(RequestError, match="takes arrays, not text"):
        Driver(miniature("mini_duplex"), registry).processor.push("audio_in", Text("hi"), "r")


def test_a_request_that_takes_too_long_is_ended(registry: Registry) -> None:
    driver = Driver(miniature("mini_duplex"), registry)
    request = driver.prepare("r", Example()).request
    request.timeout = 1e-9
    driver.worker.submit(request)  # its client never sends anything
    driver.run()
    end = driver.ended["r"]
    assert isinstance(end, Failed)
    assert (end.status, end.code) == (504, "timeout")
    driver.assert_empty()


def test_a_request_that_no_pool_can_hold_is_refused(registry: Registry) -> None:
    driver = Driver(miniature("mini_chat"), registry, resources={"kv": {"tokens": 256}})
    driver.submit("long", Example("a" * 300, {"max_tokens": 5}))
    driver.take()
    end = driver.ended["long"]
    assert isinstance(end, Failed)
    assert (end.status, end.code) == (400, "context_length_exceeded")
    assert "305 tokens" in end.message
    assert "may hold 256" in end.message
    driver = Driver(miniature("mini_denoise"), registry, resources={"kv": {"tokens": 256}})
    driver.submit("two", Example("a" * 254))  # two contexts that would fit one at a time
    driver.take()
    end = driver.ended["two"]
    assert isinstance(end, Failed)
    assert (end.status, end.code) == (400, "request_too_large")
    assert "resources.kv" in end.message

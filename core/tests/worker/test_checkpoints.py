"""Prompts of a model with recurrent state that begin alike: it goes on from a state that was kept, and answers as ever.

The worker's other tests of the prefix cache are in ``test_miniatures.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from mstar.registry import Registry
from mstar.resources.recurrent import RecurrentStateResource
from mstar.spec.errors import SetupError
from mstar.spec.request import Done
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.examples import Example
from mstar.testing.miniatures import miniature
from mstar.testing.miniatures.common import decode

pytestmark = pytest.mark.usefixtures("loop")
MINI = miniature("mini_hybrid")  # pages of 4 tokens, a checkpoint every 16 tokens


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


def state_of(driver: Driver) -> RecurrentStateResource:
    resource = driver.worker.resources["state"]
    assert isinstance(resource, RecurrentStateResource)
    return resource


def ask(driver: Driver, name: str, text: str, tokens: int = 5, **changes: Any) -> tuple[str, int]:
    """The answer, which must be right, and how many tokens of the prompt were not computed."""
    example = Example(text, {"max_tokens": tokens})
    request = driver.prepare(name, example).request
    for field, value in changes.items():
        setattr(request, field, value)
    driver.worker.submit(request)
    driver.run()
    end, answer = driver.ended[name], decode(driver.result(name)["text"])
    assert isinstance(end, Done)
    assert answer == MINI.expected(example)["text"]
    driver.worker.check()
    return answer, end.usage.cached


@pytest.mark.parametrize("most", [3, 7, 64])
def test_a_prompt_that_comes_again_is_not_computed_again(registry: Registry, most: int) -> None:
    driver = Driver(MINI, registry, scheduler={"max_step_tokens": most})
    text = "abcdefghijklmnopqrstu"
    answer, cached = ask(driver, "first", text)
    assert cached == 0
    assert ask(driver, "second", text)[1] == 20  # the last whole page that leaves something to compute
    assert ask(driver, "shorter", text[:20])[1] == 16
    # A second turn goes on behind the answer, whose last token was never computed.
    assert ask(driver, "turn", text + answer + "xyz")[1] == 24
    assert driver.worker.status()["prefix"]["hits"] == 60
    driver.assert_empty()


def test_heads_in_common_get_a_checkpoint_where_they_part(registry: Registry) -> None:
    driver = Driver(MINI, registry)
    head = "a system prompt "[:11]
    assert [ask(driver, f"r{i}", head + "xyzwv"[i] * 9)[1] for i in range(4)] == [0, 0, 8, 8]
    driver.assert_empty()


def test_salts_keep_states_apart(registry: Registry) -> None:
    driver = Driver(MINI, registry)
    salts = {"a": "one", "b": "two", "c": "one"}
    assert [ask(driver, n, "abcdefghijklm", cache_salt=salt)[1] for n, salt in salts.items()] == [0, 0, 12]


def test_samples_of_one_prompt_begin_from_one_state(registry: Registry) -> None:
    driver = Driver(MINI, registry, scheduler={"max_step_tokens": 8})
    example = Example("abcdefghijklmnopqrstuvwxyz", {"max_tokens": 6})
    for name in ("a", "b", "c"):
        request = driver.prepare(name, example).request
        request.sibling_of = None if name == "a" else "a"
        driver.worker.submit(request)
    driver.run()
    for name in ("a", "b", "c"):
        assert decode(driver.result(name)["text"]) == MINI.expected(example)["text"]
    ends = [driver.ended[name] for name in "abc"]
    assert [end.usage.cached for end in ends if isinstance(end, Done)] == [0, 24, 24]
    driver.assert_empty()


def test_few_checkpoints_make_room_for_one_another(registry: Registry) -> None:
    driver = Driver(MINI, registry, resources={"state": {"checkpoints": 2}})
    texts = [letter * 9 + "abc" for letter in "klmno"]
    for n, text in enumerate(texts):
        ask(driver, f"r{n}", text, tokens=1)
    assert state_of(driver).usage().cached == 2
    assert ask(driver, "last", texts[-1], tokens=1)[1] == 8
    assert ask(driver, "first", texts[0], tokens=1)[1] == 0
    counts = driver.worker.status()["checkpoints"]["state"]
    assert counts["made"] - counts["evicted"] >= 2
    assert counts["evicted"] > 2


def test_an_answer_drives_out_no_prompt(registry: Registry) -> None:
    """Of a long answer only the last checkpoint stays, also while there is no room."""
    driver = Driver(MINI, registry, resources={"state": {"checkpoints": 3}})
    ask(driver, "short", "abcdefghij", tokens=1)
    ask(driver, "long", "ABCDEFGHIJ", tokens=60)
    assert ask(driver, "again", "abcdefghij", tokens=1)[1] == 8
    assert state_of(driver).checkpoints.evicted <= 1


def test_without_checkpoints_prompts_are_neither_shared_nor_cut(registry: Registry) -> None:
    driver = Driver(MINI, registry, resources={"state": {"checkpoints": 0}})
    assert [ask(driver, name, "abcdefghijklmnopqrstu", tokens=1)[1] for name in ("first", "second")] == [0, 0]
    assert driver.worker.engine.steps == 2


def test_pages_that_are_gone_take_their_states_with_them(registry: Registry) -> None:
    driver = Driver(MINI, registry, resources={"kv": {"tokens": 32, "max_tokens": 32}}, max_concurrent_requests=1)
    ask(driver, "first", "abcdefghijklmnopqrstu")
    ask(driver, "other", "ABCDEFGHIJKLMNOPABCDE")
    assert ask(driver, "again", "abcdefghijklmnopqrstu")[1] == 0


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_the_state_has_the_dtype_that_the_deployment_says(registry: Registry, state_dtype: str) -> None:
    driver = Driver(MINI, registry, resources={"state": {"state_dtype": state_dtype}})
    assert str(state_of(driver).pool("matrix").dtype) == f"torch.{state_dtype}"
    ask(driver, "r", "abcabdabc")


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"state_dtype": "float8"}, "state_dtype='float8'; use 'float32' or 'bfloat16'"),
        ({"checkpoints": -1}, r"checkpoints: must be at least 0 \(got -1\)"),
        ({"page": 0}, "page=0; it must be 1 or more"),
    ],
)
def test_declarations_that_mean_nothing_are_refused(registry: Registry, settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(SetupError, match=fault):
        Driver(MINI, registry, resources={"state": settings})

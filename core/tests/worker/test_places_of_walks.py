"""A place for each walk of a node: requests go from rank to rank with their state, and get what they would have got."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from mstar.registry import Registry, load_object
from mstar.spec.request import Done, Failed
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.examples import Example
from mstar.testing.miniatures import miniature
from mstar.testing.rank_drive import RankDriver
from mstar.worker.aside import Aside

from .test_miniatures import assert_right, examples
from .test_ranks import assert_all_right

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("loop")]

PLACES: list[tuple[str, dict[str, Any]]] = [
    ("mini_chat", {"lm": {"prefill": 1, "decode": 0}}),
    ("mini_chat", {"lm": {"prefill": 0, "decode": 1}}),
    ("mini_chat", {"lm": {"prefill": [1, 2], "decode": 0}}),
    ("mini_chat", {"lm": {"prefill": [0, 1], "decode": [0, 2]}}),
    ("mini_tts", {"lm": {"prefill": 1, "decode": 2}, "codec": 0}),
    ("mini_hybrid", {"lm": {"prefill": 1, "decode": 0}}),
    ("mini_hybrid", {"lm": {"prefill": 0, "decode": 1}}),
    ("mini_seq2seq", {"encoder": 0, "decoder": {"prefill": 1, "decode": 0}}),
    ("mini_seq2seq", {"encoder": 1, "decoder": {"prefill": 1, "decode": 0}}),
    ("mini_seq2seq", {"encoder": 2, "decoder": {"prefill": 0, "decode": 1}}),
    ("mini_tts", {"lm": {"prefill": 1, "decode": 0}, "codec": 1}),
    ("mini_planner", {"calc": {"read": 1, "twice": 0, "shift": 2}}),
    ("mini_look", {"eye": {"prefill": 1, "decode": 0}, "lm": {"prefill": 1, "decode": 0}}),
    ("mini_look", {"eye": {"prefill": 0, "decode": 1}, "lm": {"prefill": 0, "decode": 1}}),
    ("mini_look", {"eye": {"look": 1, "generate": 0}, "lm": {"look": 1, "generate": 0}}),
]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


@pytest.mark.parametrize(("key", "places"), PLACES, ids=str)
@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 3}], ids=["whole", "pieces"])
def test_answers_are_those_of_one_place(
    key: str, places: dict[str, Any], limits: dict[str, int], registry: Registry
) -> None:
    driver = RankDriver(miniature(key), registry, seed=5, placement=places, scheduler=limits)
    assert_all_right(driver, miniature(key), 8, seed=21)
    if driver.worker.resources:
        assert driver.worker.status()["moves"]["done"] > 0


class Mark:
    """A place in what a device does, as :class:`mstar.worker.aside.Aside` gives it."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_state_goes_while_its_rank_computes_the_next_prompt(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[Mark] = []
    gathered: list[Any] = []

    def mark(aside: Aside) -> Mark:
        marks.append(Mark())
        return marks[-1]

    @contextmanager
    def behind(aside: Aside, mark: Any = None) -> Iterator[None]:
        gathered.append(mark)
        yield

    monkeypatch.setattr(Aside, "mark", mark)
    monkeypatch.setattr(Aside, "behind", behind)
    mini = miniature("mini_chat")
    driver = RankDriver(mini, registry, seed=1, placement={"lm": {"prefill": 1, "decode": 0}})
    first, second = examples(mini, 2, seed=4).values()
    driver.submit("first", first)
    driver.run(until=lambda: len(marks) == 2)  # what was known of its prompt, and the step that reads the rest
    driver.submit("second", second)
    driver.run(until=lambda: len(marks) == 4)
    marks[1].passed = True
    driver.run(until=lambda: "first" in driver.ended)
    assert "second" not in driver.ended, "its prompt has not been computed"
    assert marks[1] in gathered, "behind the step that made it"
    assert not {*marks[2:]} & {*gathered}, "and not behind the next"
    marks[3].passed = True
    driver.run()
    for name, example in (("first", first), ("second", second)):
        assert_right(mini, example, dict(driver.result(name)))
    stages = driver.worker.status()["moves"]["stages"]
    assert sum(stages.values()) == pytest.approx(driver.worker.status()["moves"]["seconds"])
    driver.assert_empty()


SPLITS: list[dict[str, Any]] = [{"prefill": 1, "decode": 0}, {"prefill": 0, "decode": 1}, {"prefill": 1, "decode": 2}]


@pytest.mark.parametrize("places", SPLITS, ids=str)
@pytest.mark.parametrize("key", ["mini_chat", "mini_hybrid"])
def test_cancelled_at_any_moment(key: str, places: dict[str, Any], registry: Registry) -> None:
    mini, rng = miniature(key), random.Random(3)
    others = {"codec": 0} if 0 not in places.values() else {}
    driver = RankDriver(
        mini if not others else miniature("mini_tts"), registry, seed=8, placement={"lm": places, **others}
    )
    mini = miniature(driver.spec.key)
    for number, (name, example) in enumerate(examples(mini, 24, seed=31).items()):
        driver.submit(name, example)
        turns = iter(range(rng.randrange(14)))
        driver.run(until=lambda turns=turns: next(turns, None) is None)  # type: ignore[misc]
        if number % 3:
            driver.cancel(name)
    driver.run()
    assert {type(end) for end in driver.ended.values()} == {Done}
    assert {end.reason for end in driver.ended.values() if isinstance(end, Done)} >= {"cancelled"}
    driver.assert_empty()


@pytest.mark.parametrize("dies", [1, 2])
@pytest.mark.parametrize("moment", range(0, 40, 4))
def test_a_rank_dies_at_any_moment(dies: int, moment: int, registry: Registry) -> None:
    """Requests that have something there fail with a 503; the others, and those that come later, get their answers."""
    mini = miniature("mini_tts")
    driver = RankDriver(mini, registry, seed=moment, placement={"lm": {"prefill": 1, "decode": 2}, "codec": 0})
    cases = examples(mini, 6, seed=moment)
    for name, example in cases.items():
        driver.submit(name, example)
    turns = iter(range(moment))
    driver.run(until=lambda: next(turns, None) is None)
    driver.kill(dies)
    driver.run(until=lambda: True)
    driver.start(dies)
    again = {f"again-{name}": example for name, example in examples(mini, 3, seed=99).items()}
    for name, example in again.items():
        driver.submit(name, example)
    driver.run()
    failed = {name for name, end in driver.ended.items() if isinstance(end, Failed)}
    assert failed <= cases.keys()
    for name in failed:
        end = driver.ended[name]
        assert isinstance(end, Failed)
        assert (end.status, end.code) == (503, "worker_died")
    for name, example in {**cases, **again}.items():
        if name not in failed:
            assert_right(mini, example, dict(driver.result(name)))
    driver.assert_empty()


def test_who_has_moved_on_survives_the_rank_that_read_its_prompt(registry: Registry) -> None:
    mini = miniature("mini_chat")
    driver = RankDriver(mini, registry, placement={"lm": {"prefill": 1, "decode": 0}})
    example = Example("abcdef", {"max_tokens": 30})
    driver.submit("r", example)
    driver.run(until=lambda: driver.worker.status()["moves"]["done"] == 1)
    driver.kill(1)
    driver.run()
    assert_right(mini, example, dict(driver.result("r")))
    driver.start(1)
    driver.assert_empty()


def test_room_where_it_decodes_is_reserved_before_a_prompt_is_read(registry: Registry) -> None:
    """A request for which there is none waits, with nothing anywhere."""
    mini = miniature("mini_chat")
    places = {"lm": {"prefill": 1, "decode": 0}}
    driver = RankDriver(mini, registry, placement=places, resources={"kv": {"tokens": 256, "max_tokens": 256}})
    cases = {name: Example("a" * 100, {"max_tokens": 100}) for name in ("first", "second")}
    for name, example in cases.items():
        driver.submit(name, example)
    driver.run(until=lambda: driver.worker.status()["moves"]["done"] == 1)
    assert "first" not in driver.ended
    assert driver.worker.scheduler.waiting == 1  # its prompt would have had room
    here, there = driver.worker.resources["kv"].usage(), driver.wires[1].follower.resources["kv"].usage()
    assert here.used == 50
    driver.run()
    for name, example in cases.items():
        assert_right(mini, example, dict(driver.result(name)))
    assert there.total == 64
    driver.assert_empty()


def test_what_read_a_prompt_is_free_when_its_state_has_moved(registry: Registry) -> None:
    driver = RankDriver(miniature("mini_chat"), registry, placement={"lm": {"prefill": 1, "decode": 0}})
    driver.submit("r", Example("abcdefghij", {"max_tokens": 40}))
    driver.run(until=lambda: len(driver.emitted.get("r", ())) > 5)
    pools = driver.wires[1].follower.resources
    assert {name: pool.usage().used for name, pool in pools.items()} == dict.fromkeys(pools, 0)
    assert pools["kv"].usage().cached == 2  # whole pages of the prompt, for those that begin alike
    driver.run()
    driver.assert_empty()


@pytest.mark.parametrize("places", SPLITS[:2], ids=str)
@pytest.mark.parametrize("key", ["mini_chat", "mini_hybrid"])
def test_a_prompt_that_comes_again_is_known_where_prompts_are_read(
    key: str, places: dict[str, Any], registry: Registry
) -> None:
    mini = miniature(key)
    driver = RankDriver(mini, registry, placement={"lm": places})
    example = Example("abcdefghijklmnopqrst", {"max_tokens": 4})
    for name in ("first", "second"):
        driver.submit(name, example)
        driver.run()
        assert_right(mini, example, dict(driver.result(name)))
    first, second = (driver.ended[name] for name in ("first", "second"))
    assert isinstance(first, Done)
    assert isinstance(second, Done)
    assert (first.usage.cached, second.usage.cached) == (0, 16)
    driver.assert_empty()


def test_samples_share_one_prompt(registry: Registry) -> None:
    mini = miniature("mini_chat")
    driver = RankDriver(mini, registry, placement={"lm": {"prefill": [1, 2], "decode": 0}})
    example = Example("abcdefghijklmnopqrstuvwxyz", {"max_tokens": 6})
    for name in ("a", "b", "c"):
        request = driver.prepare(name, example).request
        request.sibling_of = None if name == "a" else "a"
        driver.worker.submit(request)
    driver.run()
    for name in ("a", "b", "c"):
        assert_right(mini, example, dict(driver.result(name)))
    ends = [driver.ended[name] for name in "abc"]
    assert [end.usage.cached for end in ends if isinstance(end, Done)] == [0, 25, 25]
    driver.assert_empty()


@pytest.mark.parametrize("places", SPLITS[:2], ids=str)
@pytest.mark.parametrize("first", [3, 1], ids=["decoded", "not decoded"])
def test_a_session_goes_on_where_its_state_is(
    places: dict[str, Any], first: int, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one token nothing is decoded, and the state is where the prompt was read."""
    model: Any = load_object(miniature("mini_chat").model)
    plain = model.graph
    monkeypatch.setattr(model, "graph", lambda self: replace(plain(self), sessions=("kv", "positions", "sampler")))
    said: list[list[list[int]]] = []
    for driver in (Driver("mini_chat", registry), RankDriver("mini_chat", registry, placement={"lm": places})):
        answers = []
        for number, tokens in enumerate((first, 4, 4)):
            driver.submit(str(number), Example("abcde", {"max_tokens": tokens}), session="s")
            driver.run()
            answers.append(driver.result(str(number))["text"])
        said.append(answers)
    assert said[0] == said[1]
    assert driver.worker.status()["moves"]["done"] == 1
    assert len(driver.worker.sessions) == 1
    driver.worker.check()
    driver.assert_empty()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_p": 0.95, "seed": 5},
        {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 1.0, "seed": 3, "min_tokens": 4},
    ],
    ids=["seeded", "penalties", "at least"],
)
def test_the_sampler_goes_on_as_it_was(sampling: dict[str, Any], registry: Registry) -> None:
    said = []
    for driver in (
        Driver("mini_chat", registry),
        RankDriver("mini_chat", registry, placement={"lm": {"prefill": 1, "decode": 0}}),
    ):
        request = driver.prepare("r", Example("hello there", {"max_tokens": 20})).request
        params = request.sampling["sampler"]
        request.sampling["sampler"] = msgspec.structs.replace(params, **sampling)
        driver.worker.submit(request)
        driver.run()
        said.append(driver.result("r")["text"])
    assert said[0] == said[1]
    assert len(set(said[0])) > 3
    driver.assert_empty()


@pytest.mark.parametrize("place", [1, [0, 1]], ids=str)
def test_rank_0_knows_how_much_of_a_pool_elsewhere_a_session_has(
    place: object, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused when it grows too long, and dropped when another request needs its room: as on one rank."""
    model: Any = load_object(miniature("mini_tts").model)
    plain = model.graph
    monkeypatch.setattr(model, "graph", lambda self: replace(plain(self), sessions=("kv", "positions", "sampler")))
    pools = {"kv": {"tokens": 256}}  # 64 pages
    drivers = (
        Driver("mini_tts", registry, resources=pools),
        RankDriver("mini_tts", registry, resources=pools, placement={"lm": place, "codec": 0}),
    )
    said = []
    for driver in drivers:
        for turn in range(4):
            driver.submit(str(turn), Example("a" * 60, {"max_tokens": 5}), session="s")
            driver.run()
        kept = len(driver.worker.sessions)
        driver.submit("large", Example("a" * 150, {"max_tokens": 5}))  # 39 pages, and the session has some 50
        driver.run()
        dropped = kept - len(driver.worker.sessions)
        ends = [getattr(driver.ended[name], "message", "answered") for name in ("0", "1", "2", "3", "large")]
        said.append((ends, kept, dropped if place == 1 else 1))
        driver.assert_empty()
    assert said[0] == said[1]
    assert said[0][0][3] != "answered"
    assert said[0][1:] == (1, 1)

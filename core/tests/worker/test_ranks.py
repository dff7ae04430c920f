"""Nodes on ranks of their own: every request gets what it would have got on one rank, and nothing is left anywhere."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest
import torch

from mstar.graph.values import Ref
from mstar.registry import Registry
from mstar.spec.request import Done, Failed
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.miniatures import MINIATURES, Miniature, miniature
from mstar.testing.rank_drive import RankDriver
from mstar.worker.handles import unpack
from mstar.worker.messages import Contents, Open, Run

from .test_miniatures import assert_right, examples

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("loop")]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


def nodes_of(mini: Miniature, registry: Registry) -> list[str]:
    return [node.name for node in Driver(mini, registry).worker.plan.graph.nodes]


SPLIT = [mini for mini in MINIATURES if mini.key != "mini_look" and len(nodes_of(mini, miniature_registry())) > 1]
"""Miniatures with nodes to place apart: not the one whose nodes share what it makes of pictures."""


def assert_all_right(driver: RankDriver, mini: Miniature, count: int, seed: int) -> None:
    cases = examples(mini, count, seed)
    for name, example in cases.items():
        driver.submit(name, example)
    driver.run()
    for name, example in cases.items():
        assert_right(mini, example, dict(driver.result(name)))
    driver.assert_empty()


@pytest.mark.parametrize("mini", SPLIT, ids=lambda m: m.key)
@pytest.mark.parametrize("first", [0, 1])
def test_nodes_apart(mini: Miniature, first: int, registry: Registry) -> None:
    placement = {node: (number + first) % 2 for number, node in enumerate(nodes_of(mini, registry))}
    assert_all_right(RankDriver(mini, registry, seed=first, placement=placement), mini, 6, seed=5)


@pytest.mark.parametrize("mini", SPLIT, ids=lambda m: m.key)
def test_a_rank_for_each_node_with_steps_of_few_tokens(mini: Miniature, registry: Registry) -> None:
    """Prompts are cut into chunks, which ranks keep the parts of."""
    placement = {node: number for number, node in enumerate(nodes_of(mini, registry))}
    driver = RankDriver(mini, registry, seed=3, placement=placement, scheduler={"max_step_tokens": 3})
    assert_all_right(driver, mini, 5, seed=6)


@pytest.mark.parametrize("mini", SPLIT, ids=lambda m: m.key)
def test_cancelled_at_any_moment(mini: Miniature, registry: Registry) -> None:
    nodes = nodes_of(mini, registry)
    rng = random.Random(11)
    driver = RankDriver(mini, registry, seed=1, placement={node: n % 2 for n, node in enumerate(nodes)})
    for number, (name, example) in enumerate(examples(mini, 12, seed=7).items()):
        driver.submit(name, example)
        moment = rng.randrange(12)
        turns = iter(range(moment + 1))
        driver.run(until=lambda turns=turns: next(turns, None) is None)  # type: ignore[misc]
        if number % 3:
            driver.cancel(name)
    driver.run()
    assert {type(end) for end in driver.ended.values()} == {Done}
    assert {end.reason for end in driver.ended.values() if isinstance(end, Done)} >= {"cancelled"}
    driver.assert_empty()


def test_a_rank_dies_and_comes_back(registry: Registry) -> None:
    """Its requests fail with a 503, the others get their answers, and the next ones are served again."""
    mini = miniature("mini_seq2seq")
    driver = RankDriver(mini, registry, seed=2, placement={"encoder": 1, "decoder": 0})
    cases = examples(mini, 8, seed=9)
    for name, example in cases.items():
        if name == "r4":  # those before are being answered: they need the encoder no more
            driver.run(until=lambda: len(driver.emitted) == 4)
        driver.submit(name, example)
    turns = iter(range(6))
    driver.run(until=lambda: next(turns, None) is None)
    assert driver.worker.ranks is not None
    flying = {w.call.run.request.id for step in driver.worker.ranks.steps.flying.values() for w in step.work}
    driver.kill(1)
    driver.take()
    failed = {name for name, end in driver.ended.items() if isinstance(end, Failed)}
    assert failed == flying
    assert 0 < len(failed) < len(cases)
    for name in failed:
        end = driver.ended[name]
        assert isinstance(end, Failed)
        assert (end.status, end.code) == (503, "worker_died")
        assert "rank 1" in end.message
    driver.start(1)
    driver.run()
    for name, example in cases.items():
        if name not in failed:
            assert_right(mini, example, dict(driver.result(name)))
    again = examples(mini, 1, seed=10)["r0"]
    driver.submit("again", again)
    driver.run()
    assert_right(mini, again, dict(driver.result("again")))
    driver.assert_empty()


def test_what_a_rank_made_comes_back_as_a_name(registry: Registry) -> None:
    """A decoder elsewhere is sent its prompt, and from then on the names of its own tokens."""
    mini = miniature("mini_seq2seq")
    driver = RankDriver(mini, registry, placement={"encoder": 0, "decoder": 1})
    sent: list[Run] = []
    take = driver.wires[1].follower.take
    driver.wires[1].follower.take = lambda message: (sent.append(message), take(message))[1]  # type: ignore[method-assign, func-returns-value]
    driver.submit("r", mini.example(random.Random(4)))
    driver.run()
    steps = [message for message in sent if isinstance(message, Run)]
    assert len(steps) > 3
    assert [len(step.values) for step in steps] == [1, 1] + [0] * (len(steps) - 2)  # the memory, the start


def test_a_rank_of_a_mesh_waits_for_the_next_step_and_not_for_the_device(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = miniature("mini_seq2seq")
    driver = RankDriver(mini, registry, placement={"encoder": 0, "decoder": 1})
    follower = driver.wires[1].follower
    held: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(follower, "take", held.append)
        driver.submit("r", mini.example(random.Random(4)))
        driver.run(until=lambda: bool(held) and isinstance(held[-1], Run))
    monkeypatch.setattr(follower.engine, "arrived", lambda flight: False)
    for message in held:
        follower.take(msgspec.structs.replace(message, answers=False) if isinstance(message, Run) else message)
        assert follower.step()
    assert not follower.step()  # free to take what comes
    deadline = follower.next_deadline()
    assert deadline is not None
    assert deadline <= time.monotonic()
    monkeypatch.undo()
    assert follower.step()
    assert follower.next_deadline() is None


@pytest.mark.parametrize("mini", MINIATURES, ids=lambda m: m.key)
def test_each_node_twice(mini: Miniature, registry: Registry) -> None:
    """Requests are shared out between two copies of every node, with steps of few tokens."""
    placement = {node: [0, 1] for node in nodes_of(mini, registry)}
    driver = RankDriver(mini, registry, seed=4, placement=placement, scheduler={"max_step_tokens": 5})
    assert_all_right(driver, mini, 6, seed=8)
    assert driver.worker.engine.steps > 0
    assert driver.wires[1].follower.engine.steps > 0


@pytest.mark.parametrize("mini", SPLIT, ids=lambda m: m.key)
def test_one_node_twice(mini: Miniature, registry: Registry) -> None:
    *others, last = nodes_of(mini, registry)
    placement: dict[str, object] = {**dict.fromkeys(others, 0), last: [1, 2]}
    driver = RankDriver(mini, registry, seed=5, placement=placement)
    assert_all_right(driver, mini, 6, seed=9)
    assert all(wire.follower.engine.steps for wire in driver.wires.values())


def test_guidance_branches_apart(registry: Registry) -> None:
    mini = miniature("mini_denoise")
    node = next(
        op.call.node for op in Driver(mini, registry).worker.plan.programs["denoise"] if getattr(op, "loops", ())
    )
    placement = {node: {"ranks": [0, 1], "split": "contexts"}}
    driver = RankDriver(mini, registry, seed=6, placement=placement)
    assert_all_right(driver, mini, 6, seed=10)
    here, there = driver.worker.engine.steps, driver.wires[1].follower.engine.steps
    assert here
    assert there


def test_sessions_and_siblings_stay_on_their_seat(registry: Registry) -> None:
    mini = miniature("mini_rollout")
    driver = RankDriver(mini, registry, placement={"world": [0, 1]})
    for number in range(6):
        prepared = driver.prepare(f"r{number}", mini.example(random.Random(number)))
        prepared.request.session = f"s{number % 2}"
        driver.worker.submit(prepared.request)
        driver.run()
        assert isinstance(driver.ended[f"r{number}"], Done)
    assert len(driver.worker.sessions) == 2
    used = driver.wires[1].follower.status()["resources"]["world"]["used"]
    assert used == 1  # one session on each rank
    driver.kill(1)
    assert len(driver.worker.sessions) == 1
    driver.start(1)
    driver.assert_empty()


def test_who_waits_while_a_rank_is_dead_is_served_by_the_next_one(registry: Registry) -> None:
    """What the books of the dead one would have held for it, the new one knows nothing of."""
    mini = miniature("mini_tts")
    driver = RankDriver(mini, registry, seed=4, placement={"lm": 1, "codec": 0})
    driver.kill(1)
    cases = examples(mini, 2, seed=14)
    for name, example in cases.items():
        driver.submit(name, example)
    driver.worker.step()
    driver.start(1)
    driver.run()
    for name, example in cases.items():
        assert_right(mini, example, dict(driver.result(name)))
    driver.assert_empty()


def test_a_session_whose_state_has_died_does_not_go_on_without_it(registry: Registry) -> None:
    mini = miniature("mini_rollout")
    driver = RankDriver(mini, registry, placement={"world": [0, 1]})
    for name in ("before0", "before1", "then0", "then1"):
        prepared = driver.prepare(name, mini.example(random.Random(1)))
        prepared.request.session = f"s{name[-1]}"
        driver.worker.submit(prepared.request)
        if "before" in name:
            driver.run()
    driver.kill(1)
    driver.run()
    ends = [driver.ended["then0"], driver.ended["then1"]]
    (failed,) = [end for end in ends if isinstance(end, Failed)]
    assert (failed.status, failed.code) == (503, "worker_died")
    assert len(driver.worker.sessions) == 1
    driver.start(1)
    driver.assert_empty()


def test_what_a_dead_rank_had_is_sent_to_the_next_one(registry: Registry) -> None:
    ranks = RankDriver(miniature("mini_tts"), registry, placement={"lm": 0, "codec": 1}).worker.ranks
    assert ranks is not None
    value, sent = Ref.whole(torch.arange(3)), list[Contents]()
    first = ranks.values.given(value, 1, sent)
    assert ranks.values.given(value, 1, sent) == first  # by its name alone
    assert len(sent) == 1
    peer, facts = ranks._links[1].peer, {"capacities": {}}
    ranks.lost(1)
    ranks.link(1, peer, facts)
    again = ranks.values.given(value, 1, sent)
    assert [contents.key for contents in sent] == [first.key, again.key]
    assert again.key != first.key


def test_what_lies_in_one_tensor_is_sent_value_by_value(registry: Registry) -> None:
    ranks = RankDriver(miniature("mini_tts"), registry, placement={"lm": 0, "codec": 1}).worker.ranks
    assert ranks is not None
    base, away, sent = torch.arange(3), ranks.values.away(1, []), list[Contents]()
    values = [Ref(base, place, place + 1, True) for place in range(3)]
    for value in values:
        value.away = away
    parts = [ranks.values.given(value, 1, sent) for value in values]
    for part, contents, value in zip(parts, sent, values, strict=True):
        assert part.key == contents.key
        assert unpack(contents, torch.device("cpu"))[part.start : part.stop].tolist() == value.items().tolist()


def test_a_copy_of_a_node_dies_and_the_other_serves_on(registry: Registry) -> None:
    mini = miniature("mini_chat")
    driver = RankDriver(mini, registry, seed=7, placement={"lm": [0, 1]})
    cases = examples(mini, 6, seed=12)
    for name, example in cases.items():
        driver.submit(name, example)
    driver.run(until=lambda: len(driver.emitted) == 6)
    driver.kill(1)
    driver.run()
    failed = {name for name, end in driver.ended.items() if isinstance(end, Failed)}
    assert 0 < len(failed) < 6
    for name in cases.keys() - failed:
        assert_right(mini, cases[name], dict(driver.result(name)))
    again = examples(mini, 3, seed=13)
    for name, example in again.items():
        driver.submit(f"again-{name}", example)
    driver.run()
    for name, example in again.items():
        assert_right(mini, example, dict(driver.result(f"again-{name}")))
    driver.start(1)
    driver.submit("last", again["r0"])
    driver.run()
    assert_right(mini, again["r0"], dict(driver.result("last")))
    driver.assert_empty()


def test_what_chance_decides_is_decided_before_the_ranks_hear_of_it(registry: Registry) -> None:
    mini = miniature("mini_seq2seq")
    driver = RankDriver(mini, registry, placement={"encoder": 0, "decoder": 1})
    prepared = driver.prepare("r", mini.example(random.Random(4)))
    assert prepared.request.sampling["sampler"].seed is None
    opened: list[Open] = []
    take = driver.wires[1].follower.take
    driver.wires[1].follower.take = lambda message: (opened.append(message), take(message))[1]  # type: ignore[method-assign, func-returns-value]
    driver.worker.submit(prepared.request)
    driver.run()
    (begin,) = [message for message in opened if isinstance(message, Open)]
    assert {*prepared.request.inputs} == {"prompt", "start"}
    assert {*begin.request.inputs} == {"start"}  # what its sampler looks at; the encoder's is elsewhere
    assert begin.request.sampling["sampler"].seed is not None
    assert begin.request.sampling["sampler"].seed == prepared.request.sampling["sampler"].seed

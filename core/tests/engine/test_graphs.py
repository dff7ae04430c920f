"""Steps in captured graphs give what plain steps give."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from recording import Rerun, record_steps
from torch import Tensor

from mstar.engine.engine import Flight
from mstar.engine.graphs import GraphRunner, chunk_row_buckets, row_buckets, token_buckets
from mstar.engine.step import Work
from mstar.nn.node import Step
from mstar.patterns.encoder_decoder import EncoderDecoderFacts
from mstar.registry import Registry
from mstar.spec.deployment import EngineOptions
from mstar.spec.graph import Entry, Graph, Port
from mstar.spec.request import Done, Failed
from mstar.spec.resources import RaggedAttention
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.faults import Boom
from mstar.testing.miniatures import MINIATURES, Example, Miniature, miniature
from mstar.testing.miniatures.common import VOCAB, decode
from mstar.testing.miniatures.text import MEMORY, PROMPT, SHAPE, Seq2Seq, context_sums, one_hot, token_logits
from mstar.testing.miniatures.worlds import Denoise, Dit


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


@pytest.mark.parametrize("most", [1, 3, 8, 31, 64, 100, 256, 300, 1000])
def test_buckets_reach_the_most_rows_and_waste_little(most: int) -> None:
    sizes = row_buckets(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    for rows in range(1, most + 1):
        size = next(s for s in sizes if s >= rows)
        assert size - rows <= max(3, rows * 0.42)


@pytest.mark.parametrize("most", [1, 7, 31, 64, 256])
def test_buckets_of_mixed_steps_have_room_for_padding(most: int) -> None:
    rows = chunk_row_buckets(most)
    assert rows == sorted(set(rows))
    assert rows[-1] == most + 1


@pytest.mark.parametrize("most", [1, 60, 512, 1000, 1024])
def test_buckets_of_tokens_reach_the_most_and_waste_little(most: int) -> None:
    sizes = token_buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for tokens in range(65, most + 1):
        assert next(s for s in sizes if s >= tokens) < 2 * tokens
    assert token_buckets(0) == []


def check(mini: Miniature, driver: Driver, asked: dict[str, Example]) -> None:
    for name, example in asked.items():
        got = driver.result(name)
        for stream, want in mini.expected(example).items():
            if isinstance(want, str):
                assert decode(got.get(stream, [])) == want
            else:
                np.testing.assert_allclose(got[stream], want, rtol=1e-6, atol=mini.tolerance)
    driver.assert_empty()


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("mini", MINIATURES, ids=lambda m: m.key)
def test_miniatures(mini: Miniature, lookahead: bool, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(mini, registry, engine={"lookahead": lookahead})
    record_steps(monkeypatch, driver, rows=16)
    rng = random.Random(4)
    asked = {f"r{i}": mini.example(rng) for i in range(12)}
    for name, example in asked.items():
        driver.submit(name, example)
    driver.run()
    check(mini, driver, asked)


@pytest.mark.parametrize(("seed", "lookahead"), [(0, True), (1, False)])
@pytest.mark.parametrize("key", ["mini_chat", "mini_tts", "mini_omni", "mini_unified", "mini_hybrid"])
def test_prompts_chunks_and_decoding_mixed(
    key: str, seed: int, lookahead: bool, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go at random while others decode; prompts are cut, and heads of some are in the cache."""
    mini, rng = miniature(key), random.Random(seed)
    driver = Driver(mini, registry, engine={"lookahead": lookahead}, scheduler={"max_step_tokens": rng.choice([9, 30])})
    runner, _ = record_steps(monkeypatch, driver, rows=16)
    prepared = len(runner.lanes)
    asked: dict[str, Example] = {}
    for i in range(24):
        example = rng.choice(list(asked.values())) if asked and rng.random() < 0.3 else mini.example(rng)
        asked[f"r{i}"] = example
        driver.submit(f"r{i}", example)
        if rng.random() < 0.1:
            driver.cancel(f"r{i}")
            del asked[f"r{i}"]
        for _ in range(rng.randrange(4)):
            driver.worker.step()
            driver.take()
    driver.run()
    check(mini, driver, asked)
    assert len(set(runner.lanes[prepared:])) > 5, "rows and tokens of steps"
    assert not [key for key in runner.faults if key[0] != "codec"], "the codec reads its rows' lengths on the host"
    assert len(runner.faults) <= 6, "after some failures no other size of that kind is tried"


@pytest.mark.parametrize("lookahead", [False, True])
def test_recordings_begin_from_kept_states(
    lookahead: bool, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state is kept in its place while recordings go on writing: the next prompts find it, whatever ran between."""
    mini, rng = miniature("mini_hybrid"), random.Random(11)
    driver = Driver(mini, registry, engine={"lookahead": lookahead}, resources={"state": {"checkpoints": 6}})
    runner, recorder = record_steps(monkeypatch, driver, rows=8)
    heads = ["".join(rng.choices("abcdef", k=18)) for _ in range(2)]
    asked: dict[str, Example] = {}
    for i in range(20):
        text = rng.choice(heads)[: rng.randint(9, 18)] + "".join(rng.choices("abc", k=rng.randint(1, 5)))
        asked[f"r{i}"] = Example(text, {"max_tokens": rng.randint(1, 9)})
        driver.submit(f"r{i}", asked[f"r{i}"])
        for _ in range(rng.randrange(5)):
            driver.worker.step()
            driver.take()
    driver.run()
    check(mini, driver, asked)
    assert not runner.faults
    assert recorder.replays > 20
    cached = [end.usage.cached for end in driver.ended.values() if isinstance(end, Done)]
    assert sum(tokens > 0 for tokens in cached) >= 8
    assert driver.worker.status()["checkpoints"]["state"]["evicted"] > 0


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize(
    ("key", "node", "entry"),
    [
        ("mini_hybrid", "lm", "forward"),  # recurrent state
        ("mini_rollout", "world", "forward"),
        ("mini_omni", "talker", "forward"),
        ("mini_tts", "codec", "forward"),  # windows of few sizes
        ("mini_seq2seq", "decoder", "forward"),  # cross attention
        ("mini_seq2seq", "encoder", "forward"),  # attention within each row
        ("mini_world", "world", "forward"),  # a rolling window
        ("mini_denoise", "denoiser", "velocity"),  # frozen context
        ("mini_denoise", "denoiser", "update"),  # no resources
        ("mini_policy", "policy", "forward"),
    ],
)
def test_state_of_every_kind_runs_in_recordings(
    key: str, node: str, entry: str, lookahead: bool, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go, and some fail behind a replay: the others of their step must read what was before."""
    mini, rng = miniature(key), random.Random(3)
    if node == "encoder":
        monkeypatch.setattr(Seq2Seq, "facts", attentive_facts)
        monkeypatch.setattr("mstar.testing.miniatures.text.MemoryEncoder.forward", attend_within)
    driver = Driver(mini, registry, engine={"lookahead": lookahead})
    runner, _ = record_steps(monkeypatch, driver, rows=16)
    doomed: set[str] = set()
    replayed = fail_replays(monkeypatch, driver, doomed)
    asked: dict[str, Example] = {}
    for i in range(24):
        name = f"r{i}"
        asked[name] = mini.example(rng)
        driver.submit(name, asked[name])
        for _ in range(rng.randrange(3)):
            driver.worker.step()
            driver.take()
        if rng.random() < 0.2 and name not in driver.ended:
            doomed.add(name)
    driver.run()
    hit = {name for name in doomed if isinstance(driver.ended[name], Failed)}
    check(mini, driver, {name: example for name, example in asked.items() if name not in hit})
    assert (node, entry) in replayed
    assert not [key for key in runner.faults if key[:2] == (node, entry)]


def attentive_facts(self: Seq2Seq) -> EncoderDecoderFacts:
    return EncoderDecoderFacts(
        replace(PROMPT, shape=("S",)), MEMORY, 64, SHAPE, RaggedAttention(heads=1, kv_heads=1, head_dim=VOCAB)
    )


def attend_within(self: Any, step: Step, prompt: Tensor) -> dict[str, Any]:
    """Each position's memory is the mean of its row's: the sum over the row is what it was."""
    value = one_hot(prompt)
    zero = torch.zeros_like(value)
    return {"memory": step["encoder_attention"].attend(zero, zero, value)[:, 0]}


def fail_replays(monkeypatch: pytest.MonkeyPatch, driver: Driver, doomed: set[str]) -> set[tuple[str, str]]:
    """From now on what a recording computed for a step with a request in *doomed* is lost before it is committed.
    Returns the nodes and entries that were repeated from recordings, kept up to date."""
    engine, armed = driver.worker.engine, [False]
    launch, captured, replayed = engine._launch, engine._captured, set()

    def noted_launch(work: Sequence[Work]) -> Flight:
        armed[0] = any(w.call.run.request.id in doomed for w in work)
        return launch(work)

    def noted_captured(node: str, entry: Entry, *args: Any) -> Any:
        ready = args[-1].graph is not None
        outputs = captured(node, entry, *args)
        if ready:
            replayed.add((node, entry.name))
            if armed[0]:
                raise Boom("a replay was doomed")
        return outputs

    monkeypatch.setattr(engine, "_launch", noted_launch)
    monkeypatch.setattr(engine, "_captured", noted_captured)
    return replayed


def tokens_of(driver: Driver, asked: dict[str, Example]) -> dict[str, list[Any]]:
    for name, example in asked.items():
        driver.submit(name, example, logprobs=2 if name > "r5" else None)
        driver.worker.step()
        driver.take()
    driver.run()
    driver.assert_empty()
    return {name: [(e.data, e.logprobs) for e in driver.emitted[name]] for name in asked}


def test_requests_keep_their_own_sampling(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws, filters, penalties and log-probabilities in steps with prompts are those of plain steps."""
    rng = random.Random(7)
    asked = {}
    for i in range(10):
        knobs = {"temperature": 3.0, "seed": i, "top_p": rng.choice([1.0, 0.9]), "max_tokens": 8}
        knobs |= {"frequency_penalty": 0.5} if i == 4 else {}
        asked[f"r{i}"] = Example("".join(rng.choices("abcdef", k=rng.randint(1, 9))), knobs)
    drivers = [Driver(miniature("mini_chat"), registry) for _ in range(2)]
    wanted = tokens_of(drivers[0], asked)
    runner, _ = record_steps(monkeypatch, drivers[1], rows=16)
    prepared = len(runner.lanes)
    assert tokens_of(drivers[1], asked) == wanted
    assert len(runner.lanes) > prepared


EDITS: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.7, "presence_penalty": 0.4, "top_p": 0.9},
    {"logit_bias": {3: 6.0, 5: 7.0}},
    {"response_format": {"type": "regex", "regex": "[a-f]{3}[0-9]{4}"}},
    {"response_format": {"type": "regex", "regex": "[xyz]{5}"}, "frequency_penalty": 1.0, "logit_bias": {9: 2.0}},
    {"min_tokens": 6, "stop_token": 7, "logit_bias": {7: 9.0}},
    {},
    {},
]
"""Requests whose logits are changed before a token is chosen, and some whose are not."""


def edited_answers(driver: Driver, turns: int) -> dict[str, list[Any]]:
    """Twice over, so that the second half runs in graphs that were made for the edits of others."""
    fields = ("response_format", "logit_bias")
    for turn in range(turns):
        for i, edits in enumerate(EDITS[turn % 3 :] + EDITS[: turn % 3]):
            knobs = {"temperature": 3.0, "seed": i + turn, "max_tokens": 9}
            knobs |= {name: value for name, value in edits.items() if name not in fields}
            task = {name: value for name, value in edits.items() if name in fields}
            driver.submit(f"r{turn}-{i}", Example("abcdef"[: i % 6 + 1], knobs), logprobs=i % 3 or None, **task)
            driver.worker.step()
            driver.take()
        driver.run()
    driver.assert_empty()
    return {name: [(e.data, e.logprobs) for e in events] for name, events in driver.emitted.items()}


@pytest.mark.parametrize("lookahead", [False, True])
def test_edits_of_logits_run_in_graphs_and_stay_with_their_requests(
    lookahead: bool, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = edited_answers(Driver(miniature("mini_chat"), registry, engine={"lookahead": lookahead}), 3)
    driver = Driver(miniature("mini_chat"), registry, engine={"lookahead": lookahead})
    runner, _ = record_steps(monkeypatch, driver, rows=16)
    variants: list[Any] = []
    run = runner.run

    def watched(node: Any, entry: str, step: Step, inputs: Any) -> Any:
        variants.append(None if step.lane is None else step.lane.variants["sampler"])
        return run(node, entry, step, inputs)

    monkeypatch.setattr(runner, "run", watched)
    assert edited_answers(driver, 3) == wanted
    assert None not in variants, "a step ran as plain calls"
    assert {(v.edits, v.bias) for v in variants} >= {(True, 0), (True, 256)}
    assert not runner.faults


def test_where_all_requests_have_a_penalty_the_first_finds_its_graphs(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(driver: Driver) -> dict[str, Any]:
        for i in range(3):
            knobs = {"repetition_penalty": 1.3 + i, "temperature": 0.8 * i, "top_p": 0.8, "seed": i, "max_tokens": 9}
            driver.submit(f"r{i}", Example("abcdef"[: i + 1], knobs))
        driver.run()
        driver.assert_empty()
        return {name: [e.data for e in events] for name, events in driver.emitted.items()}

    wanted = said(Driver(miniature("mini_chat"), registry))
    driver = Driver(miniature("mini_chat"), registry)
    sampler: Any = driver.worker.resources["sampler"]
    sampler.spec = dataclasses.replace(sampler.spec, penalised=True)
    runner, _ = record_steps(monkeypatch, driver, rows=16)
    prepared = set(runner._lanes)
    assert {dict(key[4])["sampler"].edits for key in prepared} == {True}
    assert said(driver) == wanted
    assert {key for key in runner._lanes if key[2] == key[3]} <= prepared  # the rest are other sizes of prompts
    assert not runner.faults


@pytest.mark.parametrize(("filtered", "wanted"), [(False, {False, True}), (True, {True})])
def test_which_filters_are_captured_first_follows_from_the_sampler(
    filtered: bool, wanted: set[bool], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(miniature("mini_chat"), registry)
    sampler: Any = driver.worker.resources["sampler"]
    sampler.spec = dataclasses.replace(sampler.spec, filtered=filtered)
    runner, _ = record_steps(monkeypatch, driver, rows=2)
    assert {dict(key[4])["sampler"].filters for key in runner._lanes} == wanted


def count_on_the_host(self: Any, step: Step, ids: Tensor) -> dict[str, Any]:
    token = (context_sums(step, ids) + step["positions"].positions + 1) % VOCAB
    ends = torch.tensor(list(step.lengths)).cumsum(0) - 1
    return {"token": step["sampler"].sample(token_logits(token[ends]))}


def test_a_node_that_reads_lengths_on_the_host_gets_no_graph_of_them(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mstar.testing.miniatures.text.SumNode.forward", count_on_the_host)
    mini = miniature("mini_chat")
    driver = Driver(mini, registry)
    runner, recorder = record_steps(monkeypatch, driver, rows=16)
    asked = {f"r{i}": mini.example(random.Random(i)) for i in range(6)}
    for name, example in asked.items():
        driver.submit(name, example)
        driver.worker.step()
        driver.take()
    driver.run()
    check(mini, driver, asked)
    assert runner.lanes == []
    assert recorder.replays > len(row_buckets(16)) * 2, "decoding still has graphs"
    said = [record.message for record in caplog.records if "without a CUDA graph" in record.message]
    assert len(said) == 1, "once, not for each size"
    assert "lengths on the host" in said[0]


def test_no_graphs_for_steps_with_prompts_if_so_asked(registry: Registry) -> None:
    options = Driver("mini_chat", registry, engine={"max_graph_tokens": 0}).worker.config.deployment.engine
    runner = GraphRunner(options, Rerun(), "cpu")
    assert all(rows == tokens for rows, tokens in runner.sizes(32, 512))
    runner = GraphRunner(EngineOptions(max_graph_tokens=200), Rerun(), "cpu")
    sizes = runner.sizes(32, 512)
    mixed = {size for size in sizes if size[0] != size[1]}
    assert mixed == {(rows, tokens) for rows in (4, 16) for tokens in (64, 128, 192, 200)}
    assert [tokens for _, tokens in sizes] == sorted((tokens for _, tokens in sizes), reverse=True)


def sized(graph: Graph, fill: bool = True) -> Graph:
    """The denoise miniature's graph, whose updates name a size, an input that may be left out, and rows."""
    denoiser = graph.node("denoiser")
    entries = []
    for entry in denoiser.entries:
        if entry.name == "update":
            mask = Port("mask", "float32", ("M",), "stacked", optional=True)
            entry = replace(entry, inputs=(*entry.inputs, mask), graph_sizes=({"H": 4, "W": 4},))
        entries.append(entry)
    changed = replace(denoiser, entries=tuple(entries), graph_rows=(2, 3), graph_fill=fill)
    return replace(graph, nodes=tuple(changed if node is denoiser else node for node in graph.nodes))


def masked_update(self: Dit, step: Step, mask: Tensor | None, **inputs: Tensor) -> dict[str, Any]:
    assert mask is None
    return UPDATE(self, step, **inputs)


UPDATE = Dit.update


@pytest.mark.parametrize("lookahead", [False, True])
def test_steps_of_named_sizes_and_rows(lookahead: bool, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured before the first request, filled up to the node's own rows; more rows run as plain calls."""
    plain = Denoise.graph
    monkeypatch.setattr(Denoise, "graph", lambda self: sized(plain(self)))
    monkeypatch.setattr(Dit, "update", masked_update)
    mini = miniature("mini_denoise")
    driver = Driver(mini, registry, engine={"lookahead": lookahead})
    runner, _ = record_steps(monkeypatch, driver, rows=8)
    before = {key[2] for key in runner._lanes if key[:2] == ("denoiser", "update")}
    assert before == {2, 3}
    assert not runner.faults
    knobs = {"steps": 3, "size": 4, "seed": 1}
    for count in (1, 3, 5):
        asked = {f"{count}.{i}": Example("a cat", {**knobs, "seed": i}) for i in range(count)}
        for name, example in asked.items():
            driver.submit(name, example)
        driver.run()
        check(mini, driver, asked)
    found = [key for key in runner._lanes if key[0] == "denoiser" and key[1] != "read"]
    assert {key[2] for key in found} == {2, 3}
    assert len([key for key in found if key[1] == "update"]) == 2, "no step of five rows, and none of another size"


@pytest.mark.parametrize("fill", [True, False])
def test_steps_of_a_node_whose_rows_are_dear_are_not_filled_up(
    fill: bool, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Denoise.graph
    monkeypatch.setattr(Denoise, "graph", lambda self: sized(plain(self), fill))
    monkeypatch.setattr(Dit, "update", masked_update)
    mini = miniature("mini_denoise")
    driver = Driver(mini, registry)
    runner, _ = record_steps(monkeypatch, driver, rows=8)
    found, lane_of = set(), runner.lane

    def lane(work: Sequence[Work], variants: Any) -> Any:
        lane = lane_of(work, variants)
        if work[0].call.op.call.node == "denoiser" and work[0].call.op.entry.name == "update":
            found.add((len(work), None if lane is None else lane.rows))
        return lane

    monkeypatch.setattr(runner, "lane", lane)
    for count in (1, 3, 4):
        asked = {f"{count}.{i}": Example("a cat", {"steps": 3, "size": 4, "seed": i}) for i in range(count)}
        for name, example in asked.items():
            driver.submit(name, example)
        driver.run()
        check(mini, driver, asked)
    assert found == {(1, 2 if fill else None), (3, 3), (4, None)}

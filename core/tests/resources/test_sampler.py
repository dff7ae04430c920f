"""The sampler as a resource: parameters per request, random streams, life of a step, books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row
from mstar.resources.sampler import ConstraintFactory, SamplerResource
from mstar.resources.staging import Stage
from mstar.spec.errors import RequestError
from mstar.spec.request import EngineRequest, SamplingParams
from mstar.spec.resources import Sampler

VOCAB = 1100


def sampler(
    vocab: int = VOCAB, owners: int = 8, constraints: ConstraintFactory | None = None, prompt: str | None = "prompt"
) -> SamplerResource:
    context = ResourceContext(device=torch.device("cpu"), dtype=torch.float32, max_owners=owners, stage=Stage("cpu"))
    return SamplerResource("sampler", Sampler(vocab=vocab, prompt=prompt), context, constraints)


def start(resource: SamplerResource, name: str, prompt: Sequence[int] = (1,), **params: Any) -> Owner:
    owner = Owner(name)
    assert resource.reserve(owner, 1)
    sampling = {"sampler": SamplingParams(**params)}
    resource.open(owner, EngineRequest(id=name, inputs={"prompt": np.array(prompt, dtype=np.int64)}, sampling=sampling))
    return owner


def step(resource: SamplerResource, owners: Sequence[Owner], logits: torch.Tensor, **row: Any) -> list[int]:
    rows = [Row(owner, **row) for owner in owners]
    ids = resource.plan(rows).sample(logits).ids
    resource.commit(rows)
    return list(ids.tolist())


def logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_p": 0.8, "temperature": 1.3},
    {"seed": 3, "top_k": 7},
    {"seed": 4, "min_p": 0.2},
    {"seed": 5, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": -0.3},
    {"seed": 6, "logit_bias": {5: 9.0, 6: 8.5}, "min_tokens": 3, "stop_token_ids": (5,)},
    {"seed": 7, "allowed_token_ids": (3, 4, 1099), "top_p": 0.9, "top_k": 2},
    {"temperature": 0.0, "frequency_penalty": 1.5},
]


def generate(resource: SamplerResource, owner: Owner, row: int, steps: int) -> list[int]:
    return [step(resource, [owner], logits(len(MIXED), seed)[row : row + 1])[0] for seed in range(steps)]


@settings(max_examples=8, deadline=None)
@given(st.permutations(range(len(MIXED))), st.integers(1, len(MIXED)))
def test_a_request_samples_the_same_alone_and_in_any_batch(order: list[int], size: int) -> None:
    chosen = order[:size]
    resource = sampler(owners=len(MIXED))
    owners = [start(resource, str(i), prompt=[i, 30], **MIXED[i]) for i in chosen]
    together = [step(resource, owners, logits(len(MIXED), seed)[torch.tensor(chosen)]) for seed in range(5)]
    for place, i in enumerate(chosen):
        alone = sampler(owners=1)
        assert generate(alone, start(alone, "x", prompt=[i, 30], **MIXED[i]), i, 5) == [ids[place] for ids in together]


def test_a_failed_step_is_repeated_alike_and_an_incomplete_row_does_not_advance() -> None:
    resource, twin = sampler(), sampler()
    mine = [start(resource, str(i), **MIXED[i]) for i in (1, 5)]
    theirs = [start(twin, str(i), **MIXED[i]) for i in (1, 5)]
    rows = [Row(owner) for owner in mine]
    for seed in range(6):
        step(resource, mine, logits(2, 100 + seed), complete=False)
        resource.plan(rows).sample(logits(2, seed))
        resource.rollback(rows)
        frozen = resource.plan(rows, frozen=True)
        frozen.sample(logits(2, 77))
        resource.commit(rows, frozen=True)
        assert step(resource, mine, logits(2, seed)) == step(twin, theirs, logits(2, seed))


def test_only_complete_rows_of_a_mixed_step_advance() -> None:
    resource, twin = sampler(), sampler()
    mine = [start(resource, str(i), seed=i, frequency_penalty=2.0) for i in range(2)]
    theirs = [start(twin, str(i), seed=i, frequency_penalty=2.0) for i in range(2)]
    rows = [Row(mine[0], complete=False), Row(mine[1])]
    second = resource.plan(rows).sample(logits(2)).ids[1]
    resource.commit(rows)
    assert step(twin, [theirs[1]], logits(2)[1:]) == [int(second)]
    for seed in range(4):
        assert step(resource, mine, logits(2, seed)) == step(twin, theirs, logits(2, seed))


def test_seeds() -> None:
    resource = sampler()
    flat = torch.zeros(4, VOCAB)
    owners = [start(resource, n, seed=s) for n, s in [("a", 5), ("b", 5), ("c", 6), ("d", -5)]]
    tokens = list(zip(*[step(resource, owners, flat) for _ in range(8)], strict=True))
    assert tokens[0] == tokens[1]
    assert len({tokens[0], tokens[2], tokens[3]}) == 3
    unseeded = [start(resource, n) for n in "efgh"]
    free = list(zip(*[step(resource, unseeded, flat) for _ in range(8)], strict=True))
    assert len(set(free)) == 4


def test_contexts_of_one_request_draw_differently() -> None:
    resource = sampler()
    request = EngineRequest(id="r", sampling={"sampler": SamplingParams(seed=1)})
    owners = [Owner("r", "main"), Owner("r", "uncond")]
    for owner in owners:
        resource.reserve(owner, 1)
        resource.open(owner, request)
    drawn = [step(resource, owners, torch.zeros(2, VOCAB)) for _ in range(6)]
    assert any(a != b for a, b in drawn)


def test_greedy_takes_the_largest_in_any_dtype_and_leaves_the_logits_alone() -> None:
    resource = sampler()
    owners = [start(resource, n, temperature=0.0) for n in "ab"]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given_logits = logits(2).to(dtype)
        before = given_logits.clone()
        assert step(resource, owners, given_logits) == [row.index(max(row)) for row in before.tolist()]
        assert torch.equal(given_logits, before)


def test_edits_leave_the_logits_alone() -> None:
    resource = sampler(owners=len(MIXED))
    owners = [start(resource, str(i), **p) for i, p in enumerate(MIXED)]
    given_logits = logits(len(MIXED))
    before = given_logits.clone()
    step(resource, owners, given_logits)
    assert torch.equal(given_logits, before)


def test_filters_reach_the_draw() -> None:
    resource = sampler(vocab=6)
    scores = torch.tensor([[5.0, 4.9, 4.8, 3.0, -1.0, -2.0]]).expand(4, -1)
    filters: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {}]
    owners = [start(resource, n, seed=1, **p) for n, p in zip("abcd", filters, strict=True)]
    drawn = [step(resource, owners, scores) for _ in range(300)]
    support = [{row[i] for row in drawn} for i in range(4)]
    assert support[:3] == [{0, 1}, {0, 1}, {0, 1, 2}]
    assert {0, 1, 2, 3} <= support[3]


def test_repetition_counts_the_prompt_and_the_answer() -> None:
    resource = sampler(vocab=4)
    owner = start(resource, "a", prompt=[0, 0, -7, 99], temperature=0.0, repetition_penalty=2.0)
    scores = torch.tensor([[4.0, 3.0, 2.5, -1.0]])
    # 0 was in the prompt: 2.0. Then 1 is worth 1.5, then 2 is worth 1.25; then 0 is the best again.
    assert [step(resource, [owner], scores)[0] for _ in range(4)] == [1, 2, 0, 0]


def test_frequency_and_presence_count_the_answer_only() -> None:
    resource = sampler(vocab=3)
    scores = torch.tensor([[4.0, 3.2, 2.0], [4.0, 3.2, 2.0]])
    frequency = start(resource, "f", prompt=[0, 0, 0], temperature=0.0, frequency_penalty=0.5)
    presence = start(resource, "p", prompt=[0, 0, 0], temperature=0.0, presence_penalty=1.0)
    drawn = [step(resource, [frequency, presence], scores) for _ in range(5)]
    # 4.0, 3.5, then 3.0 < 3.2; then 3.0 against 2.7; then 2.5 against 2.7.
    assert [row[0] for row in drawn] == [0, 0, 1, 0, 1]
    # 4.0, then 3.0 < 3.2; from then on 3.0 against 2.2.
    assert [row[1] for row in drawn] == [0, 1, 0, 0, 0]


def test_min_tokens_forbids_the_stop_tokens_until_then() -> None:
    resource = sampler(vocab=4)
    scores = torch.tensor([[1.0, 9.0, 8.0, 2.0]]).expand(2, -1)
    limits: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (1, 2, 77)}
    stopped, ignoring = start(resource, "a", **limits), start(resource, "b", ignore_eos=True, **limits)
    assert [step(resource, [stopped, ignoring], scores) for _ in range(3)] == [[3, 1], [3, 1], [1, 1]]


def test_bias_and_allowed_ids() -> None:
    resource = sampler()
    owners = [
        start(resource, "a", temperature=0.0, logit_bias={1000: 100.0}),
        start(resource, "b", temperature=0.0, allowed_token_ids=(1, 2, 3)),
        start(resource, "c", temperature=0.0, logit_bias={1000: 100.0, 7: 50.0}, allowed_token_ids=(7, 8)),
    ]
    scores = logits(3)
    assert step(resource, owners, scores) == [1000, 1 + int(scores[1, 1:4].argmax()), 7]


@pytest.mark.parametrize(("field", "value"), [("logit_bias", {VOCAB: 1.0}), ("allowed_token_ids", (-1,))])
def test_ids_outside_the_vocabulary_are_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"0 to {VOCAB - 1}") as caught:
        start(sampler(), "a", **{field: value})
    assert caught.value.param == field


def test_logprobs_are_raw_and_only_for_those_who_asked() -> None:
    resource = sampler()
    scores = logits(3)
    owners = [
        start(resource, "a", temperature=0.0),
        start(resource, "b", temperature=0.0, logprobs=2, logit_bias={9: 100.0}),
        start(resource, "c", seed=1, top_k=3, logprobs=0),
    ]
    view = resource.plan([Row(o) for o in owners])
    sampled = view.sample(scores)
    assert sampled.report is not None
    read = sampled.report()
    assert read is not None
    nothing, biased, plain = read()
    table = torch.log_softmax(scores, -1)
    assert nothing is None
    assert (biased.token, biased.logprob) == (9, pytest.approx(float(table[1, 9])))
    assert [t for t, _ in biased.top] == table[1].topk(2).indices.tolist()
    assert (plain.token, plain.top) == (int(sampled.ids[2]), [])
    silent = resource.plan([Row(owners[0])]).sample(scores[:1]).report
    assert silent is not None
    assert silent() is None


def test_a_second_call_in_a_step_draws_other_numbers() -> None:
    resource, twin = sampler(), sampler()
    mine, theirs = start(resource, "a", seed=3), start(twin, "a", seed=3)
    rows, flat = [Row(mine)], torch.zeros(1, VOCAB)
    view = resource.plan(rows)
    first = [int(view.sample(flat).ids) for _ in range(4)]
    resource.commit(rows)
    more = step(resource, [mine], flat)
    assert [*first, *more] == [step(twin, [theirs], flat)[0] for _ in range(5)]


class Alternating:
    """Allows even token ids, then odd ones, in turn; remembers what it accepted."""

    def __init__(self, vocab: int):
        self.vocab, self.accepted, self.asked = vocab, list[int](), 0

    def mask(self, row: npt.NDArray[np.int32]) -> None:
        self.asked += 1
        bits = np.zeros(len(row) * 32, dtype=np.uint8)
        bits[len(self.accepted) % 2 : self.vocab : 2] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        assert token % 2 == len(self.accepted) % 2
        self.accepted.append(token)


def alternating(vocab: int = VOCAB) -> tuple[ConstraintFactory, dict[str, Alternating]]:
    """A factory, and what it made, by grammar."""
    made: dict[str, Alternating] = {}

    def factory(grammar: str, stop_ids: Sequence[int]) -> Alternating:
        made[grammar] = Alternating(vocab)
        return made[grammar]

    return factory, made


def test_a_constraint_masks_its_row_and_accepts_committed_tokens() -> None:
    factory, made = alternating()
    resource = sampler(constraints=factory)
    owners = [start(resource, "a", seed=1, grammar="g"), start(resource, "b", temperature=0.0)]
    rows = [Row(o) for o in owners]
    answer = []
    for seed in range(6):
        step(resource, owners, logits(2, 50 + seed), complete=False)
        asked = made["g"].asked
        resource.plan(rows).sample(logits(2, seed))
        resource.rollback(rows)
        ids = step(resource, owners, logits(2, seed))
        assert made["g"].asked == asked + 2  # a token of no consequence needs no mask
        assert ids[1] == int(logits(2, seed)[1].argmax())
        answer.append(ids[0])
    assert [token % 2 for token in answer] == [0, 1, 0, 1, 0, 1]
    resource.plan(rows)
    assert made["g"].accepted == answer


def test_a_constraint_is_not_told_what_was_retracted() -> None:
    factory, made = alternating()
    resource = sampler(constraints=factory)
    owner = start(resource, "a", seed=1, grammar="g")
    step(resource, [owner], logits(1))
    resource.retract(Row(owner))
    assert step(resource, [owner], logits(1))[0] % 2 == 0
    resource.plan([Row(owner)])
    assert len(made["g"].accepted) == 1


def test_min_tokens_gives_way_to_a_complete_constraint() -> None:
    class StopOnly(Alternating):
        def mask(self, row: npt.NDArray[np.int32]) -> None:
            row[:] = 0
            row[0] = 1 << 5

    resource = sampler(constraints=lambda grammar, stop_ids: StopOnly(VOCAB))
    limits: dict[str, Any] = {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": (5,)}
    assert step(resource, [start(resource, "a", grammar="g", **limits)], logits(1)) == [5]
    other = start(resource, "b", grammar="g", allowed_token_ids=(6,), **limits)
    with pytest.raises(RequestError, match="allows none"):
        resource.plan([Row(other)])


def test_a_grammar_without_a_backend_is_refused() -> None:
    with pytest.raises(RequestError, match="not available") as caught:
        start(sampler(), "a", grammar="{}")
    assert caught.value.param == "response_format"


def test_a_session_goes_on_with_new_parameters() -> None:
    resource = sampler(vocab=4)
    owner = Owner("session:s")
    resource.reserve(owner, 1)
    scores = torch.tensor([[4.0, 3.0, 2.5, -1.0]])
    first = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    resource.open(owner, EngineRequest(id="1", sampling={"sampler": first}))
    assert step(resource, [owner], scores) == [0]
    second = SamplingParams(temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.1)
    resource.open(owner, EngineRequest(id="2", sampling={"sampler": second}))
    assert step(resource, [owner], scores) == [1]  # 0 was said before: it counts as prompt (2.0), without frequency
    resource.open(owner, EngineRequest(id="3", sampling={"sampler": SamplingParams(temperature=0.0)}))
    assert step(resource, [owner], scores) == [0]
    resource.check([owner])
    assert resource.usage().used == 1


def test_histories_exist_only_for_penalties_and_are_given_back() -> None:
    resource = sampler(owners=40)
    plain = [start(resource, f"p{i}") for i in range(3)]
    assert len(resource._histories.marks) == 1
    penal = [start(resource, f"q{i}", prompt=[i], repetition_penalty=1.5) for i in range(20)]
    assert resource._histories.used == 20
    resource.check([*plain, *penal])
    for owner in penal:
        resource.close(owner)
    assert resource._histories.used == 0
    fresh = start(resource, "again", prompt=[], temperature=0.0, repetition_penalty=1.5)
    scores = torch.zeros(1, VOCAB)
    scores[0, :20] = torch.arange(20) + 1.0
    assert step(resource, [fresh], scores) == [19]  # nothing is left of the owners that saw token 19 before
    with pytest.raises(IntegrityError):
        resource.check(plain)


def test_a_long_history_is_kept_whole() -> None:
    """Each token may come once: 900 steps walk through the vocabulary in the order of the logits."""
    resource = sampler()
    owners = [start(resource, n, prompt=[7], temperature=0.0, presence_penalty=50.0) for n in "ab"]
    scores = torch.stack([torch.arange(VOCAB, 0, -1), torch.arange(VOCAB)]).float() / 50
    drawn = [step(resource, owners, scores) for _ in range(900)]
    assert [row[0] for row in drawn] == list(range(900))
    assert [row[1] for row in drawn] == list(range(VOCAB - 1, VOCAB - 901, -1))


class Operations(TorchDispatchMode):
    """Counts what the device is asked to do."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operation(*args, **(kwargs or {}))


def test_a_commit_with_penalties_asks_the_device_as_little_for_many_rows_as_for_one() -> None:
    counts = []
    for rows in (1, 8):
        resource = sampler()
        owners = [start(resource, str(n), repetition_penalty=1.3) for n in range(rows)]
        step(resource, owners, logits(rows))  # room for their histories
        work = [Row(owner) for owner in owners]
        resource.plan(work).sample(logits(rows))
        with Operations() as operations:
            resource.commit(work)
        counts.append(operations.count)
    assert counts[0] == counts[1]


def test_slots_run_out_and_come_back() -> None:
    resource = sampler(owners=2)
    first, _ = start(resource, "a"), start(resource, "b")
    assert resource.capacity() == 2
    assert not resource.reserve(Owner("c"), 1)
    resource.close(first)
    assert resource.reserve(Owner("c"), 1)
    resource.close(Owner("c"))  # reserved, never opened
    with pytest.raises(KeyError):
        resource.close(first)


def test_a_slot_that_changed_hands_is_gathered_anew() -> None:
    resource = sampler(owners=1)
    scores = logits(1)
    owner = start(resource, "a", temperature=0.0)
    assert step(resource, [owner], scores) == [int(scores.argmax())]
    resource.close(owner)
    owner = start(resource, "b", temperature=0.0, allowed_token_ids=(4,))
    assert step(resource, [owner], scores) == [4]


def test_wrong_logits_and_wrong_order_are_told() -> None:
    resource = sampler()
    rows = [Row(start(resource, "a"))]
    with pytest.raises(ValueError, match="expected"):
        resource.plan(rows).sample(torch.zeros(1, VOCAB + 1))
    resource.rollback(rows)
    with pytest.raises(IntegrityError, match="without a plan"):
        resource.commit(rows)


def test_works_in_and_out_of_inference_mode() -> None:
    resource = sampler()
    with torch.inference_mode():
        owner = start(resource, "a", seed=1, repetition_penalty=1.2, top_p=0.9)
        inside = step(resource, [owner], logits(1))
    resource.open(owner, EngineRequest(id="a", sampling={"sampler": SamplingParams(seed=1, top_p=0.9)}))
    assert step(resource, [owner], logits(1)) == inside


@pytest.mark.parametrize("params", MIXED)
def test_a_retracted_step_leaves_no_trace(params: dict[str, Any]) -> None:
    plain, ahead = sampler(), sampler()
    for resource in (plain, ahead):
        start(resource, "a", prompt=(1, 7), **params)
    owner = Owner("a")
    for turn in range(6):
        if turn % 2:
            step(ahead, [owner], logits(1, 100 + turn))  # launched too early, whatever it sampled
            ahead.retract(Row(owner))
        assert step(ahead, [owner], logits(1, turn)) == step(plain, [owner], logits(1, turn))
    for resource in (plain, ahead):
        resource.close(owner)
        resource.check([])

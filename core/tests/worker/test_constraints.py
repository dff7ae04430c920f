"""Structured output through a worker: the answer obeys its constraint, whatever happens beside it."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from typing import Any

import numpy as np
import pytest

from mstar.registry import Registry
from mstar.resources import grammars
from mstar.resources.grammars import GrammarCompiler
from mstar.spec.constraints import Regex, encode_constraint
from mstar.spec.errors import RequestError
from mstar.spec.request import Done, Failed
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.miniatures import Example, miniature
from mstar.testing.miniatures.common import ALPHABET, STOP, decode

REGISTRY: Registry = miniature_registry()
MINI = miniature("mini_chat")

SCHEMA = {"type": "object", "properties": {"ab": {"type": "integer", "maximum": 99}}, "required": ["ab"]}
CALL = {
    "type": "triggered_tags",
    "triggers": ["<c>"],
    "tags": [{"begin": "<c>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</c>"}],
}
FORCED = {"type": "tag", "begin": "<c>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</c>"}


def obeys_schema(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"ab"} and isinstance(value["ab"], int)


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, obeys_schema),
    ({"type": "regex", "regex": "[a-f]{3}(xy|z)"}, re.compile("[a-f]{3}(xy|z)").fullmatch),
    ({"type": "choice", "choice": ["one", "two", 'a"b']}, ["one", "two", 'a"b'].__contains__),
    ({"type": "grammar", "grammar": 'root ::= "a" b\nb ::= [0-9] | [0-9] b'}, re.compile("a[0-9]+").fullmatch),
    ({"type": "structural_tag", "format": FORCED}, lambda text: obeys_schema(text.removeprefix("<c>")[:-4])),
]


def driver(**overrides: Any) -> Driver:
    return Driver(MINI, REGISTRY, **overrides)


def example(text: str = "abc", **knobs: Any) -> Example:
    return Example(text, {"temperature": 2.0, "max_tokens": 64, "seed": 3, **knobs})


def said(one: Driver, name: str) -> str:
    ids = one.result(name)["text"]
    assert ids[-1] == STOP
    return decode(ids[:-1])


def test_a_request_answers_within_its_constraint_alone_and_in_any_batch() -> None:
    together = driver(engine={"lookahead": True}, scheduler={"max_step_tokens": 9})
    for i, (form, _) in enumerate(FORMS):
        together.submit(f"c{i}", example("abcdefgh" * i + "a", seed=i), response_format=form)
        together.submit(f"p{i}", example("bcd", seed=i, temperature=0.0, max_tokens=20))
    together.run()
    for i, (form, obeys) in enumerate(FORMS):
        assert obeys(said(together, f"c{i}")), said(together, f"c{i}")
        end = together.ended[f"c{i}"]
        assert isinstance(end, Done)
        assert end.reason == "stop"
        alone = driver(engine={"lookahead": False})
        alone.submit("a", example("abcdefgh" * i + "a", seed=i), response_format=form)
        alone.run()
        assert said(alone, "a") == said(together, f"c{i}")
        wanted = MINI.expected(Example("bcd", {"max_tokens": 20}))["text"]
        assert decode(together.result(f"p{i}")["text"]) == wanted
    together.assert_empty()


def test_free_text_until_a_call_begins() -> None:
    one = driver()
    form = {"type": "structural_tag", "format": CALL}
    for seed in range(12):
        bias = {STOP: -100.0} | {ALPHABET.index(char): 9.0 for char in "<c>"}
        one.submit(f"r{seed}", example(seed=seed, max_tokens=120), response_format=form, logit_bias=bias)
    one.run()
    called = 0
    for seed in range(12):
        text = decode(one.result(f"r{seed}")["text"])
        for call in re.findall("<c>(.*?)</c>", text):
            assert obeys_schema(call)
            called += 1
    assert called
    one.assert_empty()


def test_properties_come_in_the_order_of_the_schema() -> None:
    one = driver()
    schema = {"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}}, "required": ["a", "b"]}
    one.submit("r", example(max_tokens=200), response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    one.run()
    assert list(json.loads(said(one, "r"))) == ["b", "a"]


def test_logprobs_and_penalties_beside_a_grammar() -> None:
    one = driver()
    form = {"type": "regex", "regex": "[ab]{8}"}
    one.submit("r", example(frequency_penalty=2.0, temperature=0.0), response_format=form, logprobs=2)
    one.run()
    assert sorted(said(one, "r")) == list("aaaabbbb")  # the penalty makes them take turns
    reports = [report for event in one.emitted["r"] for report in event.logprobs or ()]
    assert [report.token for report in reports] == one.result("r")["text"]
    assert all(len(report.top) == 2 for report in reports)


def test_samples_of_one_prompt_each_have_a_constraint_of_their_own() -> None:
    one = driver(engine={"lookahead": True})
    form = {"type": "regex", "regex": "[a-z]{6}"}
    for i in range(3):
        prepared = one.prepare(f"n{i}", example("shared prompt", seed=i), response_format=form)
        prepared.request.sibling_of = "n0" if i else None
        one.submit_prepared(prepared, example())
    one.run()
    answers = {said(one, f"n{i}") for i in range(3)}
    assert len(answers) == 3
    assert all(re.fullmatch("[a-z]{6}", text) for text in answers)
    one.assert_empty()


def test_a_cancel_in_the_middle_leaves_nothing() -> None:
    one = driver(engine={"lookahead": True})
    form = {"type": "regex", "regex": "[a-z]{50}"}
    one.submit("gone", example(), response_format=form)
    one.submit("stays", example(), response_format={"type": "regex", "regex": "[0-9]{9}"})
    one.run(until=lambda: len(one.emitted.get("gone", ())) > 3)
    one.cancel("gone")
    one.run()
    assert re.fullmatch("[0-9]{9}", said(one, "stays"))
    one.assert_empty()
    sampler: Any = one.worker.resources["sampler"]
    assert not sampler._untold


def test_an_answer_that_is_cut_ends_with_length() -> None:
    one = driver()
    one.submit("r", example(max_tokens=4), response_format={"type": "regex", "regex": "[a-z]{50}"})
    one.run()
    end = one.ended["r"]
    assert isinstance(end, Done)
    assert end.reason == "length"


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}, "nonsense"),
        ({"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/x"}}}, r"\$defs"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "regex", "regex": "("}, "parenthesis"),
        ({"type": "regex", "regex": "(?=a)b"}, "[Ll]ookahead"),
        ({"type": "regex", "regex": "é"}, "cannot go on"),
        ({"type": "grammar", "grammar": "root ::= missing"}, "missing"),
        ({"type": "grammar", "grammar": "root ::= root"}, "cannot go on"),
        ({"type": "choice", "choice": []}, "choice"),
        ({"type": "structural_tag", "format": {"type": "nonsense"}}, "nonsense"),
        ({"type": "json_schem"}, "did you mean 'json_schema'"),
        ({}, "known: choice"),
        ({"type": "regex", "regex": "(" * 100 + ")" * 100}, "deep"),
        ({"type": "regex", "regex": "a" * 70_000}, "limit"),
    ],
)
def test_an_unsound_constraint_is_refused_before_anything_is_scheduled(form: dict[str, Any], words: str) -> None:
    one = driver()
    good = {"type": "regex", "regex": "[ab]{2}"}
    one.submit("before", example(), response_format=good)
    with pytest.raises(RequestError, match=words) as caught:
        one.submit("bad", example(), response_format=form, format_param="guided")
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith("guided")
    assert "/project/" not in caught.value.message
    one.submit("after", example(), response_format=good)
    one.run()
    assert len(said(one, "before")) == len(said(one, "after")) == 2


def test_a_constraint_that_explodes_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstar.processing.constraints.COMPILE_SECONDS", 0.0)
    with pytest.raises(RequestError, match=r"simpler|too many"):
        driver().submit("r", example(), response_format={"type": "regex", "regex": "(a?){400}" * 20})


def test_ignore_eos_and_a_constraint_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="ignore_eos") as caught:
        driver().submit("r", example(ignore_eos=True), response_format={"type": "json_object"})
    assert caught.value.param == "ignore_eos"


def test_a_constraint_that_nobody_checked_fails_its_request_alone() -> None:
    one = driver()
    prepared = one.prepare("bad", example(), response_format={"type": "regex", "regex": "a"})
    sampling = prepared.request.sampling["sampler"]
    broken = '{"type":"regex","regex":"("}'
    sampling = type(sampling)(max_tokens=8, grammar=broken, stop_token_ids=sampling.stop_token_ids)
    prepared.request.sampling["sampler"] = sampling
    one.submit_prepared(prepared, example())
    one.submit("good", Example("abc", {}))
    one.run()
    end = one.ended["bad"]
    assert isinstance(end, Failed)
    assert (end.status, end.param) == (400, "response_format"), end
    assert decode(one.result("good")["text"]) == MINI.expected(Example("abc", {}))["text"]
    one.assert_empty()


def test_a_model_without_a_vocabulary_says_so() -> None:
    one = Driver(miniature("mini_seq2seq"), REGISTRY)
    one.submit("r", miniature("mini_seq2seq").example(random.Random(1)), response_format={"type": "json_object"})
    one.run()
    end = one.ended["r"]
    assert isinstance(end, Failed)
    assert "not known" in end.message


def test_a_constraint_that_takes_too_long_to_follow_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is slow shows behind a prefix only: its first mask, which is tried before it is scheduled, is quick."""
    release, accept = threading.Event(), grammars._accept

    def slow(matcher: Any, token: int) -> None:
        accept(matcher, token)
        if threading.current_thread().name == "bounded-calls":  # else of a constraint that cannot take long
            release.wait(30.0)

    monkeypatch.setattr(grammars, "_AT_MOST_S", 0.1)
    one = driver()
    one.submit("before", example("ab"), response_format=FORMS[1][0])
    one.run()
    assert FORMS[1][1](said(one, "before"))
    monkeypatch.setattr(grammars, "_accept", slow)
    try:
        for name in ("slow", "slow too"):
            one.submit(name, example("abc"), response_format=FORMS[1][0])
        one.submit("plain", example("abc", max_tokens=20))
        one.submit("choice", example("abc"), response_format=FORMS[2][0])
        one.run()
        for name in ("slow", "slow too"):
            end = one.ended[name]
            assert isinstance(end, Failed)
            assert end.code == "constraint_too_slow"
        assert isinstance(one.ended["plain"], Done)
        assert FORMS[2][1](decode([i for i in one.result("choice")["text"] if i != STOP]))
        one.submit("third", example("abc"), response_format=FORMS[1][0])
        one.run()
        refused = one.ended["third"]
        assert isinstance(refused, Failed)
        assert (refused.code, refused.status) == ("overloaded", 503)
    finally:
        release.set()


def test_an_expression_that_is_slow_behind_a_prefix_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself: optional letters, many of them, under tokens that are runs of letters."""
    monkeypatch.setattr(grammars, "_AT_MOST_S", 0.2)
    draw = random.Random(1)
    tokens = [bytes([i]) for i in range(256)]
    tokens += ["".join(draw.choices("abcdefgh", k=draw.randint(2, 8))).encode() for _ in range(20_000)]
    compiler = GrammarCompiler(lambda: [*tokens, b""], len(tokens) + 1)
    form = Regex("x([a-z]?){120}y")
    compiler.check(form, [len(tokens)], "response_format", 60.0)
    matcher = compiler.matcher(encode_constraint(form), [len(tokens)])
    row = np.empty(-(-(len(tokens) + 1) // 32), np.int32)
    matcher.mask(row)
    began = time.monotonic()

    def follow() -> None:
        for token in b"xabcabc":
            matcher.accept(token)
            matcher.mask(row)

    with pytest.raises(RequestError) as caught:
        follow()
    assert caught.value.code == "constraint_too_slow"
    assert time.monotonic() - began < 5.0
    with pytest.raises(RequestError):
        matcher.mask(row)

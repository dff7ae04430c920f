"""Speech that goes on: what is heard, what is kept, and what is told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.cli.graph_facts import graph_facts
from mstar.cli.graph_svg import draw
from mstar.processing.tokenizer import TextTokenizer
from mstar.resources.base import Owner
from mstar.spec.errors import RequestError
from mstar.spec.processor import SegmentDelta, TextDelta
from mstar.spec.request import Done
from mstar.spec.tasks import Audio, TranscriptionTask
from mstar.testing import Example
from mstar.testing.drive import Driver
from mstar_asr.qwen3_asr.live import Rounds
from mstar_asr.qwen3_asr.spec import Qwen3ASRKnobs
from mstar_asr.qwen3_asr.tiny import tones, write
from mstar_asr.qwen3_asr.transcript import TranscriptReader

RATE = 16_000
WINDOW = 104
"""Embeddings of a window."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    write(folder)
    return folder


@pytest.fixture(scope="module", params=["plain", "lookahead"])
def driver(folder: Path, asr: Any, request: pytest.FixtureRequest) -> Iterator[Driver]:
    deployment = {
        "max_concurrent_requests": 8,
        "model_kwargs": {"live_seconds": 40, "live_max_tokens": 12},
        "engine": {"lookahead": request.param == "lookahead"},
    }
    driver = Driver("qwen3_asr_realtime", asr, folder, dtype="float32", **deployment)
    yield driver
    driver.assert_empty()


class Talk:
    """A client of *driver*'s that speaks."""

    def __init__(self, driver: Driver, name: str, rate: int = RATE, **task: Any):
        self.driver, self.name, self.rate = driver, name, rate
        self.task = TranscriptionTask(knobs=Qwen3ASRKnobs(), want=("text",), live=("audio",), audio=None, **task)
        self.prepared = driver.processor.prepare(self.task, name)
        self.renderer = driver.processor.renderer(self.task, self.prepared)
        self.deltas: list[Any] = []
        self._read = 0
        driver.worker.submit(self.prepared.request)

    def say(self, samples: np.ndarray[Any, Any], piece: int = 1 << 30) -> None:
        intake = self.prepared.intake
        assert intake is not None
        for at in range(0, len(samples), piece):
            part = Audio(samples[at : at + piece], self.rate)
            self.driver.worker.push(intake.push("audio", part, self.name))
        self.driver.run()
        self.hear()

    def hear(self) -> None:
        for event in self.driver.emitted.get(self.name, [])[self._read :]:
            self._read += 1
            self.deltas += self.renderer.feed(event)

    def end(self) -> str:
        intake = self.prepared.intake
        assert intake is not None
        self.driver.worker.push(intake.push("audio", None, self.name, end=True))
        self.driver.run()
        self.hear()
        done = self.driver.ended[self.name]
        assert isinstance(done, Done), done
        self.deltas += self.renderer.finish(done)
        return self.text

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas if isinstance(delta, TextDelta))


def record(monkeypatch: pytest.MonkeyPatch, driver: Driver, node: str, entry: str) -> list[tuple[Any, ...]]:
    found, calls = driver.worker.engine.nodes[node], []
    plain = getattr(found, entry)

    def recorded(*arguments: Any, **named: Any) -> Any:
        result = plain(*arguments, **named)
        calls.append((arguments, named, result))
        return result

    monkeypatch.setattr(found, entry, recorded)
    return calls


def media_of(calls: list[tuple[Any, ...]]) -> list[Tensor]:
    return [part for _, _, out in calls for part in torch.split(out["media"].data, list(out["media"].lengths))]


def loud_first(seconds: float) -> np.ndarray[Any, Any]:
    """Its loudest moment comes first: the floor of its spectrogram is the whole clip's from the beginning."""
    samples = tones(random.Random(7), seconds)
    samples[:1600] += 0.6 * np.sin(np.arange(1600) * 0.3).astype(np.float32)
    return samples


@pytest.mark.parametrize("seconds", [0.2, 1.99, 2.0, 2.02, 9.5, 21.37])
def test_the_rounds_are_those_of_the_reference(driver: Driver, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each round says what a request with all sound so far says, whose prompt goes on as the authors' package does."""
    samples, name = loud_first(seconds), f"r{seconds}"
    heard = record(monkeypatch, driver, "encoder", "listen")
    talk = Talk(driver, name, prompt="names")
    talk.say(samples)
    told = talk.end()
    calls, tokens = media_of(heard), [token for e in driver.emitted[name] for token in e.data]
    rounds, read = Rounds(driver.processor.tokenizer), 0
    stops = set(driver.processor.stop_ids)
    whole = record(monkeypatch, driver, "encoder", "forward")
    # a round comes when two seconds, and the 200 samples that its last spectrogram frame needs, are there
    ends = [*range(32_000, len(samples) - 199, 32_000)]
    if not ends or len(samples) > ends[-1] + 200:
        ends.append(len(samples))
    assert len(calls) == len(ends)
    for number, end in enumerate(ends):
        so_far = samples if end == len(samples) else samples[: end + 200]
        expected = answer_after(driver, so_far, end, rounds, f"{name}-{number}")
        got = tokens[read : read + len(expected)]
        assert got == expected
        read += len(expected)
        rounds.heard([token for token in expected if token not in stops])
    assert read == len(tokens)
    reader = TranscriptReader(forced=False)
    assert told == reader.feed(rounds.answer) + reader.finish()
    last, exact = calls[-1], media_of(whole)[-1]  # what the encoder makes of a window is what it makes of a whole clip
    first = (len(calls) - 1) // 4 * WINDOW
    torch.testing.assert_close(last, exact[first : first + len(last)], atol=1e-5, rtol=1e-4)


def answer_after(driver: Driver, samples: np.ndarray[Any, Any], end: int, rounds: Rounds, name: str) -> list[int]:
    """What the model says to *samples* as a whole clip, as far as sample *end*, going on with what *rounds* says."""
    example = Example("names", {"max_tokens": 12}, parts=(Audio(samples, RATE),), live=())
    request = driver.prepare(name, example).request
    sound, prompt = request.inputs["sound"], request.inputs["prompt"]
    if end < len(samples):  # the last row is what lies ahead: its frames do not count yet
        sound = sound[: end // RATE]
        place = driver.processor.sizes.audio_token
        places = int((prompt == place).sum()) - 13 * (end // RATE)
        drop = np.flatnonzero(prompt == place)[:places]
        prompt = np.delete(prompt, drop)
    request.inputs["sound"] = sound
    request.inputs["prompt"] = np.concatenate((prompt, np.array(rounds.begin_ids, np.int64)))
    driver.worker.submit(request)
    driver.run()
    return list(driver.result(name)["text"])


def test_complete_windows_stay_and_are_read_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, joined = record(monkeypatch, driver, "encoder", "encode"), record(monkeypatch, driver, "llm", "join")
    extended, pool = record(monkeypatch, driver, "llm", "extend"), driver.worker.resources["kv"].pool  # type: ignore[attr-defined]
    talk, samples = Talk(driver, "kept"), loud_first(25.0)
    head = len(talk.prepared.request.inputs["prompt"])
    held = []
    for at in range(0, len(samples), 32_000):
        talk.say(samples[at : at + 32_000])
        held.append(pool.held(Owner("kept")) - head)
    talk.end()
    # the spectrogram's last frame of a second needs 200 samples of the next: each round comes with the piece after it
    assert held == [0, 0, 0, 0, *[WINDOW] * 4, *[2 * WINDOW] * 4, 3 * WINDOW]
    assert [sum(arguments[-1]) for arguments, _, _ in heard] == [2, 4, 6, 8] * 3 + [1]  # seconds
    assert [int(named["embeds"].shape[0]) for _, named, _ in extended] == [head, WINDOW, WINDOW, WINDOW]
    assert [named["media"].lengths for _, named, _ in joined] == [[26], [52], [78], [104]] * 3 + [[13]]


@pytest.mark.parametrize(("rate", "piece"), [(16_000, 1), (24_000, 4_801), (8_000, 700)])
def test_how_the_sound_is_cut_does_not_matter(driver: Driver, rate: int, piece: int) -> None:
    samples = tones(random.Random(4), 5.1 * rate / RATE)[: 81 * rate // 16]
    whole = Talk(driver, f"whole{rate}", rate, language="en")
    whole.say(samples)
    expected = whole.end()
    cut = Talk(driver, f"cut{rate}", rate, language="en")
    cut.say(samples[:2000], piece)
    cut.say(samples[2000:], max(piece, 900))
    assert cut.end() == expected != ""


def test_words_are_told_while_the_client_speaks_and_never_taken_back(driver: Driver) -> None:
    talk, samples = Talk(driver, "told", language="English"), loud_first(20.0)
    told = []
    for at in range(0, len(samples), 32_000):
        talk.say(samples[at : at + 32_000])
        told.append(talk.text)
    whole = talk.end()
    assert told[:2] == ["", ""]  # the first two rounds may all be wrong
    assert told[-1]
    assert all(whole.startswith(text) for text in told)
    (segment,) = (delta for delta in talk.deltas if isinstance(delta, SegmentDelta))
    assert (segment.text, segment.language, segment.start, segment.end) == (whole, "en", 0.0, 20.0)
    usage = driver.ended["told"].usage  # type: ignore[union-attr]
    assert usage.output["tokens"] == sum(len(event.data) for event in driver.emitted["told"])


def test_talks_side_by_side_say_what_they_say_alone(driver: Driver) -> None:
    sounds = [tones(random.Random(number), 3.0 + 2.5 * number) for number in range(4)]
    alone = []
    for number, samples in enumerate(sounds):
        talk = Talk(driver, f"alone{number}")
        talk.say(samples)
        alone.append(talk.end())
    talks = [Talk(driver, f"beside{number}") for number in range(4)]
    for at in range(0, 170_000, 17_000):
        for talk, samples in zip(talks, sounds, strict=True):
            talk.say(samples[at : at + 17_000])
    assert [talk.end() for talk in talks] == alone


def test_silence_in_and_nothing_out(driver: Driver) -> None:
    talk = Talk(driver, "nothing")
    assert talk.end() == ""
    assert talk.deltas == []


def test_a_talk_that_is_cancelled_or_too_long_leaves_nothing(driver: Driver) -> None:
    talk = Talk(driver, "cancelled")
    talk.say(loud_first(9.0)[:140_000])
    driver.cancel("cancelled")
    driver.run()
    driver.assert_empty()
    long = Talk(driver, "long")
    long.say(loud_first(39.0))
    with pytest.raises(RequestError, match="at most 40 seconds") as error:
        long.say(loud_first(1.1))
    assert error.value.param == "audio"
    assert "commit the turn" in error.value.message
    assert "live_seconds" in error.value.message
    assert long.end(), "what was heard until then is written down"
    driver.assert_empty()


@pytest.mark.parametrize(
    ("task", "param"),
    [
        ({"live": ("video",)}, "live"),
        ({"logprobs": 0}, "logprobs"),
        ({"audio": Audio(tones(random.Random(0), 1.0), RATE)}, "file"),
        ({"language": "Klingon"}, "language"),
        ({"translate": True}, "task"),
        ({"timestamps": ("word",)}, "timestamp_granularities"),
        ({"knobs": Qwen3ASRKnobs(max_tokens=4096)}, "max_tokens"),
    ],
)
def test_what_a_live_request_cannot_have(driver: Driver, task: dict[str, Any], param: str) -> None:
    given: dict[str, Any] = {"knobs": Qwen3ASRKnobs(), "live": ("audio",), "audio": None, **task}
    with pytest.raises(RequestError) as error:
        driver.processor.prepare(TranscriptionTask(**given), "r")
    assert error.value.param == param


def test_what_an_answer_begins_with(folder: Path) -> None:
    tokenizer = TextTokenizer(folder)
    text = "language English<asr_text>Hello there, how are you"
    rounds = Rounds(tokenizer)
    rounds.heard(tokenizer.encode("something else"))
    assert (rounds.begins, rounds.begin_ids) == ("", [])
    ids = tokenizer.encode(text)
    rounds.heard(ids)
    assert rounds.begins == tokenizer.decode(ids[:-5])
    kept = rounds.begins
    rounds.heard([])  # the model has nothing to add, and what was told is not taken back
    assert (rounds.begins, rounds.answer) == (kept, kept)
    rounds.heard(tokenizer.encode(" 世界世"))  # tokens of a byte each: the last five end in the middle of a character
    assert rounds.begins == kept + " 世"
    rounds.heard(tokenizer.encode("\N{REPLACEMENT CHARACTER}" + "a b c d e f g"))
    assert rounds.begins == kept + " 世"


@pytest.mark.parametrize("every", [1, 4, 8])
def test_other_steps_hear_the_same(folder: Path, asr: Any, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    kwargs = {"live_step_s": every, "live_max_tokens": 8, "live_seconds": 20}
    driver = Driver("qwen3_asr", asr, folder, dtype="float32", max_concurrent_requests=1, model_kwargs=kwargs)
    heard = record(monkeypatch, driver, "encoder", "listen")
    whole, samples = record(monkeypatch, driver, "encoder", "forward"), loud_first(18.2)
    talk = Talk(driver, "r")
    talk.say(samples, 5_000)
    talk.end()
    driver.submit("whole", Example(knobs={"max_tokens": 1}, parts=(Audio(samples, RATE),), live=()))
    driver.run()
    media, exact = media_of(heard), media_of(whole)[-1]
    assert len(media) == -(-18 // every) + (every == 1)
    for number, part in enumerate(media):
        first = number * every // 8 * WINDOW
        # 18.2 s: the last round is the only one whose window is not complete, or goes on with what came before
        if (number + 1) * every % 8 == 0 or number == len(media) - 1:
            torch.testing.assert_close(part, exact[first : first + len(part)], atol=1e-5, rtol=1e-4)
    driver.assert_empty()


def test_the_graph_shows_what_is_a_draft(driver: Driver) -> None:
    plan, deployment = driver.worker.plan, driver.worker.config.deployment
    specs = {name: resource.spec for name, resource in driver.worker.resources.items()}
    facts = graph_facts("qwen3_asr", plan.graph, specs, deployment)
    answer = facts["walks"]["answer"]
    assert (answer["kind"], answer["resources"]) == ("draft", ["kv", "positions"])
    assert answer["body"]["parts"][0]["entry"] == "join"
    assert "draft, taken back from kv, positions" in draw(facts)

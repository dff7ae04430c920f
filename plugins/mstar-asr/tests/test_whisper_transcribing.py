"""From a clip to requests and from answers to a transcript, with a script in the model's place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import RATE, Heard, Says, asked, hear, processor, spoken

from mstar.spec.errors import RequestError
from mstar.spec.knobs import validate_knobs
from mstar.spec.processor import SegmentDelta, TextDelta
from mstar.spec.request import Done
from mstar.spec.tasks import Audio, ChatTask, GenerateTask, Image, Message, Text
from mstar.testing.sounds import babble
from mstar_asr.whisper.longform import temperatures
from mstar_asr.whisper.processor import WhisperProcessor
from mstar_asr.whisper.request import AFTER_SOT, TIMESTAMPS
from mstar_asr.whisper.spec import WhisperKnobs


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> WhisperProcessor:
    return processor(tiny_folder)


def ids(model: WhisperProcessor, *parts: str | float) -> list[int]:
    return [
        token
        for part in parts
        for token in (
            model.tokenizer.encode(part, special=False)
            if isinstance(part, str)
            else [model.tokens.timestamp_begin + round(part / 0.02)]
        )
    ]


def sot(model: WhisperProcessor, language: str = "en") -> list[int]:
    tokens = model.tokens
    assert tokens.transcribe is not None
    return [tokens.sot, tokens.languages[language], tokens.transcribe]


def times(heard: Heard) -> list[tuple[float, float, str]]:
    return [(round(s.said.start, 2), round(s.said.end, 2), s.said.text) for s in heard.transcript.segments]


# --- through a clip


def test_the_next_window_begins_where_the_last_segment_ended(model: WhisperProcessor) -> None:
    """What the window's end cut off is heard whole in the next one, which knows what was said before."""
    heard = hear(
        model,
        asked(70.0),
        [
            Says((0.0, " One.", 11.0, 12.0, " Two.", 26.0, 26.0, " Thr")),
            Says((0.0, " Three.", 4.0, 4.0, " Four.", 29.0)),
            Says((0.0, " Five.", 14.0)),
        ],
    )
    assert heard.transcript.text == "One. Two. Three. Four. Five."
    assert heard.offsets == [0.0, 26.0, 56.0]
    assert times(heard) == [
        (0.0, 11.0, " One."),
        (12.0, 26.0, " Two."),
        (26.0, 30.0, " Three."),
        (30.0, 55.0, " Four."),
        (56.0, 70.0, " Five."),
    ]
    assert [request.inputs["frames"].tolist() for request in heard.requests] == [[3000], [3000], [1400]]
    first = ids(model, 0.0, " One.", 11.0, 12.0, " Two.", 26.0)
    assert heard.prompts[:2] == [sot(model), [model.tokens.sot_prev, *first[-31:], *sot(model)]]
    assert all(request.inputs["rules"][TIMESTAMPS] for request in heard.requests)
    assert [request.inputs["rules"][AFTER_SOT] for request in heard.requests] == [2, 2, 2]


def test_a_segments_facts(model: WhisperProcessor) -> None:
    heard = hear(model, asked(11.0, language=None), [Says((0.0, " Ja.", 9.0), -0.25, 0.1, "de")])
    (segment,) = heard.transcript.segments
    said = segment.said
    assert heard.transcript.language == said.language == "de"
    assert said.tokens == tuple(ids(model, 0.0, " Ja.", 9.0))
    count = len(said.tokens)
    assert said.avg_logprob == pytest.approx(-0.25 * (count + 1) / (count + 1))
    assert said.no_speech_prob == pytest.approx(0.1)
    assert (said.temperature, said.compression_ratio < 1) == (0.0, True)


def test_an_answer_cut_short_counts_no_end_of_text(model: WhisperProcessor) -> None:
    heard = hear(model, asked(11.0), [Says((0.0, " a"), -0.5, reason="length")])
    (segment,) = heard.transcript.segments
    count = len(segment.said.tokens)
    assert segment.said.avg_logprob == pytest.approx(-0.5 * count / (count + 1))


def test_a_language_is_found_once(model: WhisperProcessor) -> None:
    heard = hear(
        model,
        asked(40.0, language=None),
        [Says((0.0, " Ja.", 9.0), -3.0, language="de"), Says((0.0, " Ja.", 9.0)), Says((0.0, " Gut.", 9.0))],
    )
    assert [-1 in prompt for prompt in heard.prompts] == [True, False, False]
    assert heard.prompts[1] == sot(model, "de")
    assert {s.said.language for s in heard.transcript.segments} == {"de"}


# --- judging


def test_a_guess_is_heard_again_at_higher_temperatures(model: WhisperProcessor) -> None:
    """Nothing of a refused answer is told."""
    heard = hear(
        model,
        asked(40.0),
        lambda n: Says((0.0, f" try{n}", 9.0), logprob=-1.5 if n < 2 else -0.4),
    )
    assert heard.temperatures == [0.0, 0.2, 0.4, 0.0]
    assert heard.offsets == [0.0, 0.0, 0.0, 30.0]
    assert heard.transcript.text == "try2 try3"
    assert [s.said.temperature for s in heard.transcript.segments] == [0.4, 0.0]
    assert heard.prompts[3][0] == model.tokens.sot_prev


@pytest.mark.parametrize("step", [1e-12, 0.001, 0.0999])
def test_a_window_is_not_heard_hundreds_of_times(step: float) -> None:
    with pytest.raises(RequestError, match=r"must be 0, or from 0\.1 to 1, got .* is 0\.1") as refused:
        validate_knobs(WhisperKnobs, {"temperature_increment": step})
    assert refused.value.param == "temperature_increment"
    validate_knobs(WhisperKnobs, {"temperature_increment": 0.1})
    assert len(temperatures(0.0, 0.1)) == 11


def test_repetition_is_heard_again(model: WhisperProcessor) -> None:
    heard = hear(model, asked(9.0), [Says((0.0, " la" * 60, 9.0)), Says((0.0, " la.", 9.0))])
    assert heard.transcript.text == "la."


def test_the_last_attempt_is_taken(model: WhisperProcessor) -> None:
    """And what was sampled so wildly is no context for the next window."""
    heard = hear(model, asked(40.0), lambda n: Says((0.0, f" try{n}", 9.0), logprob=-1.5 if n < 6 else -0.1))
    assert heard.temperatures == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.0]
    assert heard.transcript.text == "try5 try6"
    assert heard.prompts[6] == sot(model)


def test_no_increment_no_second_attempt(model: WhisperProcessor) -> None:
    heard = hear(model, asked(9.0, {"temperature_increment": 0.0}), [Says((0.0, " guess", 9.0), logprob=-5.0)])
    assert heard.transcript.text == "guess"


def test_silence_by_the_models_own_word(model: WhisperProcessor) -> None:
    heard = hear(
        model,
        asked(70.0, {"no_speech_threshold": 0.5}),
        [
            Says((0.0, " One.", 29.0)),
            Says((0.0, " Thank you.", 2.0, 2.0), logprob=-1.5, no_speech=0.9),
            Says((0.0, " Two.", 9.0)),
        ],
    )
    assert (heard.transcript.text, heard.offsets) == ("One. Two.", [0.0, 30.0, 60.0])
    assert heard.temperatures == [0.0, 0.0, 0.0]
    assert heard.prompts[2] == heard.prompts[1]


def test_without_context(model: WhisperProcessor) -> None:
    heard = hear(
        model,
        asked(40.0, {"condition_on_previous_text": False}, prompt="Names"),
        [Says((0.0, " One.", 29.0)), Says((0.0, " Two.", 9.0))],
    )
    assert heard.prompts == [[model.tokens.sot_prev, *ids(model, " Names"), *sot(model)], sot(model)]


def test_segments_without_words_or_time_are_dropped(model: WhisperProcessor) -> None:
    heard = hear(model, asked(9.0), [Says((0.0, " ", 1.0, 1.0, " a", 2.0, 2.0, " b", 2.0))])
    assert times(heard) == [(1.0, 2.0, " a")]


# --- where nobody speaks


def test_only_windows_in_which_somebody_speaks_are_heard(model: WhisperProcessor) -> None:
    """Whatever the model would invent about silence."""
    samples = spoken([(70.0, babble(1.0)), (131.0, babble(2.0))], 200.0)
    heard = hear(model, asked(samples), lambda n: Says((0.0, f" ah{n}", 13.0)))
    assert heard.offsets == [60.0, 120.0]
    assert heard.transcript.text == "ah0 ah1"
    assert [len(task.audio.samples) for task in heard.tasks if task.audio] == [30 * RATE, 30 * RATE]


@pytest.mark.parametrize("chunked", [False, True])
def test_nobody_speaks(model: WhisperProcessor, chunked: bool) -> None:
    noise = np.random.default_rng(1).normal(0, 0.1, 45 * RATE).astype(np.float32)
    tone = (0.3 * np.sin(np.arange(45 * RATE) * 0.2)).astype(np.float32)
    for samples in (np.zeros(45 * RATE, np.float32), noise, tone, np.zeros(0, np.float32), np.zeros(100, np.float32)):
        assert model.windows(asked(samples, chunked=chunked)) == []


def test_an_answer_that_ended_before_the_speech_did_is_gone_on_with(model: WhisperProcessor) -> None:
    """A single timestamp at the end says that nobody speaks any more; the voice detector knows better."""
    samples = spoken([(1.0, babble(12.0))], 20.0)
    script = [Says((0.0, " One.", 4.0)), Says((0.0, " Two.", 9.0))]
    heard = hear(model, asked(samples), script)
    assert (heard.offsets, heard.transcript.text) == ([0.0, 4.0], "One. Two.")
    heard = hear(model, asked(samples, {"vad_filter": False}), script[:1])
    assert heard.offsets == [0.0]
    for little in (spoken([(1.0, babble(5.0))], 20.0), spoken([(1.0, babble(7.0))], 8.7)):
        assert hear(model, asked(little), script[:1]).offsets == [0.0]


def test_a_clip_cut_for_hearing_at_once(model: WhisperProcessor) -> None:
    samples = spoken([(1.0, babble(22.0)), (24.0, babble(24.0)), (50.0, babble(22.0))], 75.0)
    windows = model.windows(asked(samples, chunked=True))
    assert len(windows) == 3
    ends = [w.offset + len(w.audio.samples) / RATE for w in windows if w.audio is not None]
    assert ends[:-1] == pytest.approx([w.offset for w in windows[1:]], abs=1e-6)
    assert ends[-1] == 75.0
    for end in ends[:-1]:  # in a pause
        assert min(abs(end - pause) for pause in (23.5, 49.0)) <= 1.0
    heard = hear(model, asked(samples, chunked=True), lambda n: Says((0.0, f" part{n}", 10.0, 10.0, f" b{n}", 24.5)))
    assert heard.transcript.text == "part0 b0 part1 b1 part2 b2"
    assert all(prompt == sot(model) for prompt in heard.prompts)


# --- words


def test_words(model: WhisperProcessor) -> None:
    """The next window begins after the last word, not at the last timestamp."""
    text = ids(model, " ask not", " what")
    begins = [0.3 * number for number in range(len(text) + 1)]
    says = Says((0.0, " ask not", 4.0, 4.0, " what", 8.0, 8.0), words=begins)
    heard = hear(model, asked(40.0, timestamps=("word",)), lambda n: [says, Says((0.0, " end", 9.0)), Says(())][n])
    first, second = heard.transcript.segments[:2]
    assert [word.text for word in first.said.words] == [" ask", " not"]
    assert [word.text for word in second.said.words] == [" what"]
    spans = [(word.start, word.end) for word in (*first.said.words, *second.said.words)]
    assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]]
    assert spans[0][0] == 0.0
    assert spans[-1][1] == pytest.approx(begins[-1], abs=0.03)
    assert heard.offsets[:2] == [0.0, pytest.approx(begins[-1], abs=0.03)]
    assert all(request.params["words"] for request in heard.requests)


# --- what goes out when


def feed(model: WhisperProcessor, task: Any, says: Says) -> tuple[list[Any], list[Any]]:
    """What is told before the end, and at the end."""
    (window,) = model.windows(task)
    renderer = model.renderer(window, model.prepare(window, "r"))
    before = [delta for event in says.events(model) for delta in renderer.feed(event)]
    return before, list(renderer.finish(Done(id="r", reason=says.reason)))


def test_segments_are_told_at_once_where_nothing_can_take_them_back(model: WhisperProcessor) -> None:
    says = Says((0.0, " One.", 1.0, 1.0, " Two.", 4.0, 4.0, " Thr"))
    before, after = feed(model, asked(9.0, {"temperature_increment": 0.0}), says)
    assert [delta.text for delta in before] == [" One.", " Two."]
    assert [type(delta) for delta in after] == [SegmentDelta, SegmentDelta]
    before, after = feed(model, asked(9.0), says)
    assert before == []
    assert [delta.text for delta in after if isinstance(delta, TextDelta)] == [" One.", " Two."]
    says.no_speech = 0.9
    assert feed(model, asked(9.0, {"temperature_increment": 0.0}), says)[0] == []


def test_log_probabilities_are_those_of_the_words(model: WhisperProcessor) -> None:
    before, after = feed(model, asked(9.0, logprobs=0), Says((0.0, " One.", 1.0, 1.0, " Two.", 4.0), logprob=-0.25))
    deltas = [delta for delta in (*before, *after) if isinstance(delta, TextDelta)]
    assert [delta.tokens for delta in deltas] == [tuple(ids(model, " One.")), tuple(ids(model, " Two."))]
    for delta in deltas:
        assert [entry.token for entry in delta.logprobs] == list(delta.tokens)
    assert feed(model, asked(9.0), Says((0.0, " One.", 1.0)))[1][0].logprobs == ()


def test_a_cancelled_window_says_nothing(model: WhisperProcessor) -> None:
    (window,) = model.windows(asked(9.0))
    renderer = model.renderer(window, model.prepare(window, "r"))
    for event in Says((0.0, " One.", 1.0)).events(model):
        renderer.feed(event)
    assert (list(renderer.finish(Done(id="r", reason="cancelled"))), renderer.follow) == ([], None)


# --- what may be asked


@pytest.mark.parametrize(
    ("spelling", "code"), [("de", "de"), ("German", "de"), ("ja-JP", "ja"), ("haw", "haw"), ("deu", "de")]
)
def test_languages_by_code_and_name(model: WhisperProcessor, spelling: str, code: str) -> None:
    for task in (asked(3.0, language=spelling), asked(3.0, {"language": spelling}, language=None)):
        (window,) = model.windows(task)
        assert model.prepare(window, "r").request.inputs["prompt"].tolist() == sot(model, code)


def test_an_unknown_language_is_refused(model: WhisperProcessor, tiny_english_folder: Path) -> None:
    with pytest.raises(RequestError, match="German") as caught:
        model.windows(asked(3.0, language="Germann"))
    assert (caught.value.param, caught.value.status) == ("language", 400)
    with pytest.raises(RequestError, match="language"):
        model.windows(asked(3.0, language="fr"))
    english = processor(tiny_english_folder, english=True)
    with pytest.raises(RequestError, match="'de'; known: en"):
        english.windows(asked(3.0, language="de"))
    (window,) = english.windows(asked(3.0, language=None))
    assert english.prepare(window, "r").request.inputs["prompt"].tolist() == [english.tokens.sot]
    with pytest.raises(RequestError) as caught:
        english.windows(asked(3.0, translate=True))
    silent = replace(asked(3.0, translate=True), audio=Audio(np.zeros(3 * RATE, np.float32), RATE))
    with pytest.raises(RequestError, match="cannot translate"):
        english.windows(silent)
    assert caught.value.param == "task"


def test_translating(model: WhisperProcessor) -> None:
    for task in (asked(3.0, translate=True), asked(3.0, {"task": "translate"})):
        (window,) = model.windows(task)
        assert model.prepare(window, "r").request.inputs["prompt"][-1] == model.tokens.translate


def test_a_prompt(model: WhisperProcessor) -> None:
    for task in (asked(3.0, prompt=" Paris "), asked(3.0, {"initial_prompt": "Paris"})):
        (window,) = model.windows(task)
        prompt = model.prepare(window, "r").request.inputs["prompt"].tolist()
        assert prompt == [model.tokens.sot_prev, *ids(model, " Paris"), *sot(model)]
    (window,) = model.windows(asked(3.0, prompt="Paris " * 99))
    assert len(model.prepare(window, "r").request.inputs["prompt"]) == 1 + 31 + 3


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|de|>", "<|1.00|>"])
def test_special_tokens_in_a_prompt_are_refused(model: WhisperProcessor, name: str) -> None:
    for field, task in (
        ("prompt", asked(3.0, prompt=f"a {name}")),
        ("initial_prompt", asked(3.0, {"initial_prompt": f"a {name}"})),
    ):
        with pytest.raises(RequestError) as caught:
            model.windows(task)
        assert (caught.value.param, name in str(caught.value)) == (field, True)


def native(*parts: Any, text: str = "", **knobs: Any) -> GenerateTask:
    return GenerateTask(knobs=validate_knobs(WhisperKnobs, knobs), text=text, parts=parts)


SECOND = Audio(babble(1.0), RATE)


@pytest.mark.parametrize(
    ("task", "param", "says"),
    [
        (native(Audio(np.zeros(31 * RATE), RATE)), "parts[0]", "at most 30"),
        (native(), "files", "no sound"),
        (native(SECOND, SECOND), "files", "got 2"),
        (native(SECOND, Image(np.zeros((2, 2, 3), np.uint8))), "parts[1]", "no use for Image"),
        (native(SECOND, text="hello"), "text", "initial_prompt"),
        (ChatTask(knobs=None, messages=(Message("user", (Text("hi"),)),)), None, "transcribes"),
    ],
)
def test_native_requests_that_are_refused(model: WhisperProcessor, task: Any, param: str | None, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        model.prepare(task, "r")
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_a_live_stream_is_refused(model: WhisperProcessor) -> None:
    from dataclasses import replace

    with pytest.raises(RequestError, match="whole clips"):
        model.prepare(replace(asked(1.0), audio=None, live=("audio",)), "r")


def told(model: WhisperProcessor, task: GenerateTask, says: Says) -> list[Any]:
    prepared = model.prepare(task, "r")
    renderer = model.renderer(task, prepared)
    deltas = [delta for event in says.events(model) for delta in renderer.feed(event)]
    return [*deltas, *renderer.finish(Done(id="r", reason="stop"))]


def test_a_native_request(model: WhisperProcessor) -> None:
    says = Says((0.0, " One", 0.4, 0.4, " two.", 0.9))
    prepared = model.prepare(native(SECOND, language="de"), "r")
    # it is asked for times, which are not told: models that are not leave out what comes after a long pause
    assert prepared.request.inputs["prompt"].tolist() == sot(model, "de")
    assert "".join(delta.text for delta in told(model, native(SECOND), says)) == "One two."
    # nobody speaks
    assert told(model, native(Audio(np.zeros(RATE, np.float32), RATE)), says) == []
    assert told(model, native(Audio(np.zeros(0, np.float32), RATE)), says) == []


def test_a_native_request_with_times(model: WhisperProcessor) -> None:
    """There is no window after it, so what is unfinished is told too."""
    deltas = told(model, native(SECOND, timestamps="segment"), Says((0.0, " One", 0.4, 0.4, " two")))
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == " One two"
    segments = [delta for delta in deltas if isinstance(delta, SegmentDelta)]
    assert [(s.start, s.end, s.text) for s in segments] == [(0.0, 0.4, " One"), (0.4, 1.0, " two")]

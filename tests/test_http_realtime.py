"""``/v1/realtime`` with real models: OpenAI's client talks to it, live and by turns."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from openai.resources.realtime.realtime import RealtimeConnection
from websockets.sync.client import connect

from mstar.testing.miniatures.catalog import continue_sum, duplex_answer, spoken
from mstar.testing.miniatures.common import decode, encode
from mstar_server.realtime.audio_buffer import AudioFormat

from .serving import Server, serving

# OpenAI's client opens its socket in a way that its library would like to see changed
pytestmark = pytest.mark.filterwarnings("ignore:connect\\(\\) must be used:DeprecationWarning")

PAUSE_S = 0.2
"""Silence after a word: longer than what a resampler holds back, and than what the model takes for a pause."""
TRANSCRIPT = "conversation.item.input_audio_transcription"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys = ("mini_ctc", "mini_duplex", "mini_chat", "mini_scribe")
    with serving(*keys, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def pcm(samples: np.ndarray) -> str:
    return base64.b64encode(np.rint(samples * 32768).astype("<i2").tobytes()).decode()


def idle(server: Server, key: str) -> bool:
    return not any(pool["used"] for pool in server.pools()[key].values())


def test_turns_are_written_down(client: openai.OpenAI, server: Server) -> None:
    with client.realtime.connect(model="mini_ctc") as talk:
        talk.session.update(session={"type": "transcription", "audio": {"input": {"turn_detection": None}}})
        for text in ("hello there", "goodbye"):
            samples = spoken(text, 24_000)
            for start in range(0, len(samples), 1000):
                talk.input_audio_buffer.append(audio=pcm(samples[start : start + 1000]))
            talk.input_audio_buffer.commit()
            for event in talk:
                assert event.type not in ("error", f"{TRANSCRIPT}.failed"), event
                if event.type == f"{TRANSCRIPT}.completed":
                    assert event.transcript == text
                    break
    assert idle(server, "mini_ctc")


def test_a_model_that_hears_live_answers_while_it_hears(client: openai.OpenAI, server: Server) -> None:
    want = duplex_answer(np.full(1600, 2**-10, np.float32))  # it hears 8 kHz
    with client.realtime.connect(model="mini_duplex") as talk:
        talk.session.update(session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
        talk.input_audio_buffer.append(audio=pcm(np.full(4800, 2**-10)))
        heard, said = b"", ""
        for event in talk:
            assert event.type != "error", event
            if event.type == "response.output_audio_transcript.delta":
                if not said:
                    talk.input_audio_buffer.commit()  # it answers already
                said += event.delta
            elif event.type == "response.output_audio.delta":
                heard += base64.b64decode(event.delta)
            elif event.type == "response.done":
                assert event.response.status == "completed", event
                break
    assert (len(said), set(said)) == (len(want["text"]), set(want["text"])) == (400, {"a", "b", "c"})
    assert said.count("b") == pytest.approx(want["text"].count("b"), abs=4)  # resampled
    assert len(heard) == pytest.approx(2 * 4800, abs=8)
    assert idle(server, "mini_duplex")


@pytest.fixture
def scribe(client: openai.OpenAI) -> Iterator[RealtimeConnection]:
    """A transcription session whose model hears while its client speaks."""
    with client.realtime.connect(extra_query={"intent": "transcription", "model": "mini_scribe"}) as talk:
        talk.session.update(session={"type": "transcription", "audio": {"input": {"turn_detection": None}}})
        assert until(talk, "session.updated")[-1].session.type == "transcription"
        yield talk


def until(talk: RealtimeConnection, last: str, **fields: str) -> list[Any]:
    """Events up to the next of type *last*, and with *fields*."""
    events: list[Any] = []
    for event in talk:
        assert event.type not in ("error", f"{TRANSCRIPT}.failed"), event
        events.append(event)
        if event.type == last and all(getattr(event, name) == value for name, value in fields.items()):
            break
    return events


def partial(talk: RealtimeConnection, text: str) -> str:
    """Wait until the deltas add up to *text*; the item that they are of."""
    said = ""
    while said != text:
        delta = until(talk, f"{TRANSCRIPT}.delta")[-1]
        said += delta.delta
        assert text.startswith(said)
    item: str = delta.item_id
    return item


def test_what_is_said_is_told_while_the_client_speaks(scribe: RealtimeConnection, server: Server) -> None:
    """Each word is there before the next one is spoken, and nothing was committed yet."""
    for _ in range(2):
        said, items, seconds = "", set(), 0.0
        for word in ("hello", " there", " you"):
            samples = spoken(f"{word.strip()}\n", 24_000, PAUSE_S)
            for start in range(0, len(samples), 1000):
                scribe.input_audio_buffer.append(audio=pcm(samples[start : start + 1000]))
            items.add(partial(scribe, word))
            said, seconds = said + word, seconds + len(samples) / 24_000
        scribe.input_audio_buffer.commit()
        events = until(scribe, f"{TRANSCRIPT}.completed")
        assert {e.item_id for e in events if e.type == "input_audio_buffer.committed"} == items == {events[-1].item_id}
        assert events[-1].transcript == said == "hello there you"
        assert events[-1].usage.seconds == pytest.approx(seconds, abs=0.001)
    assert idle(server, "mini_scribe")


def test_the_end_of_a_live_turn_is_heard_to_the_last_sample(scribe: RealtimeConnection) -> None:
    """What the resampler and the model's chunk hold back is told when the turn is committed."""
    samples = spoken("abc", 24_000)
    scribe.input_audio_buffer.append(audio=pcm(samples[:-288]))  # of the "c" two fifths: two chunks, one of them short
    scribe.input_audio_buffer.commit()
    assert until(scribe, f"{TRANSCRIPT}.completed")[-1].transcript == "abc"


@pytest.mark.parametrize("kind", ["audio/pcm", "audio/pcmu", "audio/pcma"])
def test_a_live_turn_is_heard_at_the_models_rate_whatever_the_clients(client: openai.OpenAI, kind: str) -> None:
    form = AudioFormat(kind)
    wish = {"turn_detection": None, "format": form.object()}
    with client.realtime.connect(extra_query={"intent": "transcription", "model": "mini_scribe"}) as talk:
        talk.session.update(session={"type": "transcription", "audio": {"input": wish}})
        until(talk, "session.updated")
        sound = form.encode(spoken("hello", form.rate))
        talk.input_audio_buffer.append(audio=base64.b64encode(sound).decode())
        talk.input_audio_buffer.commit()
        assert until(talk, f"{TRANSCRIPT}.completed")[-1].transcript == "hello"


@pytest.mark.parametrize("model", ["mini_scribe", "mini_ctc"])
def test_a_session_whose_model_is_named_after_the_first_sound(server: Server, model: str) -> None:
    """As agents do that begin with the microphone and name the model once the session is there."""
    address = f"{server.url.replace('http', 'ws')}/v1/realtime?intent=transcription"
    with connect(address) as socket:

        def say(kind: str, **fields: Any) -> None:
            socket.send(json.dumps({"type": kind, **fields}))

        def hear(kind: str) -> Any:
            while (event := json.loads(socket.recv(timeout=30)))["type"] not in (kind, "error"):
                pass
            return event

        manual = {"turn_detection": None}
        say("session.update", session={"type": "transcription", "audio": {"input": manual}})
        say("input_audio_buffer.append", audio=pcm(spoken("hel", 24_000)))
        say("input_audio_buffer.commit")
        assert hear("input_audio_buffer.committed")["error"]["param"] == "session.audio.input.transcription.model"
        named = {**manual, "transcription": {"model": model}}
        say("session.update", session={"type": "transcription", "audio": {"input": named}})
        say("input_audio_buffer.append", audio=pcm(spoken("lo\n", 24_000, PAUSE_S)))
        if model == "mini_scribe":
            assert hear(f"{TRANSCRIPT}.delta")["delta"] == "h"
        say("input_audio_buffer.commit")
        assert hear(f"{TRANSCRIPT}.completed")["transcript"] == "hello"
    assert idle(server, model)


def test_a_live_turn_that_is_cleared_ends_and_counts_for_nothing(scribe: RealtimeConnection, server: Server) -> None:
    scribe.input_audio_buffer.append(audio=pcm(spoken("no\n", 24_000, PAUSE_S)))
    dropped = partial(scribe, "no")
    assert server.http.get("/health").json()["models"]["mini_scribe"]["worker"]["running"] == 1
    scribe.input_audio_buffer.clear()
    until(scribe, "input_audio_buffer.cleared")
    assert idle(server, "mini_scribe")
    scribe.input_audio_buffer.append(audio=pcm(spoken("yes", 24_000)))
    scribe.input_audio_buffer.commit()
    events = until(scribe, f"{TRANSCRIPT}.completed", transcript="yes")
    assert events[-1].item_id != dropped


def test_a_client_that_vanishes_in_the_middle_of_a_live_turn_leaves_nothing(server: Server) -> None:
    address = f"{server.url.replace('http', 'ws')}/v1/realtime?intent=transcription&model=mini_scribe"
    sockets = [connect(address) for _ in range(3)]
    for socket in sockets:
        manual = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
        socket.send(json.dumps({"type": "session.update", "session": manual}))
        socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": pcm(spoken("gone", 24_000))}))
        while json.loads(socket.recv(timeout=30))["type"] != f"{TRANSCRIPT}.delta":
            pass
    used = server.http.get("/health").json()["models"]["mini_scribe"]["worker"]
    assert used["running"] == used["resources"]["state"]["used"] == 3
    for socket in sockets:
        socket.socket.close()  # no closing handshake: the machine is gone
    assert idle(server, "mini_scribe")


def test_a_chat_by_text(client: openai.OpenAI) -> None:
    with client.realtime.connect(model="mini_chat") as talk:
        talk.conversation.item.create(
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "abc"}]}
        )
        talk.response.create(response={"max_output_tokens": 5})
        said = ""
        for event in talk:
            assert event.type != "error", event
            said += event.delta if event.type == "response.output_text.delta" else ""
            if event.type == "response.done":
                break
    assert said == decode(continue_sum(encode("abc"), 5))

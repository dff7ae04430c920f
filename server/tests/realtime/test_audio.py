"""Formats, the buffer, and turns found by loudness."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from mstar.spec.errors import RequestError
from mstar_server.realtime.audio_buffer import FORMATS, AudioBuffer, OutgoingAudio, read_format
from mstar_server.realtime.turns import TurnDetector, TurnSettings, read_turns

RATE = 24_000


@pytest.mark.parametrize("kind", ["audio/pcmu", "audio/pcma"])
def test_every_code_of_g711_is_its_own_sample(kind):
    codes = bytes(range(256))
    samples = FORMATS[kind].decode(codes, "audio")
    assert np.abs(samples).max() > 0.98
    again = FORMATS[kind].decode(FORMATS[kind].encode(samples * 32768 / 32767), "audio")
    np.testing.assert_array_equal(again, samples)


@pytest.mark.parametrize(("kind", "error"), [("audio/pcm", 1e-4), ("audio/pcmu", 0.03), ("audio/pcma", 0.03)])
def test_samples_survive_a_format(kind, error):
    samples = np.sin(np.arange(4000) / 9).astype(np.float32) * 0.9
    again = FORMATS[kind].decode(FORMATS[kind].encode(samples), "audio")
    np.testing.assert_allclose(again, samples, atol=error)


def test_known_codes_of_g711():
    assert FORMATS["audio/pcmu"].encode(np.zeros(1)) == b"\xff"
    assert FORMATS["audio/pcma"].encode(np.zeros(1)) == b"\xd5"
    assert FORMATS["audio/pcmu"].encode(np.array([1.0, -1.0])) == b"\x80\x00"
    assert FORMATS["audio/pcma"].encode(np.array([1.0, -1.0])) == b"\xaa\x2a"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("pcm16", "audio/pcm"),
        ("g711_ulaw", "audio/pcmu"),
        ({"type": "audio/pcma"}, "audio/pcma"),
        ({"type": "audio/pcm", "rate": 24000}, "audio/pcm"),
    ],
)
def test_formats_of_both_protocols(value, kind):
    assert read_format(value, "f").type == kind


@pytest.mark.parametrize("value", ["pcm", "wav", {"type": "mp3"}, {}, 7, {"type": "audio/pcm", "rate": 16000}])
def test_other_formats_are_named(value):
    with pytest.raises(RequestError) as caught:
        read_format(value, "f")
    assert caught.value.param.startswith("f")


def test_the_buffer_is_bounded_and_knows_its_place():
    buffer, kind = AudioBuffer(1.0), FORMATS["audio/pcm"]
    text = base64.b64encode(bytes(2 * 20_000)).decode()
    buffer.append(buffer.read(text, kind))
    with pytest.raises(RequestError, match="1 seconds"):
        buffer.read(text, kind)
    with pytest.raises(RequestError, match="16-bit"):
        buffer.read(base64.b64encode(b"abc").decode(), kind)
    with pytest.raises(RequestError, match="base64"):
        buffer.read("!", kind)
    buffer.keep(5000)
    assert (len(buffer), buffer.begins_at) == (5000, 15_000)
    assert (len(buffer.take()), len(buffer), buffer.begins_at) == (5000, 0, 20_000)


def test_outgoing_audio_is_resampled_without_seams():
    samples = np.sin(np.arange(8000) / 8000 * 2 * np.pi * 440).astype(np.float32) * 0.5
    out = OutgoingAudio(FORMATS["audio/pcm"])
    pieces = [out.encode(piece, 8000) for piece in np.split(samples, 10)] + [out.end()]
    heard = np.frombuffer(b"".join(map(base64.b64decode, pieces)), "<i2") / 32767
    assert len(heard) == pytest.approx(24_000, abs=2)
    expected = np.sin(np.arange(24_000) / 24_000 * 2 * np.pi * 440) * 0.5
    np.testing.assert_allclose(heard[500:23_000], expected[500:23_000], atol=0.01)
    assert out.seconds == pytest.approx(1.0)


def noise(seconds: float, level: float) -> np.ndarray:
    return np.random.default_rng(2).normal(0, level, int(seconds * RATE)).astype(np.float32)


def turns(samples: np.ndarray, piece: int = 2400, **settings: object) -> list[tuple[str, float]]:
    detector = TurnDetector(TurnSettings(**settings), RATE)
    pieces = [samples[i : i + piece] for i in range(0, len(samples), piece)]
    return [(what, round(at / RATE, 2)) for part in pieces for what, at in detector.feed(part)]


@pytest.mark.parametrize("piece", [100, 480, 2400, 10**6])
@pytest.mark.parametrize("room", [0.0, 0.001, 0.01], ids=["silence", "room", "street"])
def test_a_turn_begins_with_speech_and_ends_with_silence(room, piece):
    samples = np.concatenate([noise(2, room), noise(1.0, 0.15) + noise(1.0, room), noise(2, room)])
    (started, start), (stopped, stop) = turns(samples, piece)
    assert (started, stopped) == ("started", "stopped")
    assert start == pytest.approx(2.0, abs=0.03)
    assert stop == pytest.approx(3.5, abs=0.05)


def test_pauses_within_a_turn_and_clicks_are_none():
    samples = np.concatenate(
        [noise(0.5, 0.1), noise(0.4, 0), noise(0.5, 0.1), noise(1, 0), noise(0.02, 0.3), noise(1, 0)]
    )
    assert [what for what, _ in turns(samples)] == ["started", "stopped"]
    assert len(turns(samples, silence_duration_ms=200)) == 4


def test_a_steady_noise_is_no_speech_for_long():
    (_, (what, stop)) = turns(noise(10, 0.05))
    assert what == "stopped"
    assert stop < 2.5


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ({"type": "server_vad"}, TurnSettings()),
        ({"type": "server_vad", "threshold": 0.9, "create_response": False}, TurnSettings(0.9, create_response=False)),
        ({"type": "semantic_vad", "eagerness": "high"}, TurnSettings(silence_duration_ms=300)),
    ],
)
def test_turn_detection_as_clients_spell_it(value, expected):
    assert read_turns(value, "t") == expected


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"type": "vad"}, "t.type"),
        ("server_vad", "t.type"),
        ({"type": "server_vad", "treshold": 1}, "t.treshold"),
        ({"type": "server_vad", "threshold": 2}, "t.threshold"),
        ({"type": "server_vad", "silence_duration_ms": 1.5}, "t.silence_duration_ms"),
        ({"type": "server_vad", "create_response": 1}, "t.create_response"),
        ({"type": "server_vad", "idle_timeout_ms": 100}, "t.idle_timeout_ms"),
        ({"type": "semantic_vad", "eagerness": "very"}, "t.eagerness"),
    ],
)
def test_wrong_turn_detection_is_named(value, param):
    with pytest.raises(RequestError) as caught:
        read_turns(value, "t")
    assert caught.value.param == param

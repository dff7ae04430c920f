from __future__ import annotations

import io
import struct
import zlib

import av
import numpy as np
import pytest
import soundfile
from media_files import PIXELS, frames, tone
from PIL import Image as Pillow

from mstar.spec.tasks import Audio
from mstar_server.media.encode.audio import AUDIO_TYPES, audio_encoder, content_type, encode_audio, pcm16, wav
from mstar_server.media.encode.images import IMAGE_TYPES, encode_image, png
from mstar_server.media.encode.parallel import Helpers
from mstar_server.media.encode.video import Mp4Encoder, mp4

MAGIC = {"wav": b"RIFF", "mp3": b"ID3", "opus": b"OggS", "aac": b"\xff\xf1", "flac": b"fLaC"}
COMPRESSED = ("mp3", "opus", "aac", "flac")


def streamed(samples, rate, name, step=1777, channels=1):
    encoder = audio_encoder(name, rate, channels)
    pieces = [encoder.feed(samples[start : start + step]) for start in range(0, len(samples), step)]
    return pieces, encoder.finish()


def decoded(data):
    with av.open(io.BytesIO(data)) as media:
        parts = list(media.decode(audio=0))
        return np.concatenate([f.to_ndarray().astype(np.float64).mean(axis=0) for f in parts]), parts[0].sample_rate


def test_a_whole_wav_has_exact_sizes_and_samples():
    samples = np.asarray([[0.0, 1.0], [-1.0, 2.0]], np.float32)
    data = wav(samples, 16_000)
    back, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert (rate, len(data)) == (16_000, 44 + 8)
    np.testing.assert_array_equal(back, [[0, 32767], [-32767, 32767]])
    assert pcm16(samples) == back.astype("<i2").tobytes()
    assert pcm16(np.asarray([np.nan, -np.inf], np.float32)) == b"\0\0\x01\x80"


def test_a_streamed_wav_has_one_header_with_open_sizes():
    samples = tone(0.5, 16_000)
    pieces, rest = streamed(samples, 16_000, "wav")
    whole = b"".join(pieces) + rest
    assert whole[:4] + whole[4:8] + whole[40:44] == b"RIFF" + b"\xff" * 8
    assert whole.count(b"RIFF") == 1
    assert whole[44:] == pcm16(samples)
    assert len(pieces[1]) == 2 * 1777  # no header any more
    empty = audio_encoder("wav", 8000)
    assert len(empty.finish()) == 44


def test_pcm_says_its_rate_in_the_content_type():
    pieces, rest = streamed(tone(0.1, 24_000), 24_000, "pcm")
    assert b"".join(pieces) + rest == pcm16(tone(0.1, 24_000))
    assert content_type("pcm", 24_000) == "audio/pcm;rate=24000;channels=1"
    assert content_type("mp3", 24_000) == "audio/mpeg"


@pytest.mark.parametrize("rate", [16_000, 17_000, 22_050, 48_000])
@pytest.mark.parametrize("name", COMPRESSED)
def test_streams_and_files_decode_to_the_whole_sound(name, rate):
    samples = tone(1.3, rate)
    pieces, rest = streamed(samples, rate, name)
    assert sum(map(len, pieces)) > len(rest)  # it streams
    for data, whole in ((b"".join(pieces) + rest, False), (encode_audio(samples, rate, name), True)):
        assert data.startswith((MAGIC[name], b"\xff"))
        got, got_rate = decoded(data)
        exact = name in ("opus", "flac") or (name == "mp3" and whole)
        late = len(got) / got_rate - len(samples) / rate
        assert abs(late) < 1e-3 if exact else 0 <= late < 0.12
        middle = got[got_rate // 4 : got_rate // 4 + got_rate // 2]
        spectrum = np.abs(np.fft.rfft(middle / np.abs(middle).max()))
        assert np.argmax(spectrum) * 2 == pytest.approx(440, abs=4)
        spectrum[np.argmax(spectrum) - 6 : np.argmax(spectrum) + 7] = 0
        assert spectrum.max() < 0.02 * len(middle)  # no clicks where the pieces met


def test_flac_loses_nothing_and_two_channels_stay_two():
    samples = np.stack([tone(0.5, 44_100), -0.5 * tone(0.5, 44_100)], axis=1)
    back, rate = soundfile.read(io.BytesIO(encode_audio(samples, 44_100, "flac")))
    assert (rate, back.shape) == (44_100, samples.shape)
    np.testing.assert_allclose(back, samples, atol=1e-4)
    pieces, rest = streamed(samples, 44_100, "opus", channels=2)
    assert soundfile.read(io.BytesIO(b"".join(pieces) + rest))[0].shape[1] == 2


@pytest.mark.parametrize("name", [*COMPRESSED, "wav", "pcm"])
def test_a_stream_that_says_nothing_ends(name):
    assert isinstance(audio_encoder(name, 17_000).finish(), bytes)
    assert set(AUDIO_TYPES) >= {name}


def test_a_bit_rate_makes_files_larger():
    low, high = (len(encode_audio(tone(2, 48_000), 48_000, "mp3", rate)) for rate in (32_000, 192_000))
    assert high > 4 * low


@pytest.mark.parametrize(("name", "magic"), [("png", b"\x89PNG"), ("webp", b"RIFF"), ("jpeg", b"\xff\xd8\xff")])
def test_images_are_what_they_are_called(name, magic):
    pixels = np.random.default_rng(0).integers(0, 255, (33, 31, 3), dtype=np.uint8)
    data = encode_image(pixels, name)
    assert data.startswith(magic)
    assert Pillow.open(io.BytesIO(data)).size == (31, 33)
    assert Pillow.open(io.BytesIO(data)).get_format_mimetype() == IMAGE_TYPES[name]
    if name != "png":
        assert len(encode_image(pixels, name, 10)) < len(data)
    with pytest.raises(ValueError, match="known: png, webp, jpeg"):
        encode_image(pixels, "bmp")


def test_transparency_survives_where_it_can():
    clear = np.zeros((2, 2, 4), np.uint8)
    assert np.asarray(Pillow.open(io.BytesIO(encode_image(clear, "webp", 100)))).shape == (2, 2, 4)
    assert np.asarray(Pillow.open(io.BytesIO(encode_image(clear, "jpeg")))).min() > 250


@pytest.mark.parametrize(
    "shape",
    [
        (16, 16, 3),
        (1, 1, 3),
        (3, 1, 4),
        (1, 300, 3),
        (7, 5),
        (700, 301, 3),
        (1500, 1000, 3),
        (1, 1),
        (5, 1, 4),
        (2, 200_000, 3),
        (333, 512, 4),
    ],
)
@pytest.mark.parametrize("kind", ["noise", "smooth", "flat"])
@pytest.mark.parametrize("cores", [1, 2, 7])
def test_png_is_exact(shape, kind, cores, monkeypatch):
    """Of any size and channels, on any number of cores, to the last sum of the stream."""
    monkeypatch.setattr("mstar_server.media.encode.png.HELPERS", Helpers(cores - 1))
    if kind == "noise":
        pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    else:
        number = np.arange(np.prod(shape)).reshape(shape)
        pixels = (number // 7 % 256 if kind == "smooth" else np.full(shape, 200)).astype(np.uint8)
    data = png(pixels)
    np.testing.assert_array_equal(np.asarray(Pillow.open(io.BytesIO(data))), pixels)
    stream, at = b"", 8
    while at < len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        stream += data[at + 8 : at + 8 + length] if name == b"IDAT" else b""
        at += 12 + length
    assert len(zlib.decompress(stream)) == shape[0] * (pixels[0].size + 1)
    assert data == png(pixels), "the same bytes each time"


def test_png_of_a_picture_with_grain_is_small():
    level = np.add.outer(np.arange(512), np.arange(512)) / 4 % 256
    grain = np.random.default_rng(1).normal(0, 4, (512, 512, 3))
    pixels = np.clip(level[..., None] + grain, 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Pillow.fromarray(pixels).save(out, "PNG", compress_level=1)
    assert len(png(pixels)) < out.tell()


@pytest.mark.parametrize("pixels", [np.zeros((4, 4, 2), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)])
def test_png_of_what_is_no_picture_is_refused(pixels):
    with pytest.raises(ValueError, match=r"not (uint8|float64) \["):
        png(pixels)


def test_a_video_has_its_frames_colours_sound_and_index_in_front():
    made = np.empty((12, 17, 31, 3), np.uint8)
    made[:] = (200, 30, 60)
    data = mp4(made, 8, Audio(tone(1.5, 17_000), 17_000))
    assert data.index(b"moov") < data.index(b"mdat")
    with av.open(io.BytesIO(data)) as media:
        assert [stream.codec.name for stream in media.streams] == ["h264", "aac"]
        got = [f.to_ndarray(format="rgb24") for f in media.decode(video=0)]
    assert (len(got), got[0].shape) == (12, (18, 32, 3))  # odd sizes get one more row and column
    assert np.abs(got[5].astype(int) - (200, 30, 60)).max() < 8
    sound, rate = decoded(data)
    assert len(sound) / rate == pytest.approx(1.5, abs=0.1)


def test_a_video_is_streamed_in_fragments():
    encoder = Mp4Encoder(32, 16, 10, audio_rate=16_000)
    pieces = []
    for number, frame in enumerate(frames(60)):
        pieces += [encoder.frame(frame), encoder.sound(tone(6, 16_000)[number * 1600 : number * 1600 + 1600])]
    rest = encoder.finish()
    assert sum(map(len, pieces)) > len(rest)
    with av.open(io.BytesIO(b"".join(pieces) + rest)) as media:
        assert sum(1 for _ in media.decode(video=0)) == 60
    with pytest.raises(ValueError, match="shape"):
        encoder.frame(PIXELS)
    with pytest.raises(ValueError, match="needs a frame"):
        mp4([], 10)

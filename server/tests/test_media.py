from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
import soundfile
from PIL import Image as Pillow

from mstar.spec.errors import RequestError
from mstar.spec.tasks import Audio, File, Image
from mstar_server.encode import pcm16, png, wav
from mstar_server.media import array_from, decode_audio, decode_file, decode_image, split_data_url
from mstar_server.options import ServerOptions

OPTIONS = ServerOptions(max_pixels=10_000, max_audio_s=2.0)
PIXELS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


def image_file(kind: str, **options) -> bytes:
    out = io.BytesIO()
    Pillow.fromarray(PIXELS).save(out, kind, **options)
    return out.getvalue()


def sound_file(samples, rate: int, kind: str = "WAV") -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=kind)
    return out.getvalue()


def png_that_claims(width: int, height: int) -> bytes:
    """A small, valid PNG header of a huge image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_lossless_images_keep_their_pixels(kind):
    part = decode_file(image_file(kind), "a", "application/octet-stream", "f", OPTIONS)
    assert isinstance(part, Image)
    assert part.pixels.dtype == np.uint8
    np.testing.assert_array_equal(part.pixels, PIXELS)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_lossy_images_are_recognised_by_their_bytes(kind):
    part = decode_file(image_file(kind), "", "text/plain", "f", OPTIONS)
    assert part.pixels.shape == PIXELS.shape


def test_a_rotated_photo_is_put_upright():
    exif = Pillow.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees to view"
    assert decode_image(image_file("JPEG", exif=exif), "f", OPTIONS).pixels.shape == (7, 5, 3)


@pytest.mark.parametrize("size", [(20_000, 20_000), (101, 100)])
def test_a_huge_image_is_refused_from_its_header(size):
    with pytest.raises(RequestError) as caught:
        decode_image(png_that_claims(*size), "f", OPTIONS)
    assert caught.value.code == "image_too_large"
    assert caught.value.param == "f"


@pytest.mark.parametrize("data", [image_file("JPEG")[:-40], image_file("PNG")[:50], b"GIF8", b"not an image"])
def test_a_damaged_image_is_a_400(data):
    with pytest.raises(RequestError) as caught:
        decode_image(data, "f", OPTIONS)
    assert (caught.value.status, caught.value.code) == (400, "invalid_image")


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_audio_becomes_mono_at_its_own_rate(kind):
    stereo = np.stack([np.linspace(-0.5, 0.5, 100), np.zeros(100)], axis=1)
    part = decode_file(sound_file(stereo, 8000, kind), "", "", "f", OPTIONS)
    assert isinstance(part, Audio)
    assert (part.rate, part.samples.dtype, part.samples.shape) == (8000, np.float32, (100,))
    np.testing.assert_allclose(part.samples, stereo.mean(axis=1), atol=1e-4)


def test_long_and_damaged_audio_is_refused():
    with pytest.raises(RequestError, match="longer than the limit of 2 s"):
        decode_audio(sound_file(np.zeros(24_001), 8000), "f", OPTIONS)
    with pytest.raises(RequestError) as caught:
        decode_audio(b"RIFF1234WAVEjunk", "f", OPTIONS)
    assert caught.value.code == "invalid_audio"


def test_anything_else_stays_a_file():
    assert decode_file(b"x,y\n", "t.csv", "text/csv", "f", OPTIONS) == File(b"x,y\n", "t.csv", "text/csv")


def test_only_data_urls_are_read():
    assert split_data_url("data:image/png;base64,AAEC", "p") == ("image/png", b"\0\1\2")
    for url, code in (("http://127.0.0.1/x.png", "url_not_allowed"), ("file:///etc/passwd", "url_not_allowed")):
        with pytest.raises(RequestError) as caught:
            split_data_url(url, "p")
        assert caught.value.code == code
    for url in ("data:image/png,raw", "data:image/png;base64,@@"):
        with pytest.raises(RequestError):
            split_data_url(url, "p")


def test_arrays_from_base64_and_lists():
    want = np.arange(6, dtype=np.int16)
    text = base64.b64encode(want.astype("<i2").tobytes()).decode()
    got = array_from(text, np.dtype("int16"), (2, 3), "p")
    np.testing.assert_array_equal(got, want.reshape(2, 3))
    np.testing.assert_array_equal(array_from([[1, 2]], np.dtype("float32"), None, "p"), [[1.0, 2.0]])
    for value, dtype, shape in ((text, "int16", (4,)), ("AAAA", "int16", None), ([1, "x"], "float32", None)):
        with pytest.raises(RequestError):
            array_from(value, np.dtype(dtype), shape, "p")


def test_encoded_audio_and_images_read_back():
    samples = np.asarray([[0.0, 1.0], [-1.0, 2.0]], np.float32)
    back, rate = soundfile.read(io.BytesIO(wav(samples, 16_000)), dtype="int16")
    assert rate == 16_000
    np.testing.assert_array_equal(back, [[0, 32767], [-32767, 32767]])
    assert pcm16(samples) == back.astype("<i2").tobytes()
    np.testing.assert_array_equal(np.asarray(Pillow.open(io.BytesIO(png(PIXELS)))), PIXELS)

from __future__ import annotations

import base64
import io
import struct

import msgspec
import numpy as np
import pytest
from media_files import (
    PIXELS,
    av_file,
    frames,
    here,
    image_file,
    png_that_claims,
    samples,
    sound_file,
    tone,
    video_file,
)
from PIL import Image as Pillow

from mstar.processing.pictures import Patcher
from mstar.spec.errors import RequestError
from mstar.spec.tasks import Audio, File, Image, Video
from mstar_server.media.decoder import decode_file
from mstar_server.media.encode.audio import Sink, wav_header
from mstar_server.media.encode.video import mp4
from mstar_server.media.limits import DEFAULT_SAMPLING, MediaFault, Sampling
from mstar_server.media.output import map_array
from mstar_server.media.values import array_from, split_data_url, split_frames_url
from mstar_server.options import ServerOptions

OPTIONS = ServerOptions(max_pixels=10_000, max_audio_s=2.0)


def pixels_of(data, **options):
    decoded, output = here("image", data, **options)
    return map_array(output, decoded.frames)


def video_of(data, sampling=DEFAULT_SAMPLING, **options):
    decoded, output = here("video", data, sampling, **options)
    return map_array(output, decoded.frames), decoded


# --- images


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_lossless_images_keep_their_pixels(kind):
    part = decode_file(image_file(kind), "a", "application/octet-stream", "f", OPTIONS)
    assert isinstance(part, Image)
    assert part.pixels.dtype == np.uint8
    np.testing.assert_array_equal(part.pixels, PIXELS)
    part.pixels[0, 0] = 1  # what a processor does in place must not fail


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_lossy_images_are_recognised_by_their_bytes(kind):
    assert decode_file(image_file(kind), "", "text/plain", "f", OPTIONS).pixels.shape == PIXELS.shape


def test_a_rotated_photo_is_put_upright():
    exif = Pillow.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees to view"
    assert pixels_of(image_file("JPEG", exif=exif)).shape == (7, 5, 3)


@pytest.mark.parametrize("size", [(20_000, 20_000), (101, 100)])
def test_a_huge_image_is_refused_from_its_header(size):
    with pytest.raises(RequestError) as caught:
        decode_file(png_that_claims(*size), "", "", "f", OPTIONS)
    assert (caught.value.code, caught.value.param, caught.value.status) == ("image_too_large", "f", 400)


@pytest.mark.parametrize("data", [image_file("JPEG")[:-40], image_file("PNG")[:50], b"GIF8", b"not an image", b""])
def test_a_damaged_image_is_a_400(data):
    with pytest.raises(MediaFault) as caught:
        here("image", data)
    assert (caught.value.status, caught.value.code) == (400, "invalid_image")


def saved(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_every_mode_becomes_rgb():
    clear = Pillow.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (255, 0, 0, 255))
    np.testing.assert_array_equal(pixels_of(saved(clear)), [[[255, 255, 255], [255, 0, 0]]])
    palette = Pillow.new("P", (1, 1), 3)
    palette.putpalette([0, 0, 0] * 3 + [10, 20, 30])
    assert pixels_of(saved(palette)).tolist() == [[[10, 20, 30]]]
    assert pixels_of(saved(palette, transparency=3)).tolist() == [[[255, 255, 255]]]
    assert pixels_of(saved(Pillow.new("LA", (1, 1), (9, 255)))).tolist() == [[[9, 9, 9]]]
    assert pixels_of(saved(Pillow.new("1", (1, 1), 1))).tolist() == [[[255, 255, 255]]]
    deep = Pillow.fromarray(np.asarray([[0, 0x8000, 0xFFFF]], np.uint16))
    assert pixels_of(saved(deep))[0, :, 0].tolist() == [0, 0x80, 0xFF]
    cmyk = pixels_of(saved(Pillow.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100))
    assert cmyk[4, 4, 0] > 240
    assert cmyk[4, 4, 1:].max() < 15


def test_an_animation_is_its_first_frame():
    first, second = (Pillow.new("RGB", (3, 2), color) for color in ("red", "blue"))
    for kind in ("GIF", "WEBP", "PNG"):
        data = saved(first, kind, save_all=True, append_images=[second], lossless=True)
        assert pixels_of(data)[0, 0].tolist() == [255, 0, 0], kind


@pytest.mark.parametrize("size", [(500, 19), (1, 3000), (3, 7)])
def test_odd_shapes_are_kept(size):
    assert pixels_of(saved(Pillow.new("RGB", size))).shape == (size[1], size[0], 3)


# --- sound


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "AIFF"])
def test_audio_becomes_mono_at_its_own_rate(kind):
    stereo = np.stack([np.linspace(-0.5, 0.5, 100), np.zeros(100)], axis=1)
    part = decode_file(sound_file(stereo, 8000, kind), "", "", "f", OPTIONS)
    assert isinstance(part, Audio)
    assert (part.rate, part.samples.dtype, part.samples.shape) == (8000, np.float32, (100,))
    np.testing.assert_allclose(part.samples, stereo.mean(axis=1), atol=1e-4)


@pytest.mark.parametrize("container", ["mp3", "opus", "aac", "m4a", "webm", "mov", "mka", "flac"])
def test_every_container_is_decoded(container):
    got, rate = samples(av_file(container))
    assert rate == (48_000 if container == "webm" else 16_000)
    assert len(got) / rate == pytest.approx(1.0, abs=0.11)  # AAC has a delay and a last frame that is filled up
    spectrum = np.abs(np.fft.rfft(got[rate // 4 : rate // 4 * 3]))
    assert np.argmax(spectrum) / (rate // 2) * rate == pytest.approx(440, abs=4)


def test_the_sound_of_a_video_is_audio_when_audio_is_wanted():
    got, rate = samples(video_file())
    assert len(got) / rate == pytest.approx(2.0, abs=0.15)
    with pytest.raises(MediaFault, match="holds no sound"):
        samples(video_file(sound=False))


def test_the_loudest_and_the_quietest_samples_are_kept():
    got, _ = samples(sound_file(np.asarray([-32768, 32767, 1, 0], np.int16), 16_000))
    assert got.tolist() == pytest.approx([-1.0, 32767 / 32768, 1 / 32768, 0.0])


def test_a_streamed_wav_with_open_sizes_is_read_to_its_end():
    data = wav_header(16_000, 1, None) + (tone(1, 16_000) * 32767).astype("<i2").tobytes()
    got, rate = samples(data, max_audio_s=10)
    assert (len(got), rate) == (16_000, 16_000)


def test_long_and_damaged_audio_is_refused():
    with pytest.raises(RequestError, match="longer than the limit of 2 s"):
        decode_file(sound_file(np.zeros(24_001), 8000), "", "", "f", OPTIONS)
    for data in (b"RIFF\x26\0\0\0WAVEjunk", sound_file(np.zeros(0), 8000), av_file("m4a")[:700]):
        with pytest.raises(MediaFault) as caught:
            samples(data)
        assert caught.value.code == "invalid_audio"


def test_an_unknown_container_is_a_415_that_lists_the_known_ones():
    for data in (b"#!AMR\n1234", b"<html>", b"\0" * 100):
        with pytest.raises(MediaFault, match="WAV, FLAC, Ogg, MP3, M4A, MP4, WebM, AAC") as caught:
            samples(data)
        assert (caught.value.status, caught.value.code) == (415, "unsupported_media_type")
    with pytest.raises(MediaFault, match="is a PNG file, not an audio"):
        samples(image_file("PNG"))


@pytest.mark.parametrize("container", ["opus", "mp3", "m4a", "webm"])
def test_a_long_file_is_stopped_while_it_decodes(container):
    with pytest.raises(MediaFault, match="limit of 1 s") as caught:
        samples(av_file(container, 3.0), max_audio_s=1.0)
    assert caught.value.code == "audio_too_long"
    with pytest.raises(MediaFault) as caught:
        samples(av_file(container, 3.0), max_decoded_bytes=10_000)
    assert (caught.value.code, caught.value.status) == ("decoded_too_large", 413)


def test_a_header_that_lies_about_its_length_does_not_help():
    data = bytearray(av_file("flac", 3.0))
    assert data[:4] == b"fLaC"
    packed = struct.unpack(">Q", data[18:26])[0]
    data[18:26] = struct.pack(">Q", packed >> 36 << 36 | 100)  # 100 samples in all, it says
    assert len(samples(bytes(data), max_audio_s=1.0)[0]) <= 100
    data[18:26] = struct.pack(">Q", packed >> 36 << 36)  # 0: not known
    with pytest.raises(MediaFault) as caught:
        samples(bytes(data), max_audio_s=1.0)
    assert caught.value.code == "audio_too_long"


def test_samples_that_are_no_numbers_are_refused():
    with pytest.raises(MediaFault, match="no numbers"):
        samples(sound_file(np.asarray([0.0, np.nan, 1.0]), 8000, subtype="FLOAT"))


def test_samples_far_beyond_full_scale_are_refused():
    """A model's arithmetic would overflow. Floats that count as integers of 16 bits do are still taken."""
    with pytest.raises(MediaFault, match=r"a sample of 3e\+38; full scale is 1"):
        samples(sound_file(np.asarray([0.0, -3e38, 1.0]), 8000, subtype="FLOAT"))
    assert samples(sound_file(np.asarray([0.0, -32768.0]), 8000, subtype="FLOAT"))[0].tolist() == [0.0, -32768.0]


@pytest.mark.parametrize(("brand", "name"), [(b"heic", "a HEIF"), (b"mif1", "a HEIF"), (b"avif", "an AVIF")])
def test_pictures_of_phones_are_called_what_they_are(brand, name):
    data = b"\0\0\0\x18ftyp" + brand + b"\0\0\0\0mif1heic" + b"\0" * 100
    with pytest.raises(MediaFault, match=f"is {name} file, not an image; image formats: PNG") as caught:
        pixels_of(data)
    assert (caught.value.status, caught.value.code) == (400, "invalid_image")
    with pytest.raises(MediaFault, match=f"is {name} file, not a video"):
        video_of(data)


# --- video


def test_a_video_is_sampled_at_the_wanted_times():
    got, decoded = video_of(video_file(), Sampling(fps=2, audio=True))
    assert decoded.fps == 2
    assert got.shape == (4, 16, 32, 3)
    np.testing.assert_allclose(got[:, 12, 24, 0], frames(20)[[0, 5, 10, 15], 12, 24, 0], atol=4)
    assert decoded.rate == 16_000
    assert decoded.samples.shape[0] / 16_000 == pytest.approx(2.0, abs=0.15)


def test_a_video_keeps_its_own_rate_and_all_its_frames_if_more_are_asked_for():
    got, decoded = video_of(video_file(), Sampling(fps=60))
    assert (len(got), decoded.fps, decoded.samples) == (20, pytest.approx(10), None)


def test_at_most_the_wanted_frames_evenly():
    got, decoded = video_of(video_file(), Sampling(fps=10, max_frames=5))
    assert (len(got), decoded.fps) == (5, pytest.approx(2.5))
    np.testing.assert_allclose(got[:, 12, 24, 0], frames(20)[::4, 12, 24, 0], atol=4)
    assert len(video_of(video_file(), Sampling(fps=10, max_frames=1))[0]) == 1


def fragmented(count=20, fps=10.0):
    from mstar_server.media.encode.video import Mp4Encoder

    encoder = Mp4Encoder(32, 16, fps)
    return b"".join(encoder.frame(frame) for frame in frames(count)) + encoder.finish()


def live(count=20, fps=10):
    """A stream as a recorder sends it: nothing in it says how long it is."""
    import av

    sink = Sink()
    with av.open(sink, "w", format="matroska", options={"live": "1"}) as media:
        stream = media.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.options = 32, 16, "yuv420p", {"qp": "4"}
        for pixels in frames(count):
            media.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        media.mux(stream.encode(None))
    return sink.take()


def test_a_video_of_unknown_length_is_thinned_while_it_decodes():
    got, decoded = video_of(live(), Sampling(fps=10, max_frames=6))
    assert (len(got), decoded.fps) == (5, pytest.approx(2.5))
    np.testing.assert_allclose(got[:, 12, 24, 0], frames(20)[::4, 12, 24, 0], atol=4)


def test_a_video_that_ends_early_is_what_there_is():
    data = fragmented()
    assert 1 <= len(video_of(data[: int(len(data) * 0.9)], Sampling(fps=10))[0]) <= 20
    container = bytearray(video_file(sound=False))
    last = len(container) - (len(container) - container.index(b"mdat")) // 8
    container[last:] = bytes(len(container) - last)
    assert 1 <= len(video_of(bytes(container), Sampling(fps=10))[0]) < 20


def test_a_video_is_turned_upright():
    data = bytearray(video_file(sound=False))
    at = data.index(b"tkhd") + 4 + 40  # version 0: the matrix stands 40 bytes behind the type
    turn = (0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000)  # a quarter clockwise
    data[at : at + 36] = struct.pack(">9i", *turn)
    got, _ = video_of(bytes(data), Sampling(fps=1))
    assert got.shape[1:3] == (32, 16)
    assert got[0, 2, 13].min() > 200  # what was top left is top right
    assert got[0, 2, 2].max() < 100


def test_videos_over_the_limits_are_refused():
    for limits, code in (
        ({"max_pixels": 511}, "video_too_large"),
        ({"max_video_pixels": 3 * 512}, "video_too_large"),
        ({"max_video_s": 1.5}, "video_too_long"),
        ({"max_decoded_bytes": 2000}, "decoded_too_large"),
    ):
        for data in (video_file(), fragmented()):
            with pytest.raises(MediaFault) as caught:
                video_of(data, **limits)
            assert caught.value.code == code
    with pytest.raises(MediaFault, match="only sound"):
        video_of(av_file("m4a"))
    with pytest.raises(MediaFault, match="MP4, MOV, WebM") as caught:
        video_of(b"junk")
    assert caught.value.status == 415


def test_frames_sent_as_images_are_a_video():
    files = [saved(Pillow.new("RGB", (4, 3), (shade, 0, 0)), "JPEG") for shade in (10, 200)]
    decoded, output = here("frames", b"".join(files), Sampling(fps=1), tuple(map(len, files)))
    assert decoded.fps == 1
    assert map_array(output, decoded.frames)[:, 1, 1, 0].tolist() == pytest.approx([10, 200], abs=6)
    files[1] = saved(Pillow.new("RGB", (4, 4)), "JPEG")
    with pytest.raises(MediaFault, match="frame 1 has 4x4 pixels, frame 0 has 4x3"):
        here("frames", b"".join(files), parts=tuple(map(len, files)))


# --- anything


def test_what_may_be_either_is_what_it_holds():
    assert isinstance(decode_file(video_file(), "", "", "f", ServerOptions()), Video)
    assert isinstance(decode_file(av_file("m4a"), "", "", "f", ServerOptions()), Audio)
    assert isinstance(decode_file(av_file("opus"), "", "", "f", ServerOptions()), Audio)


def test_anything_else_stays_a_file():
    assert decode_file(b"x,y\n", "t.csv", "text/csv", "f", OPTIONS) == File(b"x,y\n", "t.csv", "text/csv")
    assert isinstance(decode_file(b"\xff\xfbjunk", "t", "application/x-thing", "f", OPTIONS), File)


def test_data_urls():
    assert split_data_url("data:image/png;base64,AAEC", "p") == ("image/png", b"\0\1\2")
    assert split_data_url("data:audio/ogg;codecs=opus;base64,AAEC", "p") == ("audio/ogg", b"\0\1\2")
    assert split_frames_url("data:video/jpeg;base64,AAEC,AA==", "p") == [b"\0\1\2", b"\0"]
    assert split_frames_url("data:video/mp4;base64,AAEC", "p") is None
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


# --- frames that lie evenly from the first to the last

SPREAD = Sampling(fps=2, max_frames=768, spread=True, min_frames=4)


@pytest.mark.parametrize(
    "sampling", [SPREAD, Sampling(fps=2, spread=True), Sampling(fps=0.5, spread=True, min_frames=3)]
)
@pytest.mark.parametrize("file", [video_file, fragmented, live])
def test_spread_frames_are_those_that_transformers_takes(file, sampling):
    got, decoded = video_of(file(), sampling)
    count = max(int(20 / 10 * sampling.fps), sampling.min_frames)
    chosen = np.linspace(0, 19, count).round().astype(int)
    assert got.shape == (count, 16, 32, 3)
    np.testing.assert_allclose(got[:, 12, 24, 0], frames(20)[chosen, 12, 24, 0], atol=4)
    assert decoded.times == pytest.approx(tuple(chosen / 10))


def test_spread_frames_are_never_more_than_there_are_or_are_wanted():
    assert len(video_of(video_file(count=3, sound=False), SPREAD)[0]) == 3
    assert video_of(video_file(count=1, sound=False), SPREAD)[1].times == (0.0,)
    _, decoded = video_of(video_file(), Sampling(fps=10, max_frames=5, spread=True, min_frames=4))
    assert decoded.times == pytest.approx((0.0, 0.5, 1.0, 1.4, 1.9))
    assert video_of(video_file(), Sampling(fps=10, spread=True), max_video_frames=2)[1].times == pytest.approx((0, 1.9))


def test_spread_frames_of_a_file_that_promises_more_than_it_has():
    data = bytearray(video_file(sound=False))
    last = len(data) - (len(data) - data.index(b"mdat")) // 8
    data[last:] = bytes(len(data) - last)
    got, decoded = video_of(bytes(data), SPREAD)
    assert len(got) == len(decoded.times) == 4
    assert decoded.times[-1] < 1.9


def test_spread_frames_keep_to_the_limits():
    for limits, code in (
        ({"max_pixels": 511}, "video_too_large"),
        ({"max_video_pixels": 3 * 512}, "video_too_large"),
        ({"max_video_s": 1.5}, "video_too_long"),
        ({"max_decoded_bytes": 2000}, "decoded_too_large"),
    ):
        for data in (video_file(), fragmented()):
            with pytest.raises(MediaFault) as caught:
                video_of(data, SPREAD, **limits)
            assert caught.value.code == code


def test_spread_frames_are_resized_as_the_models_processor_would():
    patcher = Patcher(patch=4, least=64, most=8 * 16 * 4, cap=False)
    whole, decoded = video_of(video_file(sound=False), SPREAD)
    assert not decoded.resized
    sampling = msgspec.structs.replace(SPREAD, patcher=patcher)
    got, small = video_of(video_file(sound=False), sampling)
    assert (small.resized, small.times) == (True, decoded.times)
    assert got.shape == (4, 8, 16, 3)
    np.testing.assert_array_equal(patcher.cut(got).data, patcher.video(list(whole)).data)
    with pytest.raises(MediaFault, match="more than 200 times") as caught:
        video_of(mp4(np.zeros((4, 2, 402, 3), np.uint8), 2.0, None, quality=10), sampling)
    assert caught.value.code == "invalid_video"


def test_spread_frames_come_with_the_sound():
    _, decoded = video_of(video_file(), Sampling(fps=2, audio=True, spread=True, min_frames=4))
    assert decoded.samples.shape[0] / decoded.rate == pytest.approx(2.0, abs=0.15)

"""Damaged files of every kind: an answer or a fault with a 4xx, whatever the bytes; in the pool no process is lost."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from media_files import av_file, here, image_file, item, png_that_claims, sound_file, tone, video_file

from mstar.spec.errors import RequestError
from mstar_server.media.decoder import Media
from mstar_server.media.limits import MediaFault
from mstar_server.options import ServerOptions

SMALL = {"max_pixels": 1 << 16, "max_audio_s": 3.0, "max_video_s": 5.0, "max_decoded_bytes": 1 << 22}
SEEDS = {
    "image": {
        **{kind: image_file(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")},
        "huge": png_that_claims(20_000, 20_000),
    },
    "audio": {
        "wav": sound_file(tone(0.1, 8000), 8000),
        "aiff": sound_file(tone(0.1, 8000), 8000, "AIFF"),
        "vorbis": sound_file(tone(0.1, 8000), 8000, "OGG"),
        **{kind: av_file(kind, 0.1) for kind in ("flac", "mp3", "opus", "aac", "m4a", "webm", "mov", "mka")},
    },
    "video": {"mp4": video_file(5), "silent": video_file(5, sound=False)},
}
CRASHES = (("audio", "aac"),)
"""What some versions of FFmpeg die of when it is damaged: decoded in the pool only."""
CASES = [(kind, name) for kind, files in SEEDS.items() for name in files]


@st.composite
def mutated(draw, data: bytes):
    """*data* cut short, with bits flipped, fields overwritten, or a piece repeated."""
    made = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(made) - 1)) | st.integers(0, min(64, max(0, len(made) - 1))))
        match draw(st.sampled_from(("cut", "flip", "field", "repeat", "noise"))):
            case "cut":
                del made[at:]
            case "flip" if made:
                made[at] ^= 1 << draw(st.integers(0, 7))
            case "field":
                made[at : at + 4] = draw(st.sampled_from((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0")))
            case "repeat":
                made[at:at] = made[at : at + draw(st.integers(1, 64))]
            case "noise":
                made[at : at + 8] = draw(st.binary(max_size=16))
    return bytes(made)


@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if case not in CRASHES])
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_decoded_or_refused(kind, name, data, capfd):
    damaged = data.draw(mutated(SEEDS[kind][name]))
    try:
        decoded, output = here(kind, damaged, **SMALL)
    except MediaFault as error:
        fault = error
    else:
        assert os.fstat(output).st_size <= SMALL["max_decoded_bytes"]
        os.close(output)
        assert all(ref is None or min(ref.shape) > 0 for ref in (decoded.frames, decoded.samples))
        return
    assert 400 <= fault.status < 500
    assert fault.message


async def test_a_storm_of_damaged_files_leaves_the_pool_as_it_was():
    random.seed(7)
    media = Media(ServerOptions(media_processes=2, **SMALL))
    good = item("image", SEEDS["image"]["PNG"])
    try:
        outcomes = set()
        for _ in range(150):
            kind, name = random.choice(CASES)
            damaged = bytearray(SEEDS[kind][name])
            for _ in range(random.randrange(1, 20)):
                damaged[random.randrange(len(damaged))] = random.randrange(256)
            try:
                await media.decode([good, item(random.choice((kind, "any")), bytes(damaged))])
                outcomes.add(200)
            except RequestError as error:
                outcomes.add(error.status)
        assert {200, 400} <= outcomes
        assert all(status < 500 for status in outcomes)
        assert len(media.pool.pids) <= 2
        assert len(await media.decode([good] * 4)) == 4
    finally:
        await media.close()

from __future__ import annotations

import asyncio
import os
import time

import psutil
import pytest
from media_files import PIXELS, image_file, item

from mstar.spec.errors import RequestError, TooBusy
from mstar_server.media.decoder import Media
from mstar_server.media.pool import DecoderPool
from mstar_server.options import ServerOptions

PNG, WAV, MP4 = image_file("PNG"), b"RIFF\0\0\0\0WAVE", b"\0\0\0\x18ftypisom"


def make(processes=2, timeout_s=30.0, max_waiting=100, memory=1 << 30, decoders="DECODERS"):
    pool = DecoderPool(processes, timeout_s, memory, max_waiting, decoders=f"bad_decoders:{decoders}")
    return Media(ServerOptions(), pool=pool)


async def test_a_decoder_that_crashes_costs_its_own_request_only(caplog):
    media = make()
    try:
        good = [media.decode([item("image", PNG)]) for _ in range(6)]
        bad = [media.decode([item("audio", WAV, "sound")]) for _ in range(3)]
        results = await asyncio.gather(*bad, *good, return_exceptions=True)
        for error in results[:3]:
            assert isinstance(error, RequestError)
            assert (error.status, error.code, error.param) == (422, "invalid_media", "sound")
        for parts in results[3:]:
            assert parts[0].pixels.tolist() == PIXELS.tolist()
        assert "SIGSEGV" in caplog.text
        assert len(media.pool.pids) <= 2
    finally:
        await media.close()


async def test_a_decoder_that_hangs_is_killed_at_the_limit():
    media = make(processes=1, timeout_s=0.5)
    try:
        with pytest.raises(RequestError, match=r"longer than the limit of 0\.5 s") as caught:
            await media.decode([item("video", MP4)])
        assert caught.value.status == 422
        assert (await media.decode([item("image", PNG)]))[0].pixels.shape == PIXELS.shape
    finally:
        await media.close()


async def test_a_library_that_does_not_load_is_named():
    media = make(processes=1)
    try:
        with pytest.raises(RequestError, match="library of it does not load: No module named 'av'") as caught:
            await media.decode([item("mask", PNG, "video")])
        assert (caught.value.status, caught.value.code) == (400, "decoder_unavailable")
    finally:
        await media.close()


async def test_a_decoder_that_wants_too_much_memory_gets_an_error():
    media = make(processes=1, memory=1 << 30)
    try:
        url = "data:video/jpeg;base64,AAAA"
        with pytest.raises(RequestError, match="more memory") as caught:
            await media.decode([item("video", url)])
        assert (caught.value.status, caught.value.code) == (413, "decoded_too_large")
        (pid,) = media.pool.pids
        assert psutil.Process(pid).memory_info().rss < 200 << 20
    finally:
        await media.close()


@pytest.mark.parametrize(
    ("decoders", "said"), [("RAISING", "ZeroDivisionError: in a library"), ("LYING", "no array of shape")]
)
async def test_what_a_library_raises_and_what_a_decoder_makes_up(decoders, said):
    media = make(processes=1, decoders=decoders)
    try:
        with pytest.raises(RequestError, match=said) as caught:
            await media.decode([item("mask", PNG)])
        assert caught.value.status == 422
    finally:
        await media.close()


async def test_a_cancelled_request_frees_its_slot_and_no_process_is_left():
    media = make(processes=1)
    request = asyncio.create_task(media.decode([item("video", MP4)]))
    waiting = asyncio.create_task(media.decode([item("image", PNG)]))
    while not media.pool._running:
        await asyncio.sleep(0.01)
    (pid,) = media.pool.pids
    request.cancel()
    assert (await asyncio.wait_for(waiting, 10))[0].pixels.shape == PIXELS.shape
    assert not psutil.pid_exists(pid)
    pids = media.pool.pids
    await media.close()
    assert not any(map(psutil.pid_exists, pids))


async def test_a_short_job_whose_request_is_cancelled_keeps_its_process():
    media = make(processes=1, decoders="SLOW")
    try:
        await media.decode([item("image", PNG)])
        before = media.pool.pids
        request = asyncio.create_task(media.decode([item("mask", PNG)]))
        await asyncio.sleep(0.05)
        request.cancel()
        await media.decode([item("image", PNG)])
        assert media.pool.pids == before
    finally:
        await media.close()


async def test_a_process_that_died_while_idle_is_replaced():
    media = make(processes=1)
    try:
        await media.decode([item("image", PNG)])
        (pid,) = media.pool.pids
        psutil.Process(pid).kill()
        await asyncio.sleep(0.1)
        assert (await media.decode([item("image", PNG)]))[0].pixels.shape == PIXELS.shape
        assert media.pool.pids != [pid]
    finally:
        await media.close()


async def test_too_many_waiting_files_are_refused():
    media = make(processes=1, max_waiting=1, decoders="SLOW")
    try:
        requests = [asyncio.create_task(media.decode([item("mask", PNG)])) for _ in range(4)]
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert sum(isinstance(result, TooBusy) for result in results) >= 1
        assert any(isinstance(result, list) for result in results)
    finally:
        await media.close()


async def test_closing_ends_what_runs():
    media = make(processes=1)
    request = asyncio.create_task(media.decode([item("video", MP4)]))
    while not media.pool._running:
        await asyncio.sleep(0.01)
    started = time.monotonic()
    await media.close()
    with pytest.raises(RequestError, match="shutting down"):
        await request
    assert time.monotonic() - started < 5


async def test_files_and_descriptors_do_not_leak():
    media = Media(ServerOptions(media_processes=1))
    try:
        await media.decode([item("image", PNG)])
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            await media.decode([item("image", PNG), item("any", b"text", "b")])
            with pytest.raises(RequestError):
                await media.decode([item("audio", b"RIFF\x26\0\0\0WAVEjunk")])
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        await media.close()


async def test_the_files_of_a_request_share_its_budget():
    media = Media(ServerOptions(max_decoded_bytes=250, media_processes=1))
    try:
        assert len(await media.decode([item("image", PNG)] * 2)) == 2  # 105 bytes each
        with pytest.raises(RequestError, match="limit of") as caught:
            await media.decode([item("image", PNG)] * 3)
        assert (caught.value.status, caught.value.code) == (413, "decoded_too_large")
    finally:
        await media.close()


async def test_a_file_over_the_limit_is_a_413():
    media = Media(ServerOptions(max_file_bytes=20))
    with pytest.raises(RequestError, match="limit of 20") as caught:
        await media.decode([item("image", PNG)])
    assert (caught.value.status, caught.value.code) == (413, "file_too_large")
    await media.close()

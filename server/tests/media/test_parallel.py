"""Threads that help to make a file: the same file, no more threads than there are, nothing left behind."""

from __future__ import annotations

import base64
import io
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from mstar_server.media.encode import png
from mstar_server.media.encode.images import base64_text, encode_image, image_text
from mstar_server.media.encode.parallel import Helpers

WAIT_S = 20


def photograph(seed):
    level = np.add.outer(np.arange(600), np.arange(512)) / 4
    grain = np.random.default_rng(seed).normal(0, 4, (600, 512, 3))
    return np.clip(level[..., None] % 256 + grain, 0, 255).astype(np.uint8)


def meet(count):
    """A function for items that ends when *count* threads are in it."""
    barrier = threading.Barrier(count)

    def begin():
        def work(item):
            barrier.wait(WAIT_S)
            return item * item, threading.get_ident()

        return work

    return begin


def test_idle_threads_help_and_results_are_in_order():
    helpers = Helpers(2)
    made = helpers.map(meet(3), [1, 2, 3])
    assert [square for square, _ in made] == [1, 4, 9]
    assert len({thread for _, thread in made}) == 3
    assert threading.get_ident() in {thread for _, thread in made}
    assert [square for square, _ in helpers.map(meet(3), [4, 5, 6])] == [16, 25, 36], "they are idle again"


def test_without_idle_threads_the_caller_does_it_all():
    helpers, free, busy = Helpers(1), threading.Event(), threading.Barrier(3)

    def blocked():
        def work(item):
            busy.wait(WAIT_S)
            assert free.wait(WAIT_S)
            return item

        return work

    with ThreadPoolExecutor(1) as other:
        held = other.submit(helpers.map, blocked, [0, 1])
        busy.wait(WAIT_S)  # the other and the only helper work
        try:
            alone = helpers.map(meet(1), range(5))
        finally:
            free.set()
        assert {thread for _, thread in alone} == {threading.get_ident()}
        assert held.result(WAIT_S) == [0, 1]
    assert len({thread for _, thread in helpers.map(meet(2), [1, 2])}) == 2


@pytest.mark.parametrize("where", ["begin", "work"])
@pytest.mark.parametrize("who", ["caller", "helper"])
def test_an_error_ends_the_work_of_all(where, who):
    """It is raised when nobody works any more, and the helpers are idle again."""
    helpers, barrier, caller, after = Helpers(1), threading.Barrier(2), threading.get_ident(), []

    def fail(stage):
        if stage == where and (threading.get_ident() == caller) == (who == "caller"):
            raise KeyError("lost")

    def begin():
        barrier.wait(WAIT_S)
        fail("begin")

        def work(item):
            fail("work")
            after.append(item)
            return item

        return work

    with pytest.raises(KeyError, match="lost"):
        helpers.map(begin, range(1_000_000))
    assert len(after) < 1_000_000
    assert len({thread for _, thread in helpers.map(meet(2), [1, 2])}) == 2


def test_files_are_the_same_whoever_helps(monkeypatch):
    pixels, files = photograph(0), set()
    for threads in (0, 1, 3):
        monkeypatch.setattr(png, "HELPERS", Helpers(threads))
        files.add(encode_image(pixels, "png"))
    assert len(files) == 1


def test_many_files_at_once_are_each_right(monkeypatch):
    monkeypatch.setattr(png, "HELPERS", Helpers(2))
    pictures = [photograph(seed) for seed in range(12)]
    before = threading.active_count()
    with ThreadPoolExecutor(6) as callers:
        files = list(callers.map(lambda pixels: encode_image(pixels, "png"), pictures))
    for pixels, file in zip(pictures, files, strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(file))), pixels)
    assert threading.active_count() <= before + 2


@pytest.mark.parametrize("height", [1, 2, 3, 599, 600])
@pytest.mark.parametrize("name", ["png", "webp"])
def test_text_in_parts_is_that_of_the_whole(height, name):
    pixels = photograph(0)[:height]
    text = base64.b64encode(encode_image(pixels, name))
    assert base64_text(encode_image(pixels, name)) == text.decode()
    assert b"".join(image_text(pixels, name)) == text

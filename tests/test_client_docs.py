"""The examples of the page about the client, against a real server."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from mstar.testing.miniatures import MINIATURES

from .serving import Server, serving
from .test_docs import blocks


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys = [m.key for m in MINIATURES]
    with serving(*keys, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


def said(source: str, page: str, server: Server) -> str:
    here = source.replace("127.0.0.1:8000", server.url.removeprefix("http://"))
    assert here != source
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(here, page, "exec"), {"__name__": "example"})
    return out.getvalue()


def test_the_examples_of_the_client_page(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = [said(source, "docs/client.md", server) for source in blocks("docs/client.md", "python")]
    assert len(told) == 7
    chat, kinds, voices, anything, live, loop, wrong = told
    whole, pieces = chat.splitlines()
    assert whole == pieces
    assert kinds == "(1, 4, 3)\n"
    assert {path.name for path in tmp_path.iterdir()} == {"hello.wav", "abc.png", "again.wav"}
    assert "'ann', 'bob'" in voices
    assert "samples" in anything
    assert anything.splitlines()[-1] in ("length", "stop")
    assert "audio_seconds" in live
    assert [line.split()[0] for line in loop.splitlines()] == [str(n) for n in range(1, 11)]
    assert wrong.startswith("400 model_kwargs.temprature ")
    assert "temperature" in wrong

"""The examples of the pages about pictures and videos, against a real server."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .serving import Server, serving
from .test_docs import blocks


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys = ("mini_denoise", "mini_video")
    with serving(*keys, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


def follow(page: str, server: Server) -> None:
    """Run the page's Python, whose output must be as printed, and then its commands."""
    address = server.url.removeprefix("http://")
    (source,), (want,), (commands,) = (blocks(page, language) for language in ("python", "text", "sh"))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source.replace("127.0.0.1:8000", address), page, "exec"), {"__name__": "example"})
    assert out.getvalue() == want
    subprocess.run(["bash", "-ec", commands.replace("127.0.0.1:8000", address)], check=True, capture_output=True)


def test_pictures(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow("docs/http/images.md", server)
    edited = json.loads(Path("edited.json").read_text())
    assert (edited["size"], len(edited["data"])) == ("64x32", 1)


@pytest.mark.filterwarnings("ignore")
def test_videos(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow("docs/http/videos.md", server)
    assert Path("bird.mp4").read_bytes()[4:8] == b"ftyp"

"""The progress bar, on a terminal that is not one and on one that says it is."""

from __future__ import annotations

import io

import pytest

from mstar.weights.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use(file: io.StringIO) -> str:
    with progress_bar(file) as show:
        show("fetching a", 0, 2000)
        show("fetching a", 2000, 2000)
        show("converting b", 1, 0)
    return file.getvalue()


def test_each_piece_of_work_gets_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    drawn = use(Terminal())
    assert "converting b" in drawn
    assert drawn.index("fetching a") < drawn.index("converting b")


def test_nothing_is_drawn_into_a_file() -> None:
    assert use(io.StringIO()).strip() == ""

"""How the command line writes: plain text, coloured only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

__all__ = ["fault", "note", "table"]

_RED, _YELLOW, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"


def fault(message: str, *, colour: bool = True) -> None:
    """Write why the command failed to stderr, in red."""
    _write(sys.stderr, message, _RED if colour else "")


def note(message: str, *, colour: bool = True) -> None:
    """Write something that the user should know to stderr, in yellow."""
    _write(sys.stderr, message, _YELLOW if colour else "")


def _write(stream: TextIO, message: str, shade: str) -> None:
    stream.write(f"{shade}{message}{_PLAIN}\n" if shade and stream.isatty() else f"{message}\n")
    stream.flush()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns under *head*, two spaces apart."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )

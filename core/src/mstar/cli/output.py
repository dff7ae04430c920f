"""How the command line writes: plain text, coloured only on a terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from mstar.spec.sizes import bytes_in_words

__all__ = ["Tree", "bytes_in_words", "fault", "note", "print_json", "table", "tolerate_encodings"]

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


def print_json(answer: Any) -> None:
    """Write *answer* to stdout as JSON, for programs. Characters that stdout's encoding lacks are escaped."""
    text = json.dumps(answer, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(answer, indent=2)
    print(text)


def tolerate_encodings() -> None:
    """Let stdout write ``?`` for characters that its encoding lacks, as it is in a terminal with ``LANG=C``; stderr
    writes them as escapes anyway."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@dataclass
class Tree:
    """An outline, drawn with lines. Nothing is cut or wrapped: a narrow terminal does that, a file must not."""

    label: str
    branches: list[Tree] = field(default_factory=list)

    def add(self, label: str) -> Tree:
        """A new branch."""
        self.branches.append(Tree(label))
        return self.branches[-1]

    def lines(self) -> Iterator[str]:
        yield self.label
        for branch in self.branches:
            last = branch is self.branches[-1]
            first, *rest = branch.lines()
            yield f"{'└' if last else '├'}── {first}"
            yield from (f"{' ' if last else '│'}   {line}" for line in rest)

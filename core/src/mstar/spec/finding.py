"""What ``mstar doctor`` says of a machine: its own findings, and those of plugins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["STATES", "Finding", "State"]

State = Literal["ok", "missing", "bad"]
STATES: tuple[State, ...] = ("ok", "missing", "bad")


@dataclass(frozen=True)
class Finding:
    """One line.

    :param subject: what was looked at, in a word or three. :param state: ``ok``; ``missing``: something optional or
        worth knowing; ``bad``: M* cannot work so, and the command ends with status 1.
    :param detail: what was found. :param advice: what to type, or empty.
    """

    subject: str
    state: State
    detail: str
    advice: str = ""

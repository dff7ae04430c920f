"""What each installed plugin offered when it last worked.

A plugin that cannot be imported, is blocked or has been uninstalled cannot say which models it has. With this memory
``mstar serve KEY`` can say whose KEY was. It is a hint and nothing else: losing the file loses a better sentence.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from mstar.files import write_whole

__all__ = ["Remembered", "recall", "remember"]

log = logging.getLogger(__name__)


class Remembered(TypedDict):
    """One plugin: its distribution and its models' keys."""

    distribution: str
    keys: list[str]


def recall(file: Path) -> dict[str, Remembered]:
    """What *file* says, by plugin; nothing when it is not there or damaged."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        return {name: Remembered(distribution=e["distribution"], keys=list(e["keys"])) for name, e in known.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.debug("%s cannot be read: %s", file, error)
        return {}


def remember(file: Path, working: Mapping[str, Remembered]) -> None:
    """Add the *working* plugins to *file*, which is written only when that changes something."""
    known = recall(file)
    merged = {**known, **working}
    if merged == known:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(merged, indent=1, sort_keys=True).encode())
    except OSError as error:  # a cache that cannot be written to must not stop anyone
        log.debug("%s cannot be written: %s", file, error)

"""Sizes in words."""

from __future__ import annotations

__all__ = ["bytes_in_words"]


def bytes_in_words(size: float) -> str:
    """*size* in bytes as a person reads it: ``269 MB``, ``1.5 GB`` (powers of 1000)."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"

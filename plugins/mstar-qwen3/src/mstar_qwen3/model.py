"""Qwen3.5's worker side."""

from __future__ import annotations

from mstar_qwen3.text import Qwen35Text

__all__ = ["Qwen35"]


class Qwen35(Qwen35Text):
    """The published models."""

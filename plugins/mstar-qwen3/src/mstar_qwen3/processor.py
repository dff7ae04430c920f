"""Qwen3.5's API side."""

from __future__ import annotations

from mstar_qwen3.chat import Qwen35TextProcessor

__all__ = ["Qwen35Processor"]


class Qwen35Processor(Qwen35TextProcessor):
    """What the specs name."""

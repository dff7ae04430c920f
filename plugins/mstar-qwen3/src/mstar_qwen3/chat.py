"""Qwen3.5's chats: thoughts, tools and answers by the checkpoint's template."""

from __future__ import annotations

from mstar.processing.chat import TextProcessor

__all__ = ["Qwen35TextProcessor"]


class Qwen35TextProcessor(TextProcessor):
    """Nothing of its own for texts: the template opens a thought, or closes an empty one, as ``enable_thinking`` says;
    it teaches the model Qwen's XML for calls of tools; and ``generation_config.json`` says what ends an answer."""

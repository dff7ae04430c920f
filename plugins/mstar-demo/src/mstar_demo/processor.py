"""SmolLM2's API side: text in through the checkpoint's chat template, text out."""

from __future__ import annotations

from mstar.processing.chat import TextProcessor

__all__ = ["SmolLM2Processor"]


class SmolLM2Processor(TextProcessor):
    """Nothing of its own: tokenizer, template and stop tokens come from the checkpoint."""

"""SmolLM2: a plain Llama decoder; every size comes from the checkpoint's ``config.json``."""

from __future__ import annotations

from mstar.patterns.causal_lm import CausalLM

__all__ = ["SmolLM2"]


class SmolLM2(CausalLM):
    """SmolLM2-135M-Instruct and its larger sisters (Llama architecture, grouped-query attention, tied head)."""

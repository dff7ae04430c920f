"""A plugin: a decoder in the published layout, whose tokens are characters; importable by name in child processes."""

from __future__ import annotations

from dataclasses import replace

import mstar
from mstar.spec.model import ModelSpec
from mstar.testing.miniatures import miniature


@mstar.hookimpl
def mstar_models() -> list[ModelSpec]:
    chat = miniature("mini_chat").spec
    return [replace(chat, key="tiny_llama", model="mstar.patterns.causal_lm:CausalLM")]

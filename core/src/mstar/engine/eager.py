"""Runs every step as plain PyTorch calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mstar.engine.base import Runner
from mstar.nn.node import Node, Step

__all__ = ["EagerRunner"]


class EagerRunner(Runner):
    """Calls the entry as the plain method that it is."""

    def run(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        method = node if entry == "forward" else getattr(node, entry)
        outputs: Mapping[str, Any] = method(step, **inputs)
        return outputs

"""What a low-rank adapter's configuration says of how strong it is: PEFT's, beside the file, or diffusers' copy of it
in the file's own head.

Source: PEFT 0.21.2, ``LoraConfig`` and its ``get_pattern_key``; diffusers 0.42.1, ``loaders/lora_base.py``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from mstar.processing.tokenizer import read_json
from mstar.spec.errors import SetupError

__all__ = ["AdapterConfig"]

_FILES = ("adapter_config.json", "config.json")
_HEAD, _PART = "lora_adapter_metadata", "transformer."


@dataclass(frozen=True)
class AdapterConfig:
    """*alpha*: of layers that none of *patterns* names; ``None``: the rank. *patterns*: ends of layers' names, as
    regular expressions, and what alpha is there. *rslora*: alpha counts over the root of the rank."""

    alpha: float | None = None
    rslora: bool = False
    patterns: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> AdapterConfig:
        """Of the adapter *file*, which safetensors can read: its own head's before that of a file beside it.

        :raises SetupError: it wants what is not supported, or is not what it should be; names the file and the field.
        """
        found = _head(file) or next((c for name in _FILES if "r" in (c := read_json(file.parent, name))), {})
        if found.get("use_dora"):
            raise SetupError(f"the adapter {file}: its configuration has use_dora, which is not supported")
        alphas = found.get("alpha_pattern") or {}
        if not isinstance(alphas, dict):
            raise SetupError(
                f"the adapter {file}: alpha_pattern in its configuration should be an object, not {alphas!r}"
            )
        patterns = {name: _number(file, "alpha_pattern", a) for name, a in alphas.items()}
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise SetupError(f"the adapter {file}: alpha_pattern: {pattern!r} is no pattern: {error}") from error
        alpha = found.get("lora_alpha")
        alpha = None if alpha is None else _number(file, "lora_alpha", alpha)
        return cls(alpha, bool(found.get("use_rslora")), patterns)

    def factor(self, layer: str, rank: int) -> float:
        """Of the adapter of *layer*, its name without what trainers put before it. The matrices say the *rank*, so that
        ``rank_pattern`` is of no interest."""
        named = (a for pattern, a in self.patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", layer))
        alpha = next(named, self.alpha)
        if alpha is None:
            alpha = rank
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _head(file: Path) -> dict[str, Any]:
    """The denoiser's configuration in the head of *file*; empty if there is none."""
    with safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get(_HEAD)
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise SetupError(f"the adapter {file}: {_HEAD} in its head is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise SetupError(f"the adapter {file}: {_HEAD} in its head is no object")
    own = {key.removeprefix(_PART): value for key, value in found.items() if key.startswith(_PART)}
    return own or {key: value for key, value in found.items() if "." not in key}


def _number(file: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SetupError(f"the adapter {file}: {name} in its configuration should be a number, not {value!r}")
    return float(value)

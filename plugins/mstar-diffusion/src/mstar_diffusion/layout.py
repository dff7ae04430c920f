"""A repository in diffusers' layout: a folder for each part of the pipeline, each with its own configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mstar.processing.tokenizer import read_json
from mstar.spec.errors import SetupError, WeightsError, nearest

__all__ = ["folder_of", "part_config", "refuse_unknown"]


def folder_of(weights: Path | None, key: str) -> Path:
    """The folder of weights, which the configuration of a pipeline's parts is read from."""
    if weights is None:
        raise WeightsError(f"{key} needs its folder of weights, for the configuration of its parts; pass --weights DIR")
    return weights


def part_config(weights: Path, part: str, name: str = "config.json") -> dict[str, Any]:
    """The file *name* of *part* (``vae``, ``scheduler``…). Raises :class:`WeightsError` when it is not there."""
    config = read_json(weights / part, name)
    if not config:
        found = sorted(entry.name for entry in weights.iterdir())[:8] if weights.is_dir() else []
        raise WeightsError(
            f"{weights / part / name} is missing; the folder of weights holds {', '.join(found) or 'nothing'}"
        )
    return config


def refuse_unknown(config: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise :class:`SetupError` for a key of a published configuration whose meaning this family does not know."""
    for key in config:
        if key not in known and not key.startswith("_"):
            raise SetupError(f"{where}: {key!r} is not known{nearest(key, sorted(known))}")

"""The deployment that is measured, offline and over HTTP. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu.shapes import Sizes
from mstar.spec.deployment import EngineOptions

__all__ = ["deployment", "known_options"]


def known_options(**wanted: Any) -> dict[str, Any]:
    """Those of *wanted* that this version's ``engine`` section has."""
    return {name: value for name, value in wanted.items() if name in EngineOptions.model_fields}


def deployment(sizes: Sizes, device: str, changed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The deployment that is measured, offline and over HTTP. Its dtype is bfloat16 on any device.

    :param changed: fields that are given otherwise; of a section, only those that it names.
    """
    found: dict[str, Any] = {
        "device": device,
        "dtype": "bfloat16",
        "max_concurrent_requests": max(sizes.batches[-1], sizes.http[0], *(n for n, _ in sizes.loads)),
        "model_kwargs": {"max_tokens": sizes.context},
        "resources": {"kv": {"tokens": sizes.pool_tokens()}},
        "scheduler": {"max_step_tokens": sizes.step_tokens},
        "engine": {},
    }
    for key, value in (changed or {}).items():
        found[key] = {**found[key], **value} if isinstance(value, Mapping) and key in found else value
    return found

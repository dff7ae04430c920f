"""Implements a hook that does not exist."""

from __future__ import annotations

from mstar.hookspecs import hookimpl


@hookimpl
def mstar_model() -> list[str]:
    return []

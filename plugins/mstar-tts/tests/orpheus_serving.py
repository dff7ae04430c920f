"""A tiny Orpheus, asked in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mstar.runtime.local import Local, load
from mstar.settings import Settings

__all__ = ["SETTINGS", "local"]

SETTINGS = Settings(plugins=("server",), extra_plugins=("mstar_tts.plugin",), accept_licences=("orpheus",))


def local(folder: Path, **options: Any) -> Local:
    """The model in *folder*, with the options ``model_kwargs``."""
    return load("orpheus", weights=str(folder), settings=SETTINGS, device="cpu", dtype="float32", model_kwargs=options)

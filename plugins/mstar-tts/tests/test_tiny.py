"""``python -m mstar_tts.….tiny DIR`` writes a checkpoint that its key serves."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from mstar.cli.app import run


@pytest.mark.parametrize(
    ("module", "key", "words"),
    [
        ("kokoro", "kokoro", ()),
        ("orpheus", "orpheus", ()),
        ("qwen3_tts", "qwen3_tts", ()),
        ("qwen3_tts", "qwen3_tts_base", ("qwen3_tts_base",)),
    ],
)
def test_it_writes_what_its_key_serves(
    module: str, key: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = tmp_path / "new" / "tiny", f"mstar_tts.{module}.tiny"
    monkeypatch.setattr(sys, "argv", [name, str(folder), *words])
    monkeypatch.delitem(sys.modules, name, raising=False)  # runpy warns of a module that is imported already
    runpy.run_module(name, run_name="__main__")
    environ = {"MSTAR_EXTRA_PLUGINS": "mstar_tts.plugin", "MSTAR_PLUGINS": "", "MSTAR_CACHE": str(tmp_path)}
    assert run(("check", key, "--weights", str(folder)), environ) == 0

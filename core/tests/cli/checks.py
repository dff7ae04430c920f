"""For tests of ``mstar check``: a deployment file, and what the command finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., tuple[int, str, str]]


def deployment(tmp_path: Path, text: str) -> str:
    file = tmp_path / "deployment.yaml"
    file.write_text(text)
    return str(file)


def facts(run: Run, *words: str, **environ: str) -> dict[str, Any]:
    status, out, _ = run("check", *words, "--json", **environ)
    found: dict[str, Any] = json.loads(out)
    assert status == (0 if found["ok"] else 1)
    return found

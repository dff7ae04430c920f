"""What ``--json`` answers, held against the page that says what it is."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mstar.simulate.profile import Profile, write_profile

ROOT = Path(__file__).parent.parent.parent.parent
Run = Callable[..., tuple[int, str, str]]
MINI = {"MSTAR_EXTRA_PLUGINS": "mstar.testing.miniatures"}

FREE = ("walks", "streams", "inputs", "resources", "entries", "seats")
"""Of a graph: their parts are too many to be told on the page."""


@pytest.fixture(scope="module")
def shapes() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("cli_docs", ROOT / "scripts" / "cli_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    told: dict[str, str] = module.SHAPES
    return told


def fields(answer: Any) -> Iterator[str]:
    """The names of all fields, those of objects within included."""
    if isinstance(answer, list):
        for item in answer:
            yield from fields(item)
    elif isinstance(answer, dict):
        for name, value in answer.items():
            yield name
            if name not in FREE:
                yield from fields(value)


@pytest.mark.parametrize(
    "words",
    [
        ("models",),
        ("models", "mini_tts"),
        ("plugins",),
        ("plugins", "--traceback"),
        ("graph", "mini_omni"),
        ("check", "mini_chat"),
        ("license", "list"),
        ("license", "show", "mini_chat"),
        ("download", "mini_chat"),
        ("doctor",),
        ("key", "add", "alice"),
        ("key", "list"),
        ("key", "remove", "alice"),
        ("simulate", "run", "PROFILE", "--rate", "5", "--requests", "4"),
    ],
)
def test_every_field_is_on_the_page(mstar: Run, shapes: dict[str, str], tmp_path: Path, words: tuple[str, ...]) -> None:
    profile = tmp_path / "profile.json"
    costs = {"llm": {"step": 0.01, "token": 0.001}}
    write_profile(Profile(model="m", costs=costs, max_step_tokens=100, kv_tokens=3200, ranks=1), profile)
    if words[0] == "key" and words[1] != "add":
        mstar("key", "add", "alice")
    status, out, err = mstar(*(str(profile) if word == "PROFILE" else word for word in words), "--json", **MINI)
    assert status == 0, err
    found = set(fields(json.loads(out)))
    assert found
    assert found <= set(re.findall(r"`([a-z_0-9]+)`", shapes[words[0]]))

"""The recipes' examples, each with the real client library against a real server. What is not installed is skipped.

``MSTAR_CLIENTS_PYTHON`` names the interpreter of an environment that has the Python libraries; without it they are
looked for in this one. The JavaScript examples want ``node``, and ``MSTAR_NODE_MODULES``: a folder whose
``node_modules`` has the packages that the page names.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import soundfile

from mstar.testing.miniatures.catalog import continue_sum, spoken
from mstar.testing.miniatures.common import decode, encode

from .serving import Server, serving
from .test_docs import ROOT

MODEL, PROMPT, TOKENS = "mini_chat", "Hi", 16
SOUND = ("mini_tts", "mini_ctc", "mini_scribe", "mini_embed")
RATE = 24_000
CLIENTS = str(Path(os.environ.get("MSTAR_CLIENTS_PYTHON", sys.executable)).absolute())
Example = tuple[str, str]
"""A program, and what it prints; nothing for one that prints answers to ``Hi``."""


def examples(page: str, language: str) -> list[Example]:
    text = (ROOT / f"docs/recipes/{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```\n(?:\n```text\n(.*?)```)?", text, re.DOTALL)


def named(*pages: str, language: str) -> list[Any]:
    found = [(f"{page} {i}", example) for page in pages for i, example in enumerate(examples(page, language))]
    assert found
    return [pytest.param(example, id=name) for name, example in found]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(MODEL, *SOUND, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a program runs: with the clip that the examples read."""
    soundfile.write(tmp_path / "talk.wav", spoken("hello there", RATE), RATE, subtype="PCM_16")
    return tmp_path


def here(source: str, server: Server) -> str:
    found = source.replace("127.0.0.1:8000", server.url.removeprefix("http://")).replace("smollm2", MODEL)
    assert found != source
    return found


def told(folder: Path, *command: str) -> str:
    """What *command* prints, in a process of its own: client libraries patch, warn and leave threads behind."""
    clean = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    clean.pop("PYTHONPATH", None)
    clean["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks GitHub for prices
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean, cwd=folder)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def check(example: Example, printed: str, answer: str, folder: Path) -> None:
    source, want = example
    if want:
        assert printed == want
    else:
        assert printed.splitlines()
        assert set(printed.splitlines()) <= {answer, "length"}
    wanted = set(re.findall(r"hello\.\w+", source))
    made = {path.name: soundfile.info(path) for path in folder.glob("hello.*")}
    assert made.keys() == wanted
    assert all(file.frames > 0 for file in made.values())


@pytest.fixture(scope="module")
def answer(server: Server) -> str:
    ask = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS}
    text: str = server.http.post("/v1/chat/completions", json=ask).json()["choices"][0]["message"]["content"]
    assert text == decode(continue_sum(encode(PROMPT), TOKENS))
    return text


@pytest.mark.parametrize("example", named("python", "voice", language="python"))
def test_python(server: Server, answer: str, example: Example, folder: Path) -> None:
    source = example[0]
    missing = [module for module in imported(source) if not has(module)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    check(example, told(folder, CLIENTS, "-c", here(source, server)), answer, folder)


def imported(source: str) -> list[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [getattr(node, "module", None) or node.names[0].name for node in nodes]


@cache
def has(module: str) -> bool:
    """Whether the clients' interpreter can import the distribution's package of *module*."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module.split('.')[0]!r}) is None)"
    return subprocess.run([CLIENTS, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("example", named("javascript", language="js"))
def test_javascript(
    server: Server, answer: str, example: Example, folder: Path, request: pytest.FixtureRequest
) -> None:
    node, packages = shutil.which("node"), os.environ.get("MSTAR_NODE_MODULES")
    if node is None or packages is None:
        pytest.skip("node is not installed, or MSTAR_NODE_MODULES does not say where its packages are")
    script = Path(packages).resolve() / f"recipe-{os.getpid()}.mjs"
    script.write_text(here(example[0], server))
    request.addfinalizer(script.unlink)
    check(example, told(folder, node, str(script)), answer, folder)

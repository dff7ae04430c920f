"""The recipes' examples, each with the real client library against a real server. What is not installed is skipped.

The JavaScript ones want ``node``, and ``MSTAR_NODE_MODULES``: a folder whose ``node_modules`` has the packages that the
page names.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mstar.testing.miniatures.catalog import continue_sum
from mstar.testing.miniatures.common import decode, encode

from .serving import Server, serving
from .test_docs import blocks

MODEL, PROMPT, TOKENS = "mini_chat", "Hi", 16
PYTHON = [(page, source) for page in ("python", "voice") for source in blocks(f"docs/recipes/{page}.md", "python")]
JAVASCRIPT = blocks("docs/recipes/javascript.md", "js")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(MODEL, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


def here(source: str, server: Server) -> str:
    found = source.replace("127.0.0.1:8000", server.url.removeprefix("http://")).replace("smollm2", MODEL)
    assert found != source
    return found


def told(server: Server, *command: str) -> list[str]:
    """What *command* prints, in a process of its own: client libraries patch, warn and leave threads behind."""
    clean = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def answer(server: Server) -> str:
    ask = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS}
    text: str = server.http.post("/v1/chat/completions", json=ask).json()["choices"][0]["message"]["content"]
    assert text == decode(continue_sum(encode(PROMPT), TOKENS))
    return text


@pytest.mark.parametrize(("page", "source"), PYTHON, ids=[f"{page} {i}" for i, (page, _) in enumerate(PYTHON)])
def test_python(server: Server, answer: str, page: str, source: str) -> None:
    for module in imported(source):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            pytest.skip(f"{module} is not installed")
    lines = told(server, sys.executable, "-c", here(source, server))
    assert lines
    assert set(lines) <= {answer, "length"}


def imported(source: str) -> list[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [getattr(node, "module", None) or node.names[0].name for node in nodes]


@pytest.mark.parametrize("source", JAVASCRIPT, ids=["openai", "ai"])
def test_javascript(server: Server, answer: str, source: str, request: pytest.FixtureRequest) -> None:
    node, folder = shutil.which("node"), os.environ.get("MSTAR_NODE_MODULES")
    if node is None or folder is None:
        pytest.skip("node is not installed, or MSTAR_NODE_MODULES does not say where its packages are")
    script = Path(folder) / f"recipe-{os.getpid()}.mjs"
    script.write_text(here(source, server))
    request.addfinalizer(script.unlink)
    assert told(server, node, str(script)) == [answer, answer]

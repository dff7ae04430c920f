"""The two commands of the README, with the slow parts (installing, a real model) replaced by small real processes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent

SERVER = '''#!{python}
"""Behaves like `mstar serve`: starting, then ready; one streamed answer; ends at SIGTERM."""
import json, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

waits, said = 2, ["The capital of France", " is Paris."]

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def do_GET(self):
        global waits
        ready, waits = waits == 0, max(0, waits - 1)
        phase = dict(phase="ready" if ready else "weights", progress=None if ready else 0.42, detail="")
        self.answer(200 if ready else 503, "application/json", json.dumps(dict(models=dict(smollm2=phase))))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["stream"] and asked["model"] == "smollm2" and "France" in asked["messages"][0]["content"]
        head = dict(id="c", object="chat.completion.chunk", created=1, model="smollm2")
        chunks = [dict(head, choices=[dict(index=0, delta=dict(content=text), finish_reason=None)]) for text in said]
        chunks.append(dict(head, choices=[], usage=dict(prompt_tokens=9, completion_tokens=7, total_tokens=16)))
        lines = ["data: " + json.dumps(chunk) for chunk in chunks] + ["data: [DONE]"]
        self.answer(200, "text/event-stream", "\\n\\n".join(lines) + "\\n\\n")

    def answer(self, status, kind, body):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

signal.signal(signal.SIGTERM, lambda *_: (print("clean stop", flush=True), sys.exit(0)))
assert sys.argv[1:4] == ["serve", "smollm2", "--device"], sys.argv
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


@pytest.fixture(scope="module")
def scripts() -> Iterator[Path]:
    folder = str(ROOT / "scripts")
    sys.path.insert(0, folder)
    yield Path(folder)
    sys.path.remove(folder)


@pytest.fixture
def environment(scripts: Path) -> ModuleType:
    return importlib.import_module("environment")


@pytest.fixture
def fake_venv(tmp_path: Path) -> Path:
    """An environment whose Python is this one and whose ``mstar`` is :data:`SERVER`; quickstart finds it installed."""
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    write_command(folder / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    write_command(folder / "mstar", SERVER.replace("{python}", sys.executable))
    return folder.parent


def write_command(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def quickstart(environment: ModuleType, venv: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "MSTAR_VENV": str(venv)}
    stamp = venv / f"mstar-{environment._digest(['openai'])}.stamp"
    stamp.touch()
    command = [sys.executable, str(ROOT / "scripts" / "quickstart.py")]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)


def test_quickstart_serves_asks_and_stops(environment: ModuleType, fake_venv: Path) -> None:
    done = quickstart(environment, fake_venv)
    assert done.returncode == 0, done.stderr
    assert "* smollm2: weights, 40 %\n* smollm2: ready\n" in done.stdout
    assert "\nThe capital of France is Paris.\n* first token after " in done.stdout
    assert "; 7 tokens, " in done.stdout
    assert done.stdout.endswith("* stopping the server\nclean stop\n")


def test_quickstart_tells_of_a_server_that_does_not_start(environment: ModuleType, fake_venv: Path) -> None:
    write_command(fake_venv / "bin" / "mstar", "#!/bin/sh\necho no weights >&2\nexit 2\n")
    done = quickstart(environment, fake_venv)
    assert done.returncode == 2
    assert done.stderr == "no weights\nthe server ended with status 2 before it was ready; its message is above\n"


def test_a_failed_answer_fails_the_quickstart(environment: ModuleType, fake_venv: Path) -> None:
    server = SERVER.replace("{python}", sys.executable).replace('["The capital of France", " is Paris."]', "[]")
    write_command(fake_venv / "bin" / "mstar", server)
    done = quickstart(environment, fake_venv)
    assert done.returncode == 1
    assert "The model gave no text." in done.stderr
    assert "clean stop" in done.stdout


def test_a_python_without_venv_is_explained(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python3"
    write_command(python, '#!/bin/sh\nmkdir -p "$3/bin"\necho ensurepip is not available\nexit 1\n')
    monkeypatch.setattr(environment.sys, "executable", str(python))
    monkeypatch.setenv("MSTAR_VENV", str(tmp_path / "venv"))
    with pytest.raises(environment.CannotSetUp, match=r"apt-get install python3-venv.*\nensurepip is not available"):
        environment.environment([])
    assert not (tmp_path / "venv").exists()


def test_a_failed_install_is_not_taken_for_done(
    environment: ModuleType, fake_venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_command(fake_venv / "bin" / "python", "#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("MSTAR_VENV", str(fake_venv))
    with pytest.raises(environment.CannotSetUp, match="pip could not install"):
        environment.environment([])
    assert not list(fake_venv.glob("*.stamp"))


def test_an_old_python_looks_for_a_newer_one(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """python3.13 stands for a version manager's command without that version behind it."""
    write_command(tmp_path / "python3.13", "#!/bin/sh\nexit 127\n")
    write_command(tmp_path / "python3.12", "#!/bin/sh\nexit 0\n")
    replaced: list[str] = []
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment.sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(environment.os, "execv", lambda path, words: replaced.append(path))
    with pytest.raises(environment.CannotSetUp):  # a real execv does not come back
        environment.use_supported_python()
    assert replaced[0] == str(tmp_path / "python3.12")


def test_only_old_pythons_is_one_sentence(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment.sys, "version_info", (3, 9, 2))
    with pytest.raises(environment.CannotSetUp, match=r"needs Python 3.11 or later; this is 3.9"):
        environment.use_supported_python()


def test_ci_runs_the_command_of_the_readme() -> None:
    command = "python3 scripts/test.py"
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"exec {command}" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)

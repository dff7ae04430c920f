"""Generated packages: as tidy as ours, their own tests pass, they are served; and the commands that make them."""

from __future__ import annotations

import ast
import errno
import io
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import wave
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import httpx
import pytest

from mstar.cli import plugin as command
from mstar.cli.app import run
from mstar.scaffold.names import Names
from mstar.scaffold.patterns import PATTERNS
from mstar.scaffold.write import write_package
from mstar.spec.errors import SetupError

ROOT = Path(__file__).parents[3]
NAMES = Names("mstar-newborn", "mstar_newborn", "newborn", "newborn", "Newborn")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A package of every pattern."""
    root = tmp_path_factory.mktemp("packages")
    for pattern in PATTERNS:
        write_package(root / pattern / NAMES.distribution, NAMES, pattern)
    return {pattern: root / pattern / NAMES.distribution for pattern in PATTERNS}


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As :func:`packages`, each with names of its own, so that one process can have all of them."""
    root = tmp_path_factory.mktemp("side_by_side")
    for pattern in PATTERNS:
        names = Names(f"mstar-{pattern}", _module(pattern), pattern, pattern, "New")
        write_package(root / pattern, names, pattern)
    return {pattern: root / pattern for pattern in PATTERNS}


def _module(pattern: str) -> str:
    return "mstar_" + pattern.replace("-", "_")


def environment(package: Path | None = None, **more: str) -> dict[str, str]:
    path = [*([str(package / "src")] if package else []), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **more}


def call(*words: str, cwd: Path, **more: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=cwd, env=environment(**more), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


every_pattern = pytest.mark.parametrize("pattern", PATTERNS)


@every_pattern
def test_its_own_tests_pass(side_by_side: dict[str, Path], pattern: str) -> None:
    """Parity with its reference, HTTP, conformance: all that an author sees on the first day.

    In this process, which has torch and M*'s kernels loaded.
    """
    folder = side_by_side[pattern]
    own = {name: module for name, module in sys.modules.items() if name.startswith("tests.")}
    for name in own:  # the package has a `tests.conftest` as well
        del sys.modules[name]
    with chdir(folder):
        status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-W", "error"])
    for name, module in tuple(sys.modules.items()):  # the next package has a `reference` and a `conftest` too
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
            del sys.modules[name]
    sys.modules.update(own)
    assert status is pytest.ExitCode.OK


def test_an_author_can_run_them(packages: dict[str, Path]) -> None:
    """By themselves, without what this process has loaded."""
    call("pytest", "-q", "-p", "no:cacheprovider", "-k", "not Family", cwd=packages["other"])


@every_pattern
def test_it_is_formatted_and_linted(packages: dict[str, Path], pattern: str) -> None:
    call("ruff", "check", "--no-cache", ".", cwd=packages[pattern])
    call("ruff", "format", "--no-cache", "--check", ".", cwd=packages[pattern])


@every_pattern
def test_it_has_the_standard_files_and_no_template_left(packages: dict[str, Path], pattern: str) -> None:
    folder = packages[pattern]
    source = folder / "src" / "mstar_newborn"
    names = {"__init__", "plugin", "spec", "processor", "model", "nodes", "weights", "tiny"}
    assert {path.stem for path in source.glob("*.py")} == names
    for name in ("LICENSE", "README.md", "pyproject.toml", ".gitignore", "tests/test_parity.py", "tests/test_http.py"):
        assert (folder / name).is_file(), name
    assert (source / "deployments" / "newborn.yaml").is_file()
    assert (source / "py.typed").is_file()
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            assert "$" not in path.read_text().replace("$(", ""), path
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["mstar.plugins"] == {"newborn": "mstar_newborn.plugin"}
    assert project["dependencies"] == ["mstar-core>=0.1,<0.2"]


@every_pattern
def test_every_function_and_class_is_used_or_offered(packages: dict[str, Path], pattern: str) -> None:
    """A newcomer must not wonder what a leftover is for."""
    source = packages[pattern] / "src" / "mstar_newborn"
    text = "".join(path.read_text() for path in sorted(source.glob("*.py")))
    entries = {"forward", "velocity", "update", "prime", "feed", "write", "mstar_models"}
    for node in ast.walk(ast.parse(text.replace("from __future__ import annotations", ""))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("__"):
            inherited = {"prepare", "prompt_ids", "renderer", "facts", "graph", "resources", "weights"}
            inherited |= {"build", "build_encoder", "decoder_config"}
            assert node.name in entries | inherited or text.count(node.name) > 1, node.name


def test_types(side_by_side: dict[str, Path], tmp_path: Path) -> None:
    """mypy as strict as for our own code, once over all of them. It goes on from what it has found out about that."""
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", tmp_path / "cache")
    sources = [folder / "src" for folder in side_by_side.values()]
    path = os.pathsep.join(map(str, sources))
    packages = [str(source / _module(pattern)) for pattern, source in zip(side_by_side, sources, strict=True)]
    call("mypy", "--cache-dir", str(tmp_path / "cache"), *packages, cwd=ROOT, MYPYPATH=path)


# --- served ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def serve(packages: dict[str, Path], port: int, tmp_path: Path) -> Iterator[Callable[[str], httpx.Client]]:
    """`mstar serve` on tiny weights, as the README has it; gives a client once it is ready."""
    running: list[subprocess.Popen[bytes]] = []
    clients: list[httpx.Client] = []

    def start(pattern: str) -> httpx.Client:
        env = environment(packages[pattern], MSTAR_EXTRA_PLUGINS="mstar_newborn.plugin")
        subprocess.run([sys.executable, "-m", "mstar_newborn.tiny", str(tmp_path / "w")], env=env, check=True)
        words = ["mstar", "serve", "newborn", "--weights", str(tmp_path / "w"), "--port", str(port)]
        flags = ["--executor", "inline", "--device", "cpu"]
        running.append(subprocess.Popen([sys.executable, "-m", *words, *flags], env=env, stderr=subprocess.DEVNULL))
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        clients.append(client)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and running[0].poll() is None:
            try:
                if client.get("/health/ready").status_code == 200:
                    return client
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready; exit status {running[0].poll()}")

    yield start
    for client in clients:
        client.close()
    for process in running:
        process.terminate()
        process.wait(30)


def _wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(8000)
        writer.writeframes(random.Random(1).randbytes(8000))
    return file.getvalue()


FIRST: dict[str, dict[str, Any]] = {
    "other": {"json": {"model": "newborn", "text": "a cat"}},
    "transducer": {"data": {"model": "newborn"}, "files": {"files": ("speech.wav", _wav())}},
    "encoder-lm": {"json": {"model": "newborn", "text": "a cat", "model_kwargs": {"max_tokens": 3}}},
}


@pytest.mark.parametrize("pattern", FIRST)
def test_it_is_served_by_the_command(serve: Callable[[str], httpx.Client], pattern: str) -> None:
    """A few patterns by the command line; each has an HTTP round trip of its own among its tests."""
    answer = serve(pattern).post("/generate", **FIRST[pattern])
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"]


def test_the_readme_says_how_to_ask(packages: dict[str, Path]) -> None:
    asked = {pattern: (folder / "README.md").read_text() for pattern, folder in packages.items()}
    assert "curl localhost:8000/generate -F model=newborn -F files=@speech.wav\n" in asked["transducer"]
    assert '-d \'{"model": "newborn", "text": "Hello"}\'\n' in asked["other"]


# --- the commands ----------------------------------------------------------------------------------------------------

ENVIRON = {"MSTAR_PLUGINS": ""}


def test_new_writes_a_package_and_says_what_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plugin", "new", "mstar-newborn", "--pattern", "denoise", "--key", "painter", "--dir", str(tmp_path))
    assert run(words, ENVIRON) == 0
    out = capsys.readouterr().out
    assert "mstar serve painter --weights tiny-weights" in out
    spec = tmp_path / "mstar-newborn" / "src" / "mstar_newborn" / "spec.py"
    assert 'key="painter"' in spec.read_text()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mstar-newborn" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert run(("plugin", "new", "mstar-newborn", "--yes", "--dir", str(tmp_path)), ENVIRON) == 2
    assert "exists already; nothing is overwritten" in capsys.readouterr().err
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("place", "reason"), [("file", "Not a directory"), ("file/below", "Not a directory"), ("x" * 300, "name too long")]
)
def test_a_place_where_no_folder_can_be_made(
    place: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / place
    assert run(("plugin", "new", "mstar-newborn", "--yes", "--dir", str(folder)), ENVIRON) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{folder / 'mstar-newborn'} cannot be written: ")
    assert reason in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, *args: Any, **more: Any) -> None:  # root may write anywhere
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert run(("plugin", "new", "mstar-newborn", "--yes", "--dir", str(tmp_path)), ENVIRON) == 2
    assert "mstar-newborn cannot be written: Permission denied; choose another --dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("new",), "the following arguments are required: NAME"),
        (("nwe", "x"), "did you mean 'new'"),
        (("new", "mstar-newborn", "--pattern", "denoize"), "did you mean 'denoise'"),
        (("new", "mstar-newborn", "--patern", "other"), "did you mean '--pattern'"),
        (("new", "mstar-newborn"), "which pattern? Name it with --pattern: causal-lm"),
        (("test", "nothing-here"), "there is no folder and no plugin 'nothing-here'"),
        (("test", "core", "--key", "x"), "--key is for `mstar plugin new`"),
    ],
)
def test_a_fault_is_one_sentence(
    words: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert run(("plugin", *words), ENVIRON) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("answers", "pattern"), [([""], "causal-lm"), (["7"], "other"), (["9", "denoize", " denoise "], "denoise")]
)
def test_the_pattern_is_asked_for_on_a_terminal(
    answers: list[str], pattern: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: Iterator[str] = iter(answers)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(asked))
    assert command._ask() == pattern
    out = capsys.readouterr().out
    assert all(facts.help in out for facts in PATTERNS.values())
    assert ("did you mean 'denoise'" in out) == ("denoize" in answers)


@pytest.fixture
def pytests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records how pytest is called, and lets it pass."""
    calls: list[dict[str, Any]] = []

    def record(words: list[str], cwd: Path, env: dict[str, str]) -> int:
        calls.append({"words": words[1:], "cwd": cwd, "env": env})
        return 0

    monkeypatch.setattr(subprocess, "call", record)
    return calls


def test_testing_a_folder_needs_no_installation(packages: dict[str, Path], pytests: list[dict[str, Any]]) -> None:
    folder = packages["other"]
    assert run(("plugin", "test", str(folder)), ENVIRON) == 0
    (own,) = pytests
    assert (own["words"], own["cwd"]) == (["-m", "pytest"], folder)
    assert own["env"]["MSTAR_EXTRA_PLUGINS"].split(",")[-1] == "mstar_newborn.plugin"
    assert own["env"]["PYTHONPATH"].split(os.pathsep)[0] == str(folder / "src")


def test_a_package_without_conformance_tests_gets_the_suite_too(tmp_path: Path, pytests: list[dict[str, Any]]) -> None:
    (tmp_path / "pyproject.toml").write_text('[project.entry-points."mstar.plugins"]\nx = "x.plugin"\n')
    assert run(("plugin", "test", str(tmp_path)), ENVIRON) == 0
    assert [c["words"] for c in pytests] == [["-m", "pytest", "--mstar-plugin", "x.plugin"]]


def test_testing_an_installed_plugin_runs_the_suite(pytests: list[dict[str, Any]]) -> None:
    assert run(("plugin", "test", "mstar.testing.miniatures"), {**ENVIRON, "MSTAR_EXTRA_PLUGINS": MINIATURES}) == 0
    assert [c["words"] for c in pytests] == [["-m", "pytest", "--mstar-plugin", MINIATURES]]


MINIATURES = "mstar.testing.miniatures"


def test_a_folder_that_is_no_plugin_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert run(("plugin", "test", str(tmp_path)), ENVIRON) == 2
    assert "has no entry point in group mstar.plugins" in capsys.readouterr().err


def test_an_unknown_pattern_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="did you mean 'other'"):
        write_package(tmp_path / "x", NAMES, "othr")

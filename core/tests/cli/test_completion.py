"""``mstar completion``: scripts that the shells accept, and the words that they ask for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["se"], ["serve"]),
        (["gr"], ["graph", "greet"]),
        (["serve", "toy-c"], ["toy-chat", "toy-closed"]),
        (["serve", "--po"], ["--port"]),
        (["serve", "toy-chat", "--config"], ["--config"]),
        (["download", "toy-chat", "toy"], []),
        (["serve", "toy-chat", "toy-ch"], ["toy-chat"]),
        (["serve", "--on-demand", "toy-ch"], ["toy-chat"]),
        (["serve", "--port", "80", "toy-c"], ["toy-chat", "toy-closed"]),
        (["serve", "--accept-licence", "toy-c"], ["toy-chat", "toy-closed"]),
        (["license", "show", "toy-ch"], ["toy-chat"]),
        (["serve", "--device", ""], ["cpu", "cuda"]),
        (["serve", "--device", "=", "cp"], ["cpu"]),
        (["serve", "--device", "="], ["cpu", "cuda"]),
        (["serve", "--device=cp"], ["--device=cpu"]),
        (["serve", "--device", "=", "cpu", "--dev"], []),
        (["serve", "--dtype", "b"], ["bfloat16"]),
        (["serve", "--executor", ""], ["inline", "processes", "ray"]),
        (["run", "toy-chat", "--set", "top_"], ["top_p=", "top_k="]),
        (["run", "toy-chat", "--set", "top_p", "=", "1", "--set", "top_k"], ["top_k="]),
        (["run", "toy-chat", "--set", "top_p", "=", "1", "--se"], ["--set"]),
        (["run", "--set", "top_"], []),
        (["run", "toy-chat", "--want", ""], ["text"]),
        (["plugin", "new", "--pattern", "lm"], ["lm-codec"]),
        (["serve", "toy-chat", "--config", ""], []),
        (["serve", "--weights", ""], []),
        (["run", "toy-chat", "--file", ""], []),
        (["license", "sh"], ["show"]),
        (["completion", ""], ["--help", "bash", "zsh", "fish"]),
        (["srve", ""], []),
    ],
)
def test_words(mstar: Run, typed: list[str], words: list[str]) -> None:
    status, out, _ = mstar("completion", "words", "--", *typed)
    assert (status, out.split()) == (0, words)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_parses(mstar: Run, shell: str) -> None:
    status, script, _ = mstar("completion", shell)
    assert status == 0
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes(mstar: Run) -> None:
    script = mstar("completion", "bash")[1]
    program = (
        f'mstar() {{ "{sys.executable}" -m mstar "$@"; }}\n{script}'
        "COMP_WORDS=(mstar serve --po); COMP_CWORD=2; _mstar mstar --po serve; echo ${COMPREPLY[@]}\n"
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "--port\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_values_knobs_and_files(mstar: Run, tmp_path: Path) -> None:
    """Through readline, where a Tab is what a person types."""
    (tmp_path / "deploy.yaml").touch()
    program = (
        f'mstar() {{ [ "$1" = completion ] && "{sys.executable}" -m mstar "$@" || printf "<%s>" "$@"; }}\n'
        f"{mstar('completion', 'bash')[1]}"
        "mstar serve --device=cp\t\n"
        "mstar run mini_chat --set stop_\t3\n"
        f"mstar serve --config {tmp_path}/dep\t\n"
    )
    plugins = {"MSTAR_PLUGINS": "", "MSTAR_EXTRA_PLUGINS": "mstar.testing.miniatures"}
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-i"],
        input=program,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **plugins, "INPUTRC": os.devnull, "HISTFILE": os.devnull},
    )
    assert done.stdout == (
        f"<serve><--device=cpu><run><mini_chat><--set><stop_token=3><serve><--config><{tmp_path / 'deploy.yaml'}>"
    ), done.stderr


def test_an_unknown_shell(mstar: Run) -> None:
    status, _, err = mstar("completion", "bsh")
    assert (status, "did you mean 'bash'" in err) == (2, True)


def test_the_page_of_the_documentation_is_current() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "cli_docs.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

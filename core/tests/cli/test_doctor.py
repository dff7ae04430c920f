"""``mstar doctor``: each finding follows from what is there."""

from __future__ import annotations

import importlib.util
import io
import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mstar.cli import doctor

Run = Callable[..., tuple[int, str, str]]


def findings(mstar: Run, **more: str) -> dict[str, dict[str, Any]]:
    status, out, _ = mstar("doctor", "--json", **more)
    answer = json.loads(out)
    assert status == (0 if answer["ok"] else 1)
    return {finding["subject"]: finding for finding in answer["findings"]}


def test_what_works(mstar: Run) -> None:
    status, out, _ = mstar("doctor")
    assert status == 0
    assert "attention torch_sdpa" in out
    found = findings(mstar)
    assert found["PyTorch"]["state"] == found["cache"]["state"] == "ok"
    assert "toy-chat, toy-closed" in found["plugin cli_toys"]["detail"]


def test_each_finding_is_told_before_the_next_is_sought(mstar: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    show = doctor._show

    def shown(finding: doctor.Finding, width: int) -> None:
        told.append(finding.subject)
        show(finding, width)

    def port(context: Any) -> Iterator[doctor.Finding]:
        assert told[-1] == "memory"
        yield doctor.Finding("first", "ok", "known at once")
        assert told[-1] == "first"
        yield doctor.Finding("last", "missing", "known late", "type this")

    monkeypatch.setattr(doctor, "_show", shown)
    monkeypatch.setattr(doctor, "_port", port)
    _, out, _ = mstar("doctor")
    assert out.splitlines()[-1].split() == ["→", "type", "this"]
    assert told[-2:] == ["first", "last"]


def test_lines_have_the_order_of_the_json(mstar: Run) -> None:
    lines = [line for line in mstar("doctor")[1].splitlines() if line[:7].strip()]
    subjects = list(findings(mstar))
    assert [line[9:].partition("  ")[0] for line in lines] == subjects


def test_a_terminal_sees_what_is_looked_at(mstar: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On standard error, gone at the end; the answer is what it is without one."""
    plain = mstar("doctor")[1]

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setenv("TERM", "xterm")
        out = mstar("doctor")[1]
    assert "looking at the port" in terminal.getvalue()
    assert [line[:30] for line in out.splitlines()] == [line[:30] for line in plain.splitlines()]


def test_what_is_missing_comes_with_what_to_type(mstar: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "soundfile" else find(name))
    found = findings(mstar, extra="cli_toys_lacks", code="import a_library_that_is_missing\n")
    assert found["audio files"]["advice"] == "pip install soundfile"
    assert "a_library_that_is_missing" in found["plugin cli_toys_lacks"]["advice"]


def test_a_backend_that_cannot_be_imported_says_why(mstar: Run) -> None:
    code = (
        "import mstar\n@mstar.hookimpl\ndef mstar_attention_backends():\n"
        "    return {'turbo': 'a_gpu_library_that_is_missing:Turbo'}\n"
    )
    found = findings(mstar, extra="cli_toys_turbo", code=code)["attention turbo"]
    assert found["state"] == "missing"
    assert "No module named 'a_gpu_library_that_is_missing'" in found["detail"]


def test_what_a_backend_prints_is_no_answer(mstar: Run) -> None:
    code = (
        "import mstar\nfrom mstar.resources.attention.torch_sdpa import TorchAttention\n"
        "class Loud(TorchAttention):\n"
        "    def supports(self, need):\n        print('asked')\n        return 'too loud'\n"
        "@mstar.hookimpl\ndef mstar_attention_backends():\n    return {'loud': __name__ + ':Loud'}\n"
    )
    found = findings(mstar, extra="cli_toys_loud", code=code)["attention loud"]
    assert (found["state"], found["detail"]) == ("missing", "too loud")


def test_a_backend_for_deterministic_engines_alone_is_not_missing(mstar: Run) -> None:
    code = (
        "import mstar\nfrom mstar.resources.attention.torch_sdpa import TorchAttention\n"
        "class Exact(TorchAttention):\n"
        "    def supports(self, need):\n        return None if need.deterministic else 'others are faster'\n"
        "@mstar.hookimpl\ndef mstar_attention_backends():\n    return {'exact': __name__ + ':Exact'}\n"
    )
    found = findings(mstar, extra="cli_toys_exact", code=code)["attention exact"]
    assert found["state"] == "ok"
    assert found["detail"].endswith(", with engine.deterministic")


NEEDS = """
import mstar
from mstar.spec.finding import Finding

@mstar.hookimpl
def mstar_doctor():
    print("looking")
    return [Finding("owls", "ok", "two"), Finding("mice", "missing", "none: owls starve", "apt install mice")]
"""


def test_hook_mstar_doctor(mstar: Run) -> None:
    found = findings(mstar, extra="cli_toys_needs", code=NEEDS)
    assert (found["owls"]["state"], found["owls"]["detail"]) == ("ok", "two")
    assert (found["mice"]["state"], found["mice"]["advice"]) == ("missing", "apt install mice")
    bad = NEEDS.replace('"missing"', '"bad"')
    assert findings(mstar, extra="cli_toys_bad", code=bad)["mice"]["state"] == "bad", "and the command says so"


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("{}['x']", "mstar_doctor failed: KeyError: 'x'"),
        ("[3]", "mstar_doctor must return a list of Finding, not [3]"),
        ("[Finding('owls', 'fine', '')]", "mstar_doctor must return a list of Finding"),
    ],
)
def test_a_plugin_that_cannot_say_what_it_needs(mstar: Run, result: str, said: str) -> None:
    code = NEEDS.partition("    print")[0] + f"    return {result}\n"
    found = findings(mstar, extra="cli_toys_needs_not", code=code)
    assert found["plugin cli_toys_needs_not"]["state"] == "missing"
    assert said in found["plugin cli_toys_needs_not"]["detail"]
    assert found["memory"]["state"] == "ok", "the rest is looked at all the same"


def test_a_port_in_use(mstar: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(doctor, "_PORT", other.getsockname()[1])
        found = findings(mstar)[f"port {doctor._PORT}"]
    assert found["state"] == "missing"
    assert found["advice"] == f"mstar serve KEY --port {doctor._PORT + 1}"


def test_a_small_disk(mstar: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_000_000))
    assert "only 1.0 MB free" in findings(mstar)["cache"]["detail"]


def test_a_cache_that_cannot_be_written_is_a_no(mstar: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda folder, mode: False)
    assert findings(mstar)["cache"]["state"] == "bad"


def test_the_hub_is_asked_only_online(mstar: Run, tmp_path: Path) -> None:
    assert "Hub" not in findings(mstar)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, but it does not listen: connections are refused
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        out = mstar("doctor", "--online", "--json", HF_ENDPOINT=address)[1]
    (hub,) = [f for f in json.loads(out)["findings"] if f["subject"] == "Hub"]
    assert (hub["state"], address in hub["detail"]) == ("missing", True)

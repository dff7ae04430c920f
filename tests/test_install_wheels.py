"""Installed from wheels into fresh environments, as a user would: what works, with what, and what a mistake costs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import mstar

from .installing import OURS, Environment, build_wheel, write_wheel
from .tiny_models import publish

pytestmark = pytest.mark.install

FAMILY = """
import mstar
from mstar.spec.knobs import Knobs
from mstar.spec.model import Licence, ModelSpec

@mstar.hookimpl
def mstar_models():
    return [ModelSpec(key="{key}", family="{key}", summary="A {key}.", weights=(), licence=Licence("Apache-2.0"),
        model="{module}:Model", processor="{module}:Processor", knobs=Knobs)]
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of all our distributions."""
    folder = tmp_path_factory.mktemp("wheels")
    for name in OURS:
        build_wheel(name, folder)
    return folder


@pytest.fixture(scope="module")
def core(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with ``pip install mstar-core`` alone."""
    made = Environment(tmp_path_factory.mktemp("core"), wheels, "mstar-core")
    made.install("mstar-core")
    return made


def family(wheels: Path, name: str, version: str = "1.0", **more: Any) -> str:
    """Write the wheel of a family that has one model, called *name*."""
    module = f"mstar_{name}"
    code = FAMILY.format(key=name, module=module)
    write_wheel(wheels, f"mstar-{name}", version, {f"{module}.py": code}, plugin=f"{name} = {module}", **more)
    return f"mstar-{name}=={version}"


def keys(environment: Environment) -> list[str]:
    done = environment.mstar("models", "--json")
    assert done.returncode == 0, done.stderr
    assert "is not used" not in done.stderr
    found = json.loads(done.stdout)
    models = found["models"] if isinstance(found, dict) else found
    return [model["key"] for model in models]


def test_the_core_brings_the_server_and_no_model(core: Environment) -> None:
    assert keys(core) == []
    assert not (core.libraries / "gguf").exists(), "a family's library, in the core's environment"
    done = core.mstar("serve", "smollm2")
    assert done.returncode == 2
    assert "pip install mstar-demo" in done.stderr
    assert core.mstar("serve", "--help").returncode == 0


def test_a_family_serves_with_its_own_dependencies_and_leaves_with_its_keys(wheels: Path, tmp_path: Path) -> None:
    """Core and one family from wheels answer over HTTP; uninstalled, its keys are gone and are missed by name."""
    environment = Environment(tmp_path, wheels, "mstar-core", "mstar-demo")
    environment.install("mstar-core", "mstar-demo")
    assert keys(environment) == ["smollm2"]
    publish("tiny-llama-tied", tmp_path / "weights")
    assert ask(environment, "smollm2", tmp_path / "weights") >= 1
    environment.uninstall("mstar-demo")
    assert keys(environment) == []
    done = environment.mstar("serve", "smollm2")
    assert done.returncode == 2
    assert "it belongs to plugin 'demo', which is not installed any more" in done.stderr
    assert "`pip install mstar-demo`" in done.stderr


def ask(environment: Environment, key: str, weights: Path) -> int:
    """Serve *key* as a person would and ask it something. Returns how many tokens came."""
    log = environment.folder / "log"
    words = ["serve", key, "--weights", str(weights), "--device", "cpu", "--port", "0"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(environment.bin / "mstar"), *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment.environ(),
            cwd=environment.folder,
        )
    try:
        url = _when_ready(process, log)
        body = {"model": key, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        tokens: int = answer.json()["usage"]["completion_tokens"]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    return tokens


def _when_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        found = re.search(r"http://[\d.]+:\d+", log.read_text())
        if found:
            try:
                if httpx.get(f"{found[0]}/health/ready", timeout=5).status_code == 200:
                    return found[0]
            except httpx.TransportError:
                pass
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def test_families_with_conflicting_optional_dependencies_coexist(core: Environment, wheels: Path) -> None:
    for version in ("1.0", "2.0"):
        write_wheel(wheels, "shared-codec", version, {"shared_codec.py": f"VERSION = '{version}'\n"})
    family(wheels, "left", extras={"fast": "shared-codec<2"}, requires=["mstar-core>=0.1"])
    right = family(wheels, "right", extras={"fast": "shared-codec>=2"}, requires=["mstar-core>=0.1"])
    try:
        core.install("mstar-left[fast]", right)
        assert core.version("shared-codec") == "1.0"
        assert keys(core) == ["left", "right"]
        core.install("mstar-right[fast]")  # takes the library that the other family's extra would not want
        assert core.version("shared-codec") == "2.0"
        assert keys(core) == ["left", "right"]
    finally:
        core.uninstall("mstar-left", "mstar-right", "shared-codec")


def test_a_plugin_for_a_future_core_is_refused_and_the_others_serve(core: Environment, wheels: Path) -> None:
    future = family(wheels, "future", version="3.0", requires=["mstar-core>=99"])
    present = family(wheels, "present", requires=["mstar-core>=0.1"])
    with pytest.raises(AssertionError, match="mstar-core>=99"):
        core.install(future)  # pip itself would not
    try:
        core.install(present, future, deps=False)
        done = core.mstar("models")
        assert done.returncode == 0
        assert "present" in done.stdout
        assert f"it requires mstar-core >=99, and this is mstar-core {mstar.__version__}" in done.stderr
        done = core.mstar("serve", "future")
        assert done.returncode == 1
        assert (
            "model 'future' is not available: plugin 'future' (3.0) is not used: it requires mstar-core >=99"
            in done.stderr
        )
        assert "`pip install --upgrade mstar-core mstar-future`" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        core.uninstall("mstar-future", "mstar-present")

"""What a deployment asks for is checked against the model and the machine before anything is served (promise P3)."""

from __future__ import annotations

from typing import Any

import pytest

from mstar.spec.errors import SetupError
from mstar.testing.drive import Driver
from mstar.testing.miniatures import miniature
from mstar.worker import build

MIB = 2**20


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"resources": {"kv": {"tokens": 10**12}}}, r"tokens=1000000000000 need .* TB .*memory budget of .* GB"),
        ({"resources": {"kv": {"tokens": "many"}}}, r"resources\.kv\.tokens: .*integer.*'many'"),
        ({"resources": {"kv": {"token": 5}}}, r"resources\.kv\.token: unknown key; did you mean 'tokens'"),
        ({"resources": {"kw": {"tokens": 5}}}, r"resources\.kw: unknown resource; known: kv"),
        ({"placement": {"llm": [0]}}, r"placement\.llm: unknown node"),
        ({"device": "tpu9"}, r"device 'tpu9'"),
        ({"dtype": "float33"}, r"dtype 'float33' is not supported; did you mean 'float32'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        Driver(miniature("mini_chat"), **overrides)


@pytest.mark.parametrize("key", ["mini_chat", "mini_seq2seq", "mini_rollout", "mini_world"])
def test_a_machine_without_memory_is_told_the_numbers(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "free_memory", lambda device: 16)
    with pytest.raises(SetupError, match=r"memory budget of \d+ B"):
        Driver(miniature(key))


def test_a_pool_without_a_size_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "free_memory", lambda device: 4 * MIB)
    resource = Driver(miniature("mini_chat"), resources={"kv": {"tokens": None}}, max_concurrent_requests=4096)
    kv = resource.worker.resources["kv"]
    held = kv.memory.data.nbytes  # type: ignore[attr-defined]
    assert 0.9 * MIB < held <= MIB

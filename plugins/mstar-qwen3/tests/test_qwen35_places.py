"""Prompts on another rank than decoding: what one rank says, and nothing left anywhere."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from test_seeing_parity import CHATS, ask

import mstar
from mstar.cluster.base import WorkerConfig
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.runtime.deployment_files import packaged_deployment
from mstar.runtime.service import Service
from mstar.settings import Settings
from mstar.spec.deployment import merge_deployment
from mstar.spec.errors import DeploymentError
from mstar.spec.tasks import ChatTask
from mstar.testing.conformance.subject import open_registry
from mstar.testing.drive import Driver
from mstar.testing.examples import Example
from mstar.testing.rank_drive import RankDriver
from mstar.worker import tensor_channel
from mstar_qwen3 import tiny, tiny_vision
from mstar_server.app import create_app

KEY = "qwen3_5_0.8b"
TEXTS = ("Hello there, how are you today?", "France", "The capital of France is Paris. " * 3, "France")
EXACT: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


@pytest.mark.parametrize("places", [{"prefill": 1, "decode": 0}, {"prefill": 0, "decode": 1}], ids=str)
def test_the_language_model_says_what_one_rank_says(folders: dict[str, Path], places: dict[str, Any]) -> None:
    registry, said = open_registry("mstar_qwen3.plugin"), []
    told = {**EXACT, "scheduler": {"max_step_tokens": 24}}
    alone = Driver(KEY, registry, folders["text"], **told)
    apart = RankDriver(KEY, registry, folders["text"], placement={"llm": places}, **told)
    for driver in (alone, apart):
        for number, text in enumerate(TEXTS):
            driver.submit(str(number), Example(text, knobs={"temperature": 0.0, "max_tokens": 12}))
        driver.run()
        said.append([list(driver.result(str(number))["text"]) for number in range(len(TEXTS))])
        driver.assert_empty()
    assert said[0] == said[1]
    assert len(set(said[0][0])) > 3
    assert apart.worker.status()["moves"]["done"] == len(TEXTS)


SEEING: list[dict[str, Any]] = [
    {"prefill": 1, "decode": 0},
    {"prefill": 0, "decode": 1},
    {"look": 1, "generate": 0},
]


@pytest.mark.parametrize("values", ["shm", "gloo"])
@pytest.mark.parametrize("places", SEEING, ids=str)
def test_a_model_that_sees_says_what_one_rank_says(
    folders: dict[str, Path], places: dict[str, Any], values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures that come again, prompts that begin alike, and steps that cut them."""
    monkeypatch.setattr(tensor_channel, "LARGE_BYTES", 1)
    registry, said = open_registry("mstar_qwen3.plugin"), []
    told = {**EXACT, "scheduler": {"max_step_tokens": 24}, "engine": {"values": values}}
    placement = {"encoder": places, "llm": places}
    alone = Driver(KEY, registry, folders["whole"], **told)
    apart = RankDriver(KEY, registry, folders["whole"], placement=placement, **told)
    chats = [CHATS["a picture"], CHATS["two pictures and a video"], CHATS["several turns"], CHATS["text"]]
    knobs = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    for driver in (alone, apart):
        for number, messages in enumerate([*chats, chats[0]]):
            task = ChatTask(messages=tuple(messages), knobs=driver.spec.knobs.model_validate(knobs))
            driver.worker.submit(driver.processor.prepare(task, str(number)).request)
        driver.run()
        said.append([list(driver.result(str(number))["text"]) for number in range(len(chats) + 1)])
        driver.assert_empty()
    assert said[0] == said[1]
    assert said[0][0] == said[0][-1]
    assert len({tuple(tokens) for tokens in said[0]}) == len(chats)
    assert apart.worker.status()["moves"]["done"] >= len(chats)


def test_who_sees_is_where_it_is_read(folders: dict[str, Path]) -> None:
    with pytest.raises(DeploymentError, match="the nodes that share resource 'media' must be placed alike"):
        RankDriver(KEY, open_registry("mstar_qwen3.plugin"), folders["whole"], placement={"encoder": 1})


def answers(folder: Path, **overrides: Any) -> tuple[list[str], dict[str, Any]]:
    """What the server says to each text, and the worker's status after it."""
    extra = () if importlib.metadata.entry_points(group="mstar.plugins", name="qwen3") else ("mstar_qwen3.plugin",)
    registry = Registry(load_plugins(Settings(extra_plugins=extra)))
    spec = registry.model(KEY)
    deployment = merge_deployment(KEY, packaged_deployment(spec), EXACT, overrides)
    config = WorkerConfig(key=KEY, weights=str(folder), deployment=deployment, extra_plugins=extra)
    service = Service(spec, config, registry)
    app = create_app({KEY: service}, registry)
    with TestClient(app) as client:
        portal: Any = client.portal
        portal.call(service.start)
        try:
            said = []
            for text in TEXTS:
                body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 12}
                answer = client.post("/v1/chat/completions", json={"model": KEY, **body})
                assert answer.status_code == 200, answer.text
                message = answer.json()["choices"][0]["message"]
                said.append(f"{message.get('reasoning_content')} {message['content']}")
            return said, portal.call(service.status)
        finally:
            portal.call(service.stop)
            portal.call(app.state.mstar.close)


def test_over_http_two_processes_answer_as_one(folders: dict[str, Path]) -> None:
    want, _ = answers(folders["text"], executor="inline")
    got, status = answers(folders["text"], placement={"llm": {"prefill": 1, "decode": 0}})
    assert got == want
    assert len(set(want)) > 2
    assert status["moves"]["done"] == len(TEXTS)
    assert status["ranks"][0]["steps"] >= len(TEXTS)


def test_a_divided_model_sees(folders: dict[str, Path]) -> None:
    """Tower and language model on two processes together: pictures, known ones and those of a known head, too."""
    extra = () if importlib.metadata.entry_points(group="mstar.plugins", name="qwen3") else ("mstar_qwen3.plugin",)
    settings = Settings(extra_plugins=extra)
    registry, said = Registry(load_plugins(settings)), []
    mesh = {"ranks": [0, 1], "tp": 2}
    divided = {"executor": "processes", "placement": {"encoder": mesh, "llm": mesh}}
    for changed in ({"executor": "inline"}, divided):
        told = {**EXACT, "resources": {"kv": {"tokens": 4096}}, **changed}
        with mstar.load(KEY, weights=str(folders["whole"]), settings=settings, registry=registry, **told) as model:
            said.append([ask(model, CHATS[name]).tokens for name in (*CHATS, "a picture")])
            steps = [rank["steps"] for rank in model.status()["ranks"]]
    assert said[0] == said[1]
    assert steps[0] > len(CHATS)


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny checkpoint with heads for four ranks, of which two share a head of keys and values."""
    monkeypatch.setattr(tiny, "KEY_HEADS", 4)
    monkeypatch.setattr(tiny, "VALUE_HEADS", 8)
    monkeypatch.setattr(tiny_vision, "HEADS", 4)
    tiny.write(tmp_path / "wide")
    return tmp_path / "wide"


def test_the_layout_of_four_ranks_says_and_sees_what_one_rank_does(wide: Path) -> None:
    extra = () if importlib.metadata.entry_points(group="mstar.plugins", name="qwen3") else ("mstar_qwen3.plugin",)
    settings = Settings(extra_plugins=extra)
    registry, said = Registry(load_plugins(settings)), []
    for placed in ({"executor": "inline"}, {"executor": "processes", "layout": "tp4"}):
        told = {**EXACT, "resources": {"kv": {"tokens": 4096}}, "engine": {"threads": 1}, **placed}
        with mstar.load("qwen3_8_27b", weights=str(wide), settings=settings, registry=registry, **told) as model:
            said.append([ask(model, CHATS[name]).tokens for name in ("text", "a picture")])
            ranks = model.status()["ranks"]
    assert said[0] == said[1]
    assert len({*said[0]}) == 2
    assert len(ranks) == 3
    assert all(rank["steps"] > 2 for rank in ranks)

"""Windows are heard on another rank than they are written down on: what one rank hears."""

from __future__ import annotations

import importlib.metadata
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hearing import clip
from starlette.testclient import TestClient
from test_whisper_ranks import CLIPS, draws, registry

from mstar.cluster.base import WorkerConfig
from mstar.runtime.deployment_files import packaged_deployment
from mstar.runtime.service import Service
from mstar.spec.deployment import merge_deployment
from mstar.testing.drive import Driver
from mstar.testing.rank_drive import RankDriver
from mstar_asr.whisper.tiny import write
from mstar_server.app import create_app

KEY = "whisper_base"
EXACT: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
SURE = {"temperature": "0", "temperature_increment": "0", "seed": "1", "vad_filter": "false"}
PLACES: dict[str, Any] = {"encoder": 1, "decoder": {"listen": 1, "write": 0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    write(folder)
    return folder


@pytest.mark.parametrize("placement", [PLACES, {"encoder": 0, "decoder": {"prefill": 1, "decode": 0}}], ids=str)
def test_apart_the_same_is_written_and_aligned(folder: Path, placement: dict[str, Any]) -> None:
    said = []
    for driver in (
        Driver(KEY, registry(), folder, **EXACT),
        RankDriver(KEY, registry(), folder, placement=placement, **EXACT),
    ):
        for name, example in draws().items():
            driver.submit_prepared(
                driver.prepare(name, example, ability="transcription", timestamps=("word",)), example
            )
        driver.run()
        said.append([dict(driver.result(name)) for name in draws()])
        driver.assert_empty()
    for one, other in zip(*said, strict=True):
        assert one.keys() == other.keys()
        for stream, want in one.items():
            np.testing.assert_allclose(other[stream], want, atol=1e-5, err_msg=stream)
    assert driver.worker.status()["moves"]["done"] == CLIPS


def transcripts(folder: Path, sound: bytes, **overrides: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    found = registry()
    spec = found.model(KEY)
    deployment = merge_deployment(KEY, packaged_deployment(spec), EXACT, overrides)
    extra = () if importlib.metadata.entry_points(group="mstar.plugins", name="asr") else ("mstar_asr.plugin",)
    service = Service(
        spec, WorkerConfig(key=KEY, weights=str(folder), deployment=deployment, extra_plugins=extra), found
    )
    app = create_app({KEY: service}, found)
    with TestClient(app) as client:
        portal: Any = client.portal
        portal.call(service.start)
        try:
            answer = client.post(
                "/v1/audio/transcriptions",
                data={"model": KEY, "response_format": "verbose_json", **SURE},
                files={"file": ("clip.wav", sound, "audio/wav")},
            )
            assert answer.status_code == 200, answer.text
            return answer.json(), portal.call(service.status)
        finally:
            portal.call(service.stop)
            portal.call(app.state.mstar.close)


def test_over_http_two_processes_hear_what_one_does(folder: Path) -> None:
    sound = io.BytesIO()
    with wave.open(sound, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        out.writeframes((clip(4.0) * 32767).astype(np.int16).tobytes())
    want, _ = transcripts(folder, sound.getvalue(), executor="inline")
    got, status = transcripts(folder, sound.getvalue(), placement=PLACES)
    assert got["text"] == want["text"]
    assert [piece["tokens"] for piece in got["segments"]] == [piece["tokens"] for piece in want["segments"]]
    assert status["moves"]["done"] >= 1

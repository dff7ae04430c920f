"""The codec and a mark in a worker: a ramp of pieces, requests of different lengths, recorded steps, clones."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mstar
from mstar.nn.config import read_config
from mstar.nn.model import BuildContext, Model, Outcome, Run
from mstar.nn.node import Node, Step
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.spec.graph import (
    CLIENT,
    Call,
    EndOf,
    Entry,
    Graph,
    Index,
    Loop,
    NodeSpec,
    Param,
    Partition,
    Port,
    Pull,
    Ramp,
    Seq,
    Stream,
    Times,
)
from mstar.spec.knobs import Knobs
from mstar.spec.model import Licence, ModelSpec
from mstar.spec.processor import Prepared, Processor
from mstar.spec.request import EngineRequest
from mstar.spec.resources import ResourceSpec
from mstar.spec.tasks import Task
from mstar.testing.drive import Driver
from mstar.testing.examples import Example
from mstar.weights.loader import load
from mstar_tts.codec_blocks import Carry
from mstar_tts.qwen3_tts.codec import Codec, codec_entries, codec_state, codec_weights
from mstar_tts.qwen3_tts.codec_config import FOLDER, CodecConfig
from mstar_tts.qwen3_tts.codec_tiny import write_codec
from mstar_tts.watermark.audioseal import Generator as AudioSeal
from mstar_tts.watermark.audioseal import audioseal_sizes, audioseal_weights
from mstar_tts.watermark.marking import marked
from mstar_tts.watermark.options import WatermarkOptions, message_bits

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "core/tests/engine"))
from audioseal_reference import reference_generator, saved
from recording import record_steps

RAMP = Ramp((1, 3, 8, 16, 25))
LENGTHS = {"a": 40, "b": 1, "c": 13, "d": 30}
HEARD = {"c": 21}
"""Of the requests that are clones: frames of their clips."""


def frames(key: float, first: int, count: int) -> Tensor:
    """Frames of the request with *key*, from the one numbered *first* on: ``[count, 16]``."""
    place = torch.arange(first, first + count)[:, None] * 7 + torch.arange(16) * 13
    return (place + int(key) * 29) ** 2 % 64


class Writer(Node):
    def forward(self, step: Step, index: Tensor, key: Tensor) -> dict[str, Tensor]:
        rows = zip(key.tolist(), index.tolist(), strict=True)
        return {"frame": torch.cat([frames(one, int(number), 1) for one, number in rows])}


@marked(lambda model: Ramp(tuple(size * model.codec.samples_per_frame for size in RAMP.sizes)))
class Reader(Model):
    """Reads frames aloud that follow from a number."""

    def __init__(self, context: BuildContext):
        super().__init__(context)
        assert context.weights is not None
        self.codec = CodecConfig.read(read_config(context.weights / FOLDER))

    def graph(self) -> Graph:
        index, key = Port("index", "int64", (), "stacked"), Port("key", "float32", (), "stacked")
        frame, sample = Port("frame", "int64", (16,), "stacked"), Port("sample", "float32", (), "stacked")
        write = Call("writer", inputs={"index": Index(), "key": Param("key")}, emit={"frame": "codes"})
        sound = Call("codec", inputs={"codes": Pull("codes")}, emit={"samples": "audio"})
        prime = Call("codec", "prime", {"frames": "reference"})
        return Graph(
            nodes=(
                NodeSpec("writer", (Entry(inputs=(index, key), outputs=(frame,)),)),
                NodeSpec("codec", codec_entries(self.codec, RAMP.sizes)),
            ),
            walks={
                "write": Loop(write, Times(Param("count"))),
                "read": Loop(sound, EndOf("codes")),
                "clone": Seq(prime, Loop(sound, EndOf("codes"))),
            },
            partitions=(Partition("lm", ("write",)), Partition("codec", ("read", "clone"))),
            streams=(
                Stream("codes", "lm", "codec", frame, chunk=RAMP),
                Stream("audio", "codec", CLIENT, sample, "audio", seconds_per_item=1 / 24_000),
            ),
            inputs=(Port("reference", "int64", ("R", 16), optional=True),),
        )

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        reading = "clone" if "reference" in request.inputs else "read"
        yield Run("write" if partition == "lm" else reading)

    def resources(self) -> Mapping[str, ResourceSpec]:
        return {"codec": codec_state(self.codec)}

    def build(self, node: str) -> Node:
        return Writer() if node == "writer" else Codec(self.codec)

    def weights(self, node: str) -> Any:
        with torch.device("meta"):
            return codec_weights(Codec(self.codec)) if node == "codec" else None

    def loaded(self, node: str, module: Node) -> None:
        if isinstance(module, Codec):
            module.settle()


class ReaderKnobs(Knobs):
    key: float = 0.0
    count: int = 1
    heard: int = 0


class ReaderProcessor(Processor):
    def prepare(self, task: Task, request_id: str) -> Prepared:
        knobs = task.knobs
        inputs = {"reference": frames(knobs.key, 0, knobs.heard).numpy()} if knobs.heard else {}
        params = {"key": knobs.key, "count": knobs.count}
        return Prepared(EngineRequest(id=request_id, inputs=inputs, params=params))

    def renderer(self, task: Task, prepared: Prepared) -> Any:
        raise NotImplementedError


@mstar.hookimpl
def mstar_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            key="reader", family="reader", summary="Reads.", weights=(), licence=Licence("Apache-2.0"),
            model=f"{__name__}:Reader", processor=f"{__name__}:ReaderProcessor", knobs=ReaderKnobs,
            outputs=("audio",), options=WatermarkOptions,
        )
    ]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reader")
    write_codec(place, torch.Generator().manual_seed(11))
    return place


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("audioseal") / "generator_streaming.pth"
    torch.save(saved(reference_generator(8)), place)
    return place


def whole(folder: Path, name: str) -> np.ndarray:
    """The sound of a request as one piece, decoded with its clip in front."""
    config = CodecConfig.read(read_config(folder / FOLDER))
    with torch.device("meta"):
        codec = Codec(config)
    load(codec, codec_weights(codec), folder, torch.device("cpu"), torch.float32)
    codec.settle()
    key, heard = ord(name), HEARD.get(name, 0)
    said = torch.cat([frames(key, 0, heard), frames(key, 0, LENGTHS[name])])[None]
    sound, _ = codec.decoder(said, codec.decoder.begin(1, torch.device("cpu"), torch.float32))
    return sound[0, heard * config.samples_per_frame :].numpy()  # type: ignore[no-any-return]


def mark(file: Path, sound: np.ndarray) -> np.ndarray:
    with torch.device("meta"):
        module = AudioSeal(message_bits(0), audioseal_sizes(file))
    load(module, audioseal_weights(module, file), Path("/"), torch.device("cpu"), torch.float32)
    module.settle()
    return module(torch.from_numpy(sound)[None], Carry())[0].numpy()  # type: ignore[no-any-return]


def driven(folder: Path, **watermark: Any) -> Driver:
    registry = Registry(load_plugins(Settings(extra_plugins=(__name__,))))
    options = {"audio_watermark": watermark} if watermark else {}
    fields: dict[str, Any] = {"engine": {"threads": 1, "runner": "eager"}, "max_concurrent_requests": 4}
    return Driver("reader", registry, folder, device="cpu", dtype="float32", model_kwargs=options, **fields)


def ask(driver: Driver) -> None:
    for name, count in LENGTHS.items():
        driver.submit(name, Example("", {"key": float(ord(name)), "count": count, "heard": HEARD.get(name, 0)}))
    driver.run()


def check(driver: Driver, wanted: Mapping[str, np.ndarray]) -> None:
    for name, sound in wanted.items():
        np.testing.assert_allclose(driver.result(name)["audio"], sound, atol=2e-5)
        assert len(driver.emitted[name][0].data) == 1920  # the first frame is heard at once
    driver.assert_empty()


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, np.ndarray]:
    return {name: whole(folder, name) for name in LENGTHS}


def test_a_ramp_of_pieces_is_the_whole(folder: Path, wanted: dict[str, np.ndarray]) -> None:
    driver = driven(folder)
    ask(driver)
    check(driver, wanted)
    assert [len(event.data) // 1920 for event in driver.emitted["a"]] == [1, 3, 8, 16, 12]


def test_recorded_steps_change_nothing(
    folder: Path, file: Path, wanted: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driven(folder, enabled=True, alpha=0.2, generator=str(file))
    runner, recorder = record_steps(monkeypatch, driver, rows=4)
    ask(driver)
    check(driver, {name: np.clip(sound + 0.2 * mark(file, sound), -1, 1) for name, sound in wanted.items()})
    assert recorder.replays > 10
    assert not [place for place in runner.faults if place[:2] in (("codec", "forward"), ("watermark", "forward"))]
    shapes = {key[:2] for key in runner._lanes}
    assert {("codec", "forward"), ("watermark", "forward")} <= shapes


def test_a_request_that_is_cancelled_frees_its_state(folder: Path, file: Path) -> None:
    driver = driven(folder, enabled=True, generator=str(file))
    driver.submit("a", Example("", {"count": 500}))
    driver.run(until=lambda: "a" in driver.emitted)
    driver.cancel("a")
    driver.run()
    driver.assert_empty()

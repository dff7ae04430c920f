"""Marks on what a model says: all of it, however it is cut, and nothing but the mark is new."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mstar
from mstar.nn.model import Model
from mstar.nn.node import Node, Step
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.spec.errors import SetupError
from mstar.spec.graph import (
    CLIENT,
    Call,
    Entry,
    Graph,
    Index,
    Loop,
    NodeSpec,
    Param,
    Partition,
    Port,
    Ramp,
    Stream,
    Times,
)
from mstar.spec.knobs import Knobs
from mstar.spec.model import Licence, ModelSpec
from mstar.spec.processor import ArrayDelta, Prepared, Processor, Renderer
from mstar.spec.request import Emit, EngineRequest
from mstar.spec.tasks import Task
from mstar.testing.drive import Driver
from mstar.testing.examples import Example
from mstar.weights.loader import load
from mstar_tts.codec_blocks import Carry
from mstar_tts.kokoro.tiny import write_kokoro
from mstar_tts.orpheus.tiny import write_orpheus
from mstar_tts.watermark.audioseal import Generator, audioseal_sizes, audioseal_weights
from mstar_tts.watermark.marking import marked
from mstar_tts.watermark.options import WatermarkOptions, message_bits

sys.path.insert(0, str(Path(__file__).parent))
from audioseal_reference import reference_generator, saved

SAID = {"phonemes": "həlˈO wˈɜɹld", "seed": 3}


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kokoro")
    write_kokoro(folder)
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("audioseal") / "generator_streaming.pth"
    torch.save({"model": saved(reference_generator(8), ("weight_g", "weight_v"))}, place)
    return place


def mark(file: Path, message: int, sound: np.ndarray) -> np.ndarray:
    """Of the whole *sound*."""
    with torch.device("meta"):
        module = Generator(message_bits(message), audioseal_sizes(file))
    load(module, audioseal_weights(module, file), Path("/"), torch.device("cpu"), torch.float32)
    module.settle()
    return module(torch.from_numpy(sound)[None], Carry())[0].numpy()  # type: ignore[no-any-return]


def driven(weights: Path, **watermark: Any) -> Driver:
    options = {"audio_watermark": watermark} if watermark else {}
    return Driver("kokoro", weights=weights, device="cpu", dtype="float32", model_kwargs=options)


def spoken(driver: Driver) -> np.ndarray:
    driver.submit("a", Example("", SAID))
    driver.run()
    sound: np.ndarray = driver.result("a")["audio"].reshape(-1)
    driver.assert_empty()
    return sound


def test_kokoros_sound_is_marked(weights: Path, file: Path) -> None:
    plain = spoken(driven(weights))
    marked = spoken(driven(weights, enabled=True, message=0xBEEF, alpha=0.5, generator=str(file)))
    wanted = np.clip(plain + 0.5 * mark(file, 0xBEEF, plain), -1, 1)
    assert np.abs(marked - plain).max() > 1e-3
    np.testing.assert_allclose(marked, wanted, atol=1e-5)


def test_orpheus_sound_is_marked(file: Path, tmp_path: Path) -> None:
    """Its windows make more than is new, which is left out before the mark."""
    write_orpheus(tmp_path)
    knobs = {"max_tokens": 7 * 20, "seed": 4, "ignore_eos": True}
    sounds = []
    for watermark in ({}, {"enabled": True, "message": 0xBEEF, "generator": str(file)}):
        options = {"audio_watermark": watermark, "chunk_frames": [1, 1, 2, 4]}
        driver = Driver("orpheus", weights=tmp_path, device="cpu", dtype="float32", model_kwargs=options)
        driver.submit("a", Example("one small bird", knobs))
        driver.run()
        sounds.append(driver.result("a")["audio"])
        driver.assert_empty()
    plain, marked = sounds
    assert len(plain) > 8 * 2048
    assert np.abs(marked - plain).max() > 1e-3
    np.testing.assert_allclose(marked, np.clip(plain + mark(file, 0xBEEF, plain), -1, 1), atol=2e-5)


def test_sound_that_overlaps_is_not_marked(file: Path, tmp_path: Path) -> None:
    write_orpheus(tmp_path)
    options = {"audio_watermark": {"enabled": True, "generator": str(file)}, "overlap_ms": 5.0}
    with pytest.raises(SetupError, match="overlap_ms"):
        Driver("orpheus", weights=tmp_path, device="cpu", dtype="float32", model_kwargs=options)


def test_a_deployment_without_the_option_has_no_other_graph(weights: Path) -> None:
    assert [node.name for node in driven(weights).worker.plan.graph.nodes] == ["text", "frames"]


@pytest.mark.parametrize(
    ("option", "words"),
    [({}, "hf download facebook/audioseal"), ({"generator": "/nothing/here.pth"}, "there is no '/nothing/here.pth'")],
)
def test_a_generator_that_is_not_there_stops_the_start(weights: Path, option: dict[str, str], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        driven(weights, enabled=True, **option)


# --- sound that comes in pieces of another size -----------------------------------------------------------------------
PIECE = 700


def hummed(index: Tensor, pitch: Tensor) -> Tensor:
    """[rows, PIECE] of a tone that goes on from piece to piece."""
    time = index[:, None] * PIECE + torch.arange(PIECE)
    return 0.4 * torch.sin(time * pitch[:, None] / 24_000)


class Humming(Node):
    def forward(self, step: Step, index: Tensor, pitch: Tensor) -> dict[str, Tensor]:
        return {"samples": hummed(index, pitch)}


@marked(lambda model: Ramp((320, 960, 1600)))
class Hummer(Model):
    def graph(self) -> Graph:
        index, pitch = Port("index", "int64", (), "stacked"), Port("pitch", "float32", (), "stacked")
        samples = Port("samples", "float32", ("S",), "stacked")
        call = Call("voice", inputs={"index": Index(), "pitch": Param("pitch")}, emit={"samples": "audio"})
        return Graph(
            nodes=(NodeSpec("voice", (Entry(inputs=(index, pitch), outputs=(samples,)),)),),
            walks={"hum": Loop(call, Times(Param("times")))},
            partitions=(Partition("main", ("hum",)),),
            streams=(
                Stream(
                    "audio", "main", CLIENT, Port("s", "float32", (), "stacked"), "audio", seconds_per_item=1 / 24_000
                ),
            ),
        )

    def build(self, node: str) -> Node:
        return Humming()


class HummerKnobs(Knobs):
    times: int = 1
    pitch: float = 440.0


class HummerProcessor(Processor):
    def prepare(self, task: Task, request_id: str) -> Prepared:
        return Prepared(EngineRequest(id=request_id, params=task.knobs.model_dump()))

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return HummerRenderer()


class HummerRenderer(Renderer):
    def feed(self, event: Emit) -> Iterator[ArrayDelta]:
        yield ArrayDelta(event.data, "audio", event.stream)


@mstar.hookimpl
def mstar_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            key="hummer", family="hummer", summary="Hums.", weights=(), licence=Licence("Apache-2.0"),
            model=f"{__name__}:Hummer", processor=f"{__name__}:HummerProcessor", knobs=HummerKnobs, outputs=("audio",),
            options=WatermarkOptions,
        )
    ]  # fmt: skip


def test_pieces_of_any_size_get_the_mark_of_the_whole(file: Path) -> None:
    registry = Registry(load_plugins(Settings(extra_plugins=(__name__,))))
    options = {"audio_watermark": {"enabled": True, "message": "1" * 16, "alpha": 0.1, "generator": str(file.parent)}}
    driver = Driver("hummer", registry, file.parent, device="cpu", dtype="float32", model_kwargs=options)
    asked = {"a": (7, 440.0), "b": (2, 1000.0), "c": (12, 300.0)}
    for name, (times, pitch) in asked.items():
        driver.submit(name, Example("", {"times": times, "pitch": pitch}))
    driver.run()
    for name, (times, pitch) in asked.items():
        plain = hummed(torch.arange(times), torch.tensor([pitch])).flatten().numpy()
        sound = driver.result(name)["audio"]
        assert len(sound) == times * PIECE
        assert len(driver.emitted[name][0].data) == 320
        np.testing.assert_allclose(sound, np.clip(plain + 0.1 * mark(file, 0xFFFF, plain), -1, 1), atol=1e-5)
    driver.assert_empty()


def test_a_request_that_is_cancelled_leaves_nothing(file: Path) -> None:
    registry = Registry(load_plugins(Settings(extra_plugins=(__name__,))))
    options = {"audio_watermark": {"enabled": True, "generator": str(file)}}
    driver = Driver("hummer", registry, file.parent, device="cpu", dtype="float32", model_kwargs=options)
    driver.submit("a", Example("", {"times": 1000}))
    driver.run(until=lambda: "a" in driver.emitted)
    driver.cancel("a")
    driver.run()
    driver.assert_empty()


def test_perth_marks_no_sound_that_comes_in_pieces(file: Path) -> None:
    registry = Registry(load_plugins(Settings(extra_plugins=(__name__,))))
    options = {"audio_watermark": {"enabled": True, "method": "perth", "generator": str(file)}}
    with pytest.raises(SetupError, match="PerTh marks whole sounds"):
        Driver("hummer", registry, file.parent, device="cpu", dtype="float32", model_kwargs=options)

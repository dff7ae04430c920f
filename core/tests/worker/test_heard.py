"""What is emitted says which of the client's items it was computed from."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.spec.request import Emit, Push
from mstar.testing.drive import Driver
from mstar.testing.miniatures import Example, miniature

pytestmark = pytest.mark.usefixtures("loop")

ECHO = '''
import torch

from mstar.hookspecs import hookimpl
from mstar.nn.model import Model
from mstar.nn.node import Node
from mstar.spec.graph import (
    CLIENT, Call, EndOf, Entry, Fixed, Graph, Loop, NodeSpec, Partition, Port, Pull, Stream,
)
from mstar.spec.knobs import Knobs
from mstar.spec.model import Licence, ModelSpec


class Ear(Node):
    def forward(self, step, sounds):
        return {"codes": sounds * 2}


class Voice(Node):
    def forward(self, step, codes):
        return {"speech": codes + 1}


class Echo(Model):
    """The ear reads two sounds at a time, the voice three codes: neither knows the other's pace."""

    def graph(self):
        item = Port("item", "float32", (), "stacked")
        packed = lambda name: Port(name, "float32", ("N",), "packed")
        return Graph(
            nodes=(
                NodeSpec("ear", (Entry(inputs=(packed("sounds"),), outputs=(packed("codes"),)),)),
                NodeSpec("voice", (Entry(inputs=(packed("codes"),), outputs=(packed("speech"),)),)),
            ),
            walks={
                "listen": Loop(Call("ear", inputs={"sounds": Pull("in")}, emit={"codes": "codes"}), EndOf("in")),
                "speak": Loop(Call("voice", inputs={"codes": Pull("codes")}, emit={"speech": "out"}), EndOf("codes")),
            },
            partitions=(Partition("ear", ("listen",)), Partition("voice", ("speak",))),
            streams=(
                Stream("in", CLIENT, "ear", item, "audio", Fixed(2)),
                Stream("codes", "ear", "voice", item, "state", Fixed(3)),
                Stream("out", "voice", CLIENT, item, "audio"),
            ),
        )

    def build(self, node):
        return Ear() if node == "ear" else Voice()


@hookimpl
def mstar_models():
    return [ModelSpec(
        key="echo", family="tests", summary="Says what it hears.", weights=(), licence=Licence("Apache-2.0"),
        model="echo_family:Echo", processor="mstar.testing.miniatures.processors:LiveProcessor",
        knobs=Knobs, abilities=("generate",), outputs=("audio",), deployment={"device": "cpu", "dtype": "float32"},
    )]
'''


def pushed(driver: Driver, name: str, stream: str, pieces: list[int], shape: tuple[int, ...] = ()) -> list[Emit]:
    """The emissions of a request that is sent items in such pieces."""
    driver.worker.submit(driver.prepare(name, Example(live=(stream,))).request)
    for count in pieces:
        driver.worker.push(Push(id=name, stream=stream, data=np.ones((count, *shape), np.float32)))
        driver.run()
    driver.worker.push(Push(id=name, stream=stream, end=True))
    driver.run()
    return driver.emitted[name]


def test_an_action_names_its_observation() -> None:
    events = pushed(Driver(miniature("mini_policy")), "r", "observations", [1, 3, 1], (3,))
    assert [event.heard for event in events] == [{"observations": n} for n in range(1, 6)]


@pytest.mark.parametrize("pieces", [[10], [3, 3, 4], [1] * 10])
def test_a_frame_counts_the_samples_up_to_its_end(pieces: list[int]) -> None:
    events = pushed(Driver(miniature("mini_duplex")), "r", "audio_in", pieces)
    assert [event.heard for event in events if event.stream == "audio"] == [{"audio_in": n} for n in (4, 8, 10)]


@pytest.mark.parametrize("pieces", [[11], [1] * 11, [4, 4, 3]])
def test_it_is_known_through_several_partitions(
    pieces: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three codes took two pulls of two sounds, six took three; the last ones come at the end."""
    (tmp_path / "echo_family.py").write_text(ECHO, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    driver = Driver("echo", Registry(load_plugins(Settings(extra_plugins=("echo_family",)))))
    events = pushed(driver, "r", "in", pieces)
    assert [event.heard for event in events] == [{"in": n} for n in (4, 6, 10, 11)]
    assert np.concatenate([event.data for event in events]).tolist() == [3.0] * 11
    driver.assert_empty()


def test_a_request_without_live_input_says_nothing() -> None:
    driver = Driver(miniature("mini_omni"))
    driver.submit("r", miniature("mini_omni").example(random.Random(1)))
    driver.run()
    assert {event.heard for event in driver.emitted["r"]} == {None}

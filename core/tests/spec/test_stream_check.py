"""What is wrong with a stream's windows, codes and cuts is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mstar.patterns.lm_codec import LMCodec, LMCodecFacts
from mstar.patterns.shapes import DecoderShape
from mstar.spec.check import faults
from mstar.spec.graph import Codes, Fixed, Fresh, Graph

SHAPE = DecoderShape(vocab=100, layers=1, heads=2, kv_heads=1, head_dim=8, max_tokens=64)


class Speaking(LMCodec):
    def __init__(self) -> None:
        pass

    def facts(self) -> LMCodecFacts:
        return LMCodecFacts(SHAPE, 24_000, 320, Fixed(2, 1, 1, 7), codes=((0, 9),), overlap=20)

    def build(self, node: str) -> Any:
        raise NotImplementedError


def found(**changes: dict[str, Any]) -> list[str]:
    """The faults of a graph whose streams have *changes*, by name."""
    model = Speaking()
    graph: Graph = model.graph()
    streams = tuple(replace(stream, **changes.get(stream.name, {})) for stream in graph.streams)
    return list(faults(replace(graph, streams=streams), model.resources()))


def test_a_sound_one_has_none() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("stream", "change", "fault"),
    [
        ("codes", {"chunk": Fixed(2, 1, -1, 7)}, "look-ahead is zero or more"),
        ("codes", {"chunk": Fixed(2, 1, 1, 0)}, "a unit, and what chunks are padded to, at least one"),
        ("codes", {"chunk": Fixed(2, 1, 1, 7, (0,))}, "padded to, at least one"),
        ("codes", {"capacity": 20}, "capacity 20 is below its largest chunk of 21 items, look-ahead included"),
        ("codes", {"codes": Codes(())}, "each position of a frame needs ids"),
        ("codes", {"codes": Codes(((0, 9), (9, 9)))}, "each position of a frame needs ids"),
        ("codes", {"codes": Codes(((0, 9),), "tokn")}, "without a token 'tokn'; did you mean 'token'?"),
        ("audio", {"codes": Codes(((0, 9),))}, "only streams between partitions take codes"),
        ("codes", {"primed": "promt"}, "primed with 'promt', which is no input; did you mean 'prompt'?"),
        ("audio", {"fresh": Fresh("code", 320)}, "is cut by unknown stream 'code'; did you mean 'codes'?"),
        ("audio", {"fresh": Fresh("codes", 0)}, "at least one item, not 0"),
        ("audio", {"fresh": Fresh("codes", 320, 321)}, "an overlap of 321 items; with the look-ahead of"),
        ("audio", {"fresh": Fresh("audio", 320)}, "without a pull of 'audio'"),
        ("codes", {"fresh": Fresh("codes", 320, 1)}, "only the client can blend an overlap, and 'codec' reads this"),
    ],
)
def test_each_fault_is_named(stream: str, change: dict[str, Any], fault: str) -> None:
    named, *_ = (one for one in found(**{stream: change}) if fault in one)
    assert f"stream {stream!r}" in named


def test_an_overlap_needs_look_ahead() -> None:
    (fault,) = found(codes={"chunk": Fixed(2, 1, 0, 7)})
    assert "an overlap of 20 items; with the look-ahead of 'codes' at most 0" in fault

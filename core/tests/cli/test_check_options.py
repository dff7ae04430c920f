"""``mstar check`` of a model with options and knobs of its own; ``mstar models KEY`` lists them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checks import Run, deployment, facts

OPTIONS = """
from dataclasses import replace
import mstar
from mstar.spec.knobs import Knobs, SamplingKnobs
from mstar.testing.miniatures import MINIATURES
from mstar.testing.miniatures.common import MiniProcessor
from mstar.testing.miniatures.text import Chat, LM_CALL, generate
from mstar.spec.graph import NodeSpec, Param, Port
from pydantic import Field

class Options(Knobs):
    window: int = Field(8, ge=1, le=64, description="Tokens that are seen.", strict=True)

class Windowed(Chat):
    def __init__(self, context):
        super().__init__(context)
        assert context.options.window == 9, context.options

class Processor(MiniProcessor):
    def __init__(self, context):
        super().__init__(context)
        assert context.options.window == 9, context.options

class Emphasis(SamplingKnobs):
    emphasis: float = Field(1.0, ge=0, le=2, description="How much.")

class Misspelt(Chat):
    def graph(self):
        graph = super().graph()
        (entry,) = graph.nodes[0].entries
        entry = replace(entry, inputs=(*entry.inputs, Port("gain", "float32", (), "stacked")))
        walks = {"generate": generate(LM_CALL, {"gain": Param("emphasiz")})}
        return replace(graph, nodes=(NodeSpec("lm", (entry,)),), walks=walks)

@mstar.hookimpl
def mstar_models():
    mini = next(m.spec for m in MINIATURES if m.model.endswith("text:Chat"))
    me = __name__ + ":"
    return [
        replace(mini, key="windowed", options=Options, model=me + "Windowed", processor=me + "Processor"),
        replace(mini, key="misspelt", knobs=Emphasis, model=me + "Misspelt"),
    ]
"""


@pytest.fixture
def windowed(mstar: Run) -> Run:
    return lambda *words, **more: mstar(*words, extra="cli_toys_options", code=OPTIONS, **more)


def test_model_and_processor_get_their_options(windowed: Run, tmp_path: Path) -> None:
    file = deployment(tmp_path, "model: windowed\nmodel_kwargs: {window: 9}\n")
    assert facts(windowed, file)["faults"] == []


def test_refused_options_are_told_once(windowed: Run, tmp_path: Path) -> None:
    file = deployment(tmp_path, "model: windowed\nmodel_kwargs:\n  window: 99\n")
    found = facts(windowed, file)
    (fault,) = found["faults"]  # that the model refuses the default, which is not what was asked for, is none
    assert (fault["key"], fault["line"], found["complete"]) == ("model_kwargs.window", 3, False)
    _, _, err = windowed("check", file)
    assert "1 fault:\n" in err
    assert "Further checks follow once these are mended." in err


def test_beside_refused_options_all_else_is_checked(windowed: Run, tmp_path: Path) -> None:
    text = """
model: windowed
model_kwargs: {window: 9, windo: 3}
placement: {lmm: [0]}
resources:
  kv: {tokns: 4}
  kvv: {}
"""
    found = facts(windowed, deployment(tmp_path, text))
    assert {(fault["key"], fault["line"]) for fault in found["faults"]} == {
        ("model_kwargs.windo", 3),
        ("placement.lmm", 4),
        ("resources.kv.tokns", 6),
        ("resources.kvv", 7),
    }
    assert not found["complete"]
    assert "graph, placement and pools were checked without model_kwargs.windo" in found["remarks"]


def test_a_pool_that_is_too_small_stands_beside_refused_options(windowed: Run, tmp_path: Path) -> None:
    text = "model: windowed\nmodel_kwargs: {window: 9, windo: 3}\nresources: {kv: {tokens: 1}}\n"
    found = facts(windowed, deployment(tmp_path, text))
    assert [fault["key"] for fault in found["faults"]] == ["model_kwargs.windo", "resources.kv"]


def test_a_parameter_that_is_no_knob_is_a_remark(windowed: Run) -> None:
    found = facts(windowed, "misspelt")
    (remark, _) = found["remarks"]
    assert remark.startswith("walk 'generate': call of 'lm': port 'gain': 'emphasiz' is no knob of 'misspelt'; did you")
    assert "did you mean 'emphasis'?; unless" in remark
    assert found["ok"]


def test_what_can_be_set_of_a_model_is_listed(windowed: Run) -> None:
    status, out, _ = windowed("models", "windowed")
    assert status == 0
    assert "temperature" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "window whole number ≥ 1, ≤ 64 8 Tokens that are seen." in lines
    told = json.loads(windowed("models", "windowed", "--json")[1])
    assert told["options"] == [
        {"name": "window", "value": "whole number ≥ 1, ≤ 64", "default": "8", "meaning": "Tokens that are seen."}
    ]
    assert windowed("models", "windwed")[0] == 2

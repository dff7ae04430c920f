"""``mstar graph``: the dataflow as text, as data and as a picture."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from mstar.testing.miniatures import MINIATURES

Run = Callable[..., tuple[int, str, str]]
MINI = {"MSTAR_EXTRA_PLUGINS": "mstar.testing.miniatures"}
SVG = "{http://www.w3.org/2000/svg}"


def test_text(mstar: Run) -> None:
    status, out, err = mstar("graph", "mini_omni", **MINI)
    assert (status, err) == (0, "")
    for line in (
        "│       └── forward(codes: int64[C,3], left: int64[]) → samples: float32[S]",
        "│           ├── thinker(ids = prompt) → token, stream text, stream hidden",
        "│           └── repeat until token is a stop token",
        "│   ├── frames: talker → codec (tokens, 4 at a time, after 2 of context)",
        "    ├── sampler: sampler (vocab=64, prompt=prompt, penalised=False, filtered=False)",
    ):
        assert line in out.splitlines()


def test_guidance_branches_stand_side_by_side(mstar: Run) -> None:
    out = mstar("graph", "mini_denoise", **MINI)[1]
    assert "side by side" in out
    assert "in context uncond" in out
    assert "repeat until it has run steps times (a parameter)" in out


def test_what_copies_share_out_is_told(mstar: Run, tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("placement: {denoiser: {ranks: [0, 1], split: contexts}}")
    assert (
        "denoiser on rank 0 and rank 1, contexts apart"
        in mstar("graph", "mini_denoise", "--config", str(file), **MINI)[1]
    )
    file.write_text("placement: {denoiser: [0, 1]}")
    assert "denoiser on rank 0 and rank 1\n" in mstar("graph", "mini_denoise", "--config", str(file), **MINI)[1]


def test_data_has_the_whole_graph(llama: Run, tmp_path: Path) -> None:
    status, out, _ = llama("graph", "toy-llama", "--weights", str(tmp_path / "llama"), "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["resources"]["kv"]["tokens"] == 1024
    assert facts["nodes"][0]["ranks"] == [0]
    prefill, loop = facts["walks"]["generate"]["parts"]
    assert prefill["inputs"] == {"ids": "prompt"}
    assert (loop["kind"], loop["body"]["inputs"]) == ("loop", {"ids": "token"})


@pytest.mark.parametrize("key", [mini.key for mini in MINIATURES])
def test_every_shape_can_be_drawn(mstar: Run, key: str, tmp_path: Path) -> None:
    file = tmp_path / "graph.svg"
    assert mstar("graph", key, "--svg", str(file), **MINI)[0] == 0
    picture = ElementTree.fromstring(file.read_text())
    texts = [text.text or "" for text in picture.iter(f"{SVG}text")]
    facts = json.loads(mstar("graph", key, "--json", **MINI)[1])
    for name in ("client", *(partition["name"] for partition in facts["partitions"])):
        assert name in texts
    for walk in facts["walks"]:
        assert f"walk {walk}" in texts
    for stream in facts["streams"]:
        assert any(text.startswith(f"{stream['name']}: ") for text in texts)
    calls = [rect for rect in picture.iter(f"{SVG}rect") if rect.get("class") == "call"]
    assert len(calls) == json.dumps(facts["walks"]).count('"kind": "call"')
    arrows = [path for path in picture.iter(f"{SVG}path") if path.get("class") == "stream"]
    assert len(arrows) == len(facts["streams"])
    assert_inside(picture)


def assert_inside(picture: ElementTree.Element) -> None:
    """Everything is on the page, and boxes lie in each other or apart."""
    width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
    boxes = []
    for rect in picture.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        boxes.append((x, y, x + float(rect.get("width", 0)), y + float(rect.get("height", 0))))
        assert x >= 0
        assert y >= 0
        assert boxes[-1][2] <= width
        assert boxes[-1][3] <= height
    for number, a in enumerate(boxes):
        for b in boxes[number + 1 :]:
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            inside = a[0] <= b[0] and a[1] <= b[1] and b[2] <= a[2] and b[3] <= a[3]
            assert apart or inside, (a, b)
    for text in picture.iter(f"{SVG}text"):
        assert float(text.get("x", 0)) + 5 * len(text.text or "") <= width
    for path in picture.iter(f"{SVG}path"):
        x, y = map(float, re.match(r"M(\S+) ([\d.]+)", path.get("d", "")).groups())  # type: ignore[union-attr]
        assert 0 <= x <= width
        assert 0 <= y <= height


def test_faults_are_shown_with_the_words_that_list_them(llama: Run, tmp_path: Path) -> None:
    file = tmp_path / "my file.yaml"
    file.write_text("placement: {lm: [0]}\n")
    words = ("toy-llama", "--config", str(file), "--weights", str(tmp_path / "llama"))
    status, out, err = llama("graph", *words)
    assert status == 1
    assert "partition" in out, "the graph is drawn all the same"
    command = f"mstar check toy-llama --config '{file}' --weights {tmp_path / 'llama'}"
    assert err == f"1 fault: `{command}` lists what is wrong\n"
    assert llama(*shlex.split(command)[1:])[0] == 1


def test_a_picture_that_cannot_be_written(mstar: Run, tmp_path: Path) -> None:
    status, _, err = mstar("graph", "mini_chat", "--svg", str(tmp_path / "no" / "graph.svg"), **MINI)
    assert (status, "the picture cannot be written" in err) == (2, True), err


def test_a_model_that_needs_its_configuration(llama: Run) -> None:
    status, _, err = llama("graph", "toy-llama")
    assert (status, "`mstar download toy-llama` fetches them" in err) == (1, True)

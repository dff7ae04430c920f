"""The real weights, as the package index has them, against the reference on the same file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mstar.nn.model import BuildContext
from mstar.weights.hub import HubSource
from mstar.weights.loader import load
from mstar.weights.package import PackageSource
from mstar.weights.sources import SourceContext, WeightSource, resolve_weights
from mstar_tts.kokoro.convert import FILE
from mstar_tts.kokoro.model import Kokoro
from mstar_tts.kokoro.spec import KOKORO, KokoroOptions
from mstar_tts.kokoro.vocoder import HARMONICS
from mstar_tts.noise import normal

sys.path.insert(0, str(Path(__file__).parent))
from kokoro_reference import reference_class

pytestmark = pytest.mark.real_weights

PHONEMES = "həlˈO, wˈɜɹld!"


@pytest.fixture(scope="module")
def folder() -> Path:
    sources: dict[str, type[WeightSource]] = {"package": PackageSource, "hub": HubSource}
    cache = Path(os.environ.get("MSTAR_CACHE", "~/.cache/mstar")).expanduser()
    found = resolve_weights(KOKORO, None, sources.__getitem__, SourceContext(cache=cache, say=print))
    assert found is not None
    return found


def test_all_voices_are_there(folder: Path) -> None:
    voices = sorted((folder / "voices").iterdir())
    assert len(voices) == 54
    assert {file.stat().st_size for file in voices if file.suffix == ".bin"} <= {510 * 256 * 4}


@torch.no_grad()
def test_it_sounds_as_the_reference_does(folder: Path) -> None:
    """Sample for sample, up to what rounding of the pitch does to phases: 30 dB below the sound."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    theirs = reference_class()("hexgrad/Kokoro-82M", config, str(folder / FILE)).eval()
    ids = torch.tensor([[0, *(config["vocab"][symbol] for symbol in PHONEMES), 0]])
    pack = torch.from_numpy(np.fromfile(folder / "voices" / "af_heart.bin", "<f4").reshape(510, 256))
    style, key, length = pack[len(PHONEMES) - 1][None], torch.tensor([1]), torch.tensor([ids.shape[1]])
    drawn, count = torch.randn_like, [0]
    source = theirs.decoder.generator.m_source
    source.register_forward_pre_hook(lambda _, given: count.__setitem__(0, given[0].shape[1]))
    torch.randn_like = lambda like: (  # type: ignore[assignment]
        normal(key, HARMONICS * count[0]).view(1, -1, HARMONICS) if like.shape[-1] > 1 else drawn(like)
    )
    try:
        wanted, durations = theirs.forward_with_tokens(ids, style, 1.0)
    finally:
        torch.randn_like = drawn
    model = Kokoro(BuildContext(folder, torch.float32, torch.device("cpu"), KokoroOptions()))
    nodes = {}
    for name in ("text", "frames"):
        with torch.device("meta"):
            nodes[name] = model.build(name)
        load(nodes[name], model.weights(name), folder, torch.device("cpu"), torch.float32)
        nodes[name].multiply_out()
    read = nodes["text"](None, ids, length, style, torch.ones(1))
    assert torch.equal(read["durations"][0], durations.view(-1))
    spread = nodes["text"].align(None, *(list(read[n]) for n in ("durations", "prosody", "text")), torch.tensor([999]))
    frames = torch.stack(spread["prosody_frames"]), torch.stack(spread["text_frames"]), spread["frames"]
    sound = nodes["frames"](None, *frames, style, key)["samples"][0, : len(wanted)]
    assert wanted.std() > 0.01
    assert 10 * torch.log10(wanted.square().mean() / (sound - wanted).square().mean()) > 30

"""Kokoro against the reference implementation, from a checkpoint in the published layout through M*'s loader."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar.nn.model import BuildContext
from mstar.weights.loader import load
from mstar_tts.kokoro.model import Kokoro
from mstar_tts.kokoro.nodes import FrameHalf, TextHalf
from mstar_tts.kokoro.spec import KokoroOptions
from mstar_tts.kokoro.vocoder import HARMONICS
from mstar_tts.noise import normal

sys.path.insert(0, str(Path(__file__).parent))
from kokoro_reference import reference_model, without_rounding_luck

TEXTS = ([0, 1, 2, 3, 9, 4, 0], [0, 5, 6, 7, 8, 9, 1, 2, 3, 4, 10, 11, 1, 1, 0], [0, 3, 0])
SPEED = 1.3
CPU = torch.device("cpu")


class Said:
    """What the reference made of one text on the way to *sound*."""

    def __init__(self, model: Any, ids: list[int], style: Tensor, key: Tensor):
        found: dict[str, Any] = {}
        source = model.decoder.generator.m_source
        hooks = [
            model.text_encoder.register_forward_hook(lambda _, __, out: found.update(text=out)),
            model.decoder.register_forward_hook(lambda _, given, __: found.update(decoder=given)),
            source.register_forward_pre_hook(lambda _, given: found.update(count=given[0].shape[1])),
        ]
        drawn = torch.randn_like
        torch.randn_like = lambda like: (  # type: ignore[assignment]
            normal(key[None], HARMONICS * found["count"]).view(1, -1, HARMONICS) if like.shape[-1] > 1 else drawn(like)
        )
        try:
            self.sound, frames = model.forward_with_tokens(torch.tensor([ids]), style[None], SPEED)
        finally:
            torch.randn_like = drawn
            for hook in hooks:
                hook.remove()
        self.durations, self.text = frames.view(-1), found["text"][0].T
        aligned, f0, energy, _ = found["decoder"]
        self.aligned, self.f0, self.energy = aligned.transpose(1, 2), f0, energy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kokoro")


@pytest.fixture(scope="module")
def styles() -> Tensor:
    return torch.randn(len(TEXTS), 256, generator=torch.Generator().manual_seed(5)) * 0.5


KEYS = torch.tensor([5, -77, 123_456_789])


@pytest.fixture(scope="module")
def said(folder: Path, styles: Tensor) -> list[Said]:
    model = reference_model(folder)
    without_rounding_luck(model.decoder.generator)
    return [Said(model, ids, style, key) for ids, style, key in zip(TEXTS, styles, KEYS, strict=True)]


@pytest.fixture(scope="module")
def halves(folder: Path, said: list[Said]) -> Iterator[tuple[TextHalf, FrameHalf]]:
    model = Kokoro(BuildContext(folder, torch.float32, CPU, KokoroOptions(frame_buckets=(16, 64))))
    nodes = []
    for name in ("text", "frames"):
        with torch.device("meta"):
            node = model.build(name)
        load(node, model.weights(name), folder, CPU, torch.float32)
        node.multiply_out()
        nodes.append(node)
    with torch.no_grad():
        yield nodes[0], nodes[1]  # type: ignore[misc]


@pytest.fixture(scope="module")
def read(halves: tuple[TextHalf, FrameHalf], styles: Tensor) -> dict[str, Tensor]:
    """The text half on all texts at once, padded to sixteen."""
    ids = torch.zeros(len(TEXTS), 16, dtype=torch.int64)
    for row, text in enumerate(TEXTS):
        ids[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in TEXTS])
    return halves[0](None, ids, lengths, styles, torch.full((len(TEXTS),), SPEED))  # type: ignore[no-any-return]


def test_text_features_and_durations_in_a_padded_batch(read: dict[str, Tensor], said: list[Said]) -> None:
    for row, one in enumerate(said):
        count = len(one.durations)
        assert torch.equal(read["durations"][row, :count], one.durations)
        assert not read["durations"][row, count:].any()
        torch.testing.assert_close(read["text"][row, :count], one.text, atol=1e-6, rtol=1e-5)
    assert len({int(one.durations.max()) for one in said} | {1}) > 1  # else speed and rounding went untested


def spread(halves: tuple[TextHalf, FrameHalf], read: dict[str, Tensor]) -> dict[str, Any]:
    most = torch.full((len(TEXTS),), 1000)
    rows = (list(read[name]) for name in ("durations", "prosody", "text"))
    return halves[0].align(None, *rows, most)  # type: ignore[arg-type]


def padded(rows: list[Tensor], length: int) -> Tensor:
    return torch.stack([torch.nn.functional.pad(row, (0, 0, 0, length - len(row))) for row in rows])


def test_pitch_and_energy_in_a_padded_batch(
    halves: tuple[TextHalf, FrameHalf], read: dict[str, Tensor], said: list[Said], styles: Tensor
) -> None:
    frames = spread(halves, read)
    f0, energy = halves[1].predictor(padded(frames["prosody_frames"], 64), styles[:, 128:], frames["frames"])
    for row, one in enumerate(said):
        count = one.f0.shape[1]
        torch.testing.assert_close(f0[row, :count], one.f0[0], atol=1e-3, rtol=1e-5)
        torch.testing.assert_close(energy[row, :count], one.energy[0], atol=1e-4, rtol=1e-4)
        assert not f0[row, count:].any()


def test_the_waveform_from_the_same_pitch_in_a_padded_batch(
    halves: tuple[TextHalf, FrameHalf], said: list[Said], styles: Tensor
) -> None:
    """A difference in the seventh digit of the pitch turns phases, so both get the reference's."""
    lengths = torch.tensor([one.aligned.shape[1] for one in said])
    longest = 40
    text = padded([one.aligned[0] for one in said], longest)
    f0, energy = (
        torch.stack([torch.nn.functional.pad(curve[0], (0, 2 * longest - curve.shape[1])) for curve in curves])
        for curves in ([one.f0 for one in said], [one.energy for one in said])
    )
    samples = longest * 600
    noise = normal(KEYS, HARMONICS * samples).view(-1, samples, HARMONICS).transpose(1, 2)
    sound = halves[1].decoder(text, f0, energy, styles[:, :128], noise, lengths)
    for row, one in enumerate(said):
        assert one.sound.std() > 1e-3
        torch.testing.assert_close(sound[row, : len(one.sound)], one.sound, atol=2e-5, rtol=1e-4)


def test_the_waveform_end_to_end(
    halves: tuple[TextHalf, FrameHalf], read: dict[str, Tensor], said: list[Said], styles: Tensor
) -> None:
    """Rounding of the pitch turns some angles by a full turn, which is another input to the network: what is heard is
    the same up to that."""
    frames = spread(halves, read)
    inputs = (padded(frames["prosody_frames"], 64), padded(frames["text_frames"], 64), frames["frames"], styles, KEYS)
    sound = halves[1](None, *inputs)["samples"]
    for row, one in enumerate(said):
        heard = sound[row, : len(one.sound)]
        assert torch.corrcoef(torch.stack([heard, one.sound]))[0, 1] > 0.99

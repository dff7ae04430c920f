"""AudioSeal against its reference, from published names; a mark in pieces against the mark of the whole."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from pydantic import ValidationError
from torch import Tensor

from mstar.processing.resampling import resample
from mstar.spec.errors import WeightsError
from mstar.testing.sounds import babble
from mstar.weights.loader import load
from mstar_tts.codec_blocks import Carry
from mstar_tts.watermark.__main__ import main
from mstar_tts.watermark.audioseal import HOP, SEANET, Detector, Generator, audioseal_weights
from mstar_tts.watermark.options import AudioWatermark, message_bits

sys.path.insert(0, str(Path(__file__).parent))
from audioseal_reference import reference_detector, reference_generator, saved

CPU = torch.device("cpu")
SMALL = replace(SEANET, filters=8, width=32)
BITS = message_bits(0xBEEF)
NORMS = (None, ("weight_g", "weight_v"), ("parametrizations.weight.original0", "parametrizations.weight.original1"))


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def sound(samples: int = 24_000, seed: int = 1) -> Tensor:
    return torch.from_numpy(babble(samples / 24_000, seed, 24_000))


def loaded(module: Any, file: Path) -> Any:
    load(module, audioseal_weights(module, file), Path("/"), CPU, torch.float32)
    module.settle()
    return module


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_generator(8)


def generator(model: Any, folder: Path, norm: Any = None, wrapped: str | None = None) -> Generator:
    tensors: Any = saved(model, norm)
    content = {wrapped: tensors, "optimizer": {"step": torch.zeros(1)}} if wrapped else tensors
    torch.save(content, folder / "generator_streaming.pth")
    with torch.device("meta"):
        module = Generator(BITS, SMALL)
    return loaded(module, folder / "generator_streaming.pth")  # type: ignore[no-any-return]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("wrapped", [None, "model"])
@pytest.mark.parametrize("samples", [24_000, HOP * 20, 1001])
def test_the_mark_is_the_references(
    reference: Any, tmp_path: Path, norm: Any, wrapped: str | None, samples: int
) -> None:
    clip = sound(samples)[None]
    wanted = reference.get_watermark(clip[:, None], message=torch.tensor([BITS]))[:, 0]
    mark = generator(reference, tmp_path, norm, wrapped)(clip, Carry())
    assert wanted.std() > 0.01
    torch.testing.assert_close(mark, wanted, atol=1e-5, rtol=1e-4)


def in_pieces(module: Generator, clips: Tensor, sizes: Sequence[int]) -> Tensor:
    state, marks = torch.zeros(len(clips), module.carried), []
    for piece in clips.split([*sizes, clips.shape[1] - sum(sizes)], 1):
        carry = Carry(state)
        marks.append(module(piece, carry))
        state = carry.state(state)
    return torch.cat(marks, 1)


@pytest.mark.parametrize("frames", [(1, 3, 8), (1,) * 12, (9,)])
def test_a_mark_in_pieces_is_the_mark_of_the_whole(reference: Any, tmp_path: Path, frames: Sequence[int]) -> None:
    module = generator(reference, tmp_path)
    clips = torch.stack([sound(1920 * 14 + 77, seed) for seed in (1, 2)])
    whole = module(clips, Carry())
    pieces = in_pieces(module, clips, [1920 * count for count in frames])
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-4)
    cold = torch.cat([module(piece, Carry()) for piece in clips.split(1920, 1)], 1)
    assert (cold - whole).abs().max() > 1e-2  # what a mark without memory would be


def test_another_message_is_another_mark(reference: Any, tmp_path: Path) -> None:
    module = generator(reference, tmp_path)
    with torch.device("meta"):
        other = Generator(message_bits(0xBEEE), SMALL)
    loaded(other, tmp_path)
    assert (module(sound()[None], Carry()) - other(sound()[None], Carry())).abs().max() > 1e-3


@pytest.mark.parametrize("norm", NORMS)
def test_the_detector_is_the_references(tmp_path: Path, norm: Any) -> None:
    reference = reference_detector(8)
    torch.save({"model": saved(reference, norm)}, tmp_path / "detector_streaming.pth")
    with torch.device("meta"):
        module = Detector(SMALL)
    loaded(module, tmp_path)
    clip = sound(10_000)[None]
    found, bits = reference(clip[:, None])
    sure, message = module(clip)
    torch.testing.assert_close(sure, found[:, 1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(message, bits, atol=1e-5, rtol=1e-4)


def test_sizes_are_the_published_ones(tmp_path: Path) -> None:
    """14.7 and 8.6 million parameters."""
    for module, model in ((Generator(BITS), reference_generator()), (Detector(), reference_detector())):
        torch.save(saved(model), tmp_path / "model.pth")
        loaded(module, tmp_path)
    assert Generator(BITS).carried * 4 < 120_000


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"there is no .*nothing\.pth"):
        audioseal_weights(Generator(BITS), tmp_path / "nothing.pth")
    torch.save({"some.weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=r"holds no AudioSeal model: its tensors are some\.weight"):
        audioseal_weights(Generator(BITS), tmp_path / "other.pth")


def test_messages() -> None:
    assert message_bits(0xBEEF) == message_bits("1011111011101111")
    assert message_bits(0) == (0,) * 16
    assert message_bits(1)[-1] == 1


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"message": 1 << 16}, "from 0 to 65535"),
        ({"message": "10"}, "16 characters 0 and 1"),
        ({"message": -1}, "from 0 to 65535"),
        ({"message": True}, "number"),
        ({"alpha": 0}, "greater than 0"),
        ({"alpha": 4.5}, "less than or equal to 4"),
        ({"strength": 1}, "strength"),
    ],
)
def test_options_that_are_refused(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AudioWatermark(**option)


def test_the_command_says_what_the_reference_hears(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At another rate, in stereo: the detector gets mono at 24 kHz."""
    reference = reference_detector(8)
    torch.save({"model": saved(reference)}, tmp_path / "detector_streaming.pth")
    clip = torch.stack([sound(16_000, 1), sound(16_000, 2)], 1)
    soundfile.write(tmp_path / "said.wav", clip.numpy(), 16_000, subtype="FLOAT")
    heard = torch.from_numpy(resample(clip.mean(1).numpy(), 16_000, 24_000))[None, None]
    found, bits = reference(heard)
    wanted = "".join(str(int(bit > 0.5)) for bit in bits[0])
    score = float((found[0, 1] > 0.5).float().mean())
    command = ["detect", "--detector", str(tmp_path), "--threshold", "-0.1", str(tmp_path / "said.wav")]
    assert main([*command, "--message", wanted]) == 0
    assert f"said.wav: marked, score {score:.3f}, message {wanted}" in capsys.readouterr().out
    other = int(wanted, 2) ^ 1
    assert main([*command, "--message", hex(other)]) == 1
    assert "not marked" in capsys.readouterr().out
    assert main([*command[:-1], str(tmp_path / "absent.wav")]) == 2
    assert "absent.wav: No such file or directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--message", "0x10000"])
    assert "from 0 to 65535" in capsys.readouterr().err

"""PerTh with its real weights, which come in a wheel: the networks are the reference's, and its mark is found."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from mstar.processing.resampling import resample
from mstar.spec.errors import SetupError
from mstar.testing.drive import Driver
from mstar.testing.examples import Example
from mstar.testing.sounds import babble
from mstar.weights.loader import load
from mstar.weights.package import PackageSource
from mstar.weights.sources import SourceContext
from mstar_tts.kokoro.tiny import write_kokoro
from mstar_tts.watermark.__main__ import main
from mstar_tts.watermark.perth import PACKAGE, Perth, PerthDetector, installed_perth, perth_weights, resampled

pytestmark = pytest.mark.real_weights

NAME = "perth_net_250000.pth"


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def file() -> Path:
    cache = Path(os.environ.get("MSTAR_CACHE", "~/.cache/mstar")).expanduser()
    return PackageSource().resolve(PACKAGE, SourceContext(cache=cache, say=print)) / NAME


def made(kind: type, file: Path) -> Any:
    with torch.device("meta"):
        module = kind()
    load(module, perth_weights(module, file), Path("/"), torch.device("cpu"), torch.float32)
    return module


@pytest.fixture(scope="module")
def perth(file: Path) -> Perth:
    return made(Perth, file)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def detector(file: Path) -> PerthDetector:
    return made(PerthDetector, file)  # type: ignore[no-any-return]


def clips(samples: int = 72_000) -> Tensor:
    return torch.stack([torch.from_numpy(babble(samples / 24_000, seed, 24_000)) for seed in (1, 2)])


def reference(name: str) -> Any:
    """A module of the reference, without what its package imports. Skips the test where it is not installed."""
    found = importlib.util.find_spec("perth") if "perth" not in sys.modules else sys.modules["perth"].__spec__
    if found is None or not found.submodule_search_locations:
        pytest.skip("the reference is not installed: pip install --no-deps resemble-perth==1.0.1")
    bare = "perth"
    for inner in ("", "perth_net", "perth_net_implicit"):
        bare = f"{bare}.{inner}".rstrip(".")
        if bare not in sys.modules:
            sys.modules[bare] = ModuleType(bare)
            sys.modules[bare].__path__ = [str(Path(found.submodule_search_locations[0], *bare.split(".")[1:]))]
            sys.modules[bare].__spec__ = found
    return importlib.import_module(f"perth.perth_net.perth_net_implicit.{name}")


def reference_levels(sound: Tensor) -> tuple[Tensor, Tensor]:
    """Of *sound* at 32 kHz, by its definition in numbers: level and angle."""
    spectrum = torch.stft(sound, 2048, 320, window=torch.hann_window(2048), return_complex=True)
    return (20 * spectrum.abs().clamp(min=1e-9).log10() + 180) / 195, spectrum.angle()


def test_the_mark_is_the_references(perth: Perth, file: Path) -> None:
    encoder = reference("model.encoder").Encoder(256, 128).eval()
    tensors = torch.load(file, map_location="cpu", weights_only=True)["model"]
    encoder.load_state_dict({k.removeprefix("encoder."): v for k, v in tensors.items() if k.startswith("encoder.")})
    sound = clips()
    levels, angle = reference_levels(sound)
    marked, mask = encoder(levels)
    assert 0.5 < mask.mean() < 1  # some frames are silent
    spectrum = torch.polar(10 ** ((marked * 195 - 180) / 20), angle)
    whole = torch.istft(spectrum, 2048, 320, window=torch.hann_window(2048), length=sound.shape[1])
    mark = perth(sound, 32_000)
    assert mark.std() > 1e-3
    torch.testing.assert_close(sound + mark, whole, atol=1e-5, rtol=1e-4)


def test_the_detector_is_the_references(perth: Perth, detector: PerthDetector, file: Path) -> None:
    decoder = reference("model.decoder").Decoder(256, 128).eval()
    tensors = torch.load(file, map_location="cpu", weights_only=True)["model"]
    decoder.load_state_dict({k.removeprefix("decoder."): v for k, v in tensors.items() if k.startswith("decoder.")})
    sound = clips()
    for heard in (sound, sound + 0.4 * perth(sound, 32_000)):
        wanted = decoder(reference_levels(heard)[0]).clamp(0, 1)
        torch.testing.assert_close(detector(heard, 32_000), wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("rate", [16_000, 24_000, 44_100])
def test_marked_sound_is_found_and_other_sound_is_not(perth: Perth, detector: PerthDetector, rate: int) -> None:
    sound = torch.from_numpy(babble(4.0, 5, rate))[None]
    mark = perth(sound, rate)
    assert mark.shape == sound.shape
    assert 13 < 20 * torch.log10(sound.std() / mark.std()) < 22  # dB between the sound and its mark
    assert detector(sound, rate) < 0.4
    assert detector(sound + mark, rate) > 0.9
    spectrum = torch.fft.rfft(mark[0]).abs().square()
    low = spectrum[: int(len(spectrum) * 2 * 2200 / rate)].sum()
    assert low / spectrum.sum() > 0.999  # nothing above its band


def test_a_row_is_marked_as_alone(perth: Perth) -> None:
    sound = clips()
    torch.testing.assert_close(perth(sound, 24_000)[1:], perth(sound[1:], 24_000), atol=1e-6, rtol=1e-5)


def test_silence_and_clicks(perth: Perth) -> None:
    assert perth(torch.zeros(1, 24_000), 24_000).abs().max() < 1e-3
    assert torch.equal(perth(torch.ones(2, 100), 24_000), torch.zeros(2, 100))


@pytest.mark.parametrize(("rate", "to"), [(24_000, 32_000), (32_000, 24_000), (16_000, 32_000), (44_100, 32_000)])
def test_resampling_is_soxrs_below_the_band_edge(rate: int, to: int) -> None:
    time = np.arange(rate) / rate
    sound = sum(np.sin(2 * np.pi * hertz * time) for hertz in (200, 1000, 3000, 6000)).astype(np.float32) / 8
    wanted = resample(sound, rate, to)
    got = resampled(torch.from_numpy(sound)[None], rate, to)[0].numpy()
    assert len(got) == len(wanted)
    assert np.abs(got - wanted)[400:-400].max() < 2e-3


def test_kokoros_sound_is_marked(file: Path, perth: Perth, tmp_path: Path) -> None:
    write_kokoro(tmp_path)

    def spoken(**option: Any) -> np.ndarray:
        options = {"audio_watermark": option} if option else {}
        driver = Driver("kokoro", weights=tmp_path, device="cpu", dtype="float32", model_kwargs=options)
        driver.submit("a", Example("", {"phonemes": "həlˈO wˈɜɹld" * 5, "seed": 3}))
        driver.run()
        driver.assert_empty()
        sound: np.ndarray = driver.result("a")["audio"].reshape(-1)
        return sound

    plain = spoken()
    wanted = plain + 0.7 * perth(torch.from_numpy(plain)[None], 24_000)[0].numpy()
    marked = spoken(enabled=True, method="perth", alpha=0.7, generator=str(file))
    np.testing.assert_allclose(marked, wanted.clip(-1, 1), atol=1e-5)


def test_what_perth_cannot_do(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kokoro(tmp_path)
    option = {"enabled": True, "method": "perth", "generator": str(file), "message": 7}
    with pytest.raises(SetupError, match="carries none"):
        Driver("kokoro", weights=tmp_path, device="cpu", dtype="float32", model_kwargs={"audio_watermark": option})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="pip install --no-deps resemble-perth"):
        installed_perth()


def test_the_command_hears_it(file: Path, perth: Perth, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound = torch.from_numpy(babble(4.0, 5, 24_000))
    soundfile.write(tmp_path / "plain.wav", sound.numpy(), 24_000)
    soundfile.write(tmp_path / "marked.wav", (sound + perth(sound[None], 24_000)[0]).numpy(), 24_000)
    command = ["detect", "--method", "perth", "--detector", str(file)]
    assert main([*command, str(tmp_path / "marked.wav")]) == 0
    assert main([*command, str(tmp_path / "plain.wav"), str(tmp_path / "marked.wav")]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].split(",")[0] for line in out] == ["marked", "not marked", "marked"]
    with pytest.raises(SystemExit):
        main([*command, "--message", "7", str(tmp_path / "marked.wav")])

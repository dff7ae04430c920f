"""Silero's voice detector: the arithmetic against torch's own layers, and what it says of sounds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from mstar.processing.speech import vad
from mstar.processing.speech.vad import FRAME, RATE, VoiceDetector, silero, voice_levels
from mstar.processing.speech.windows import WindowPolicy, spans
from mstar.spec.errors import SetupError
from mstar.testing.sounds import babble

pytestmark = pytest.mark.skipif(importlib.util.find_spec("silero_vad") is None, reason="extra 'vad'")

SECONDS = 4
TIME = np.arange(SECONDS * RATE) / RATE


@pytest.fixture(scope="module")
def detector() -> VoiceDetector:
    found = silero()
    assert found is not None
    return found


def by_torch(samples: np.ndarray) -> np.ndarray:
    """The published network, frame by frame."""
    spec = importlib.util.find_spec("silero_vad")
    assert spec is not None
    assert spec.origin is not None
    weights = load_file(str(Path(spec.origin).parent / "data/silero_vad_16k.safetensors"))
    cell = torch.nn.LSTMCell(128, 128)
    cell.load_state_dict({name.split(".")[1]: value for name, value in weights.items() if name.startswith("lstm")})
    frames = -(-len(samples) // FRAME)
    padded = F.pad(torch.from_numpy(samples), (64, frames * FRAME - len(samples)))
    state, said = None, []
    with torch.no_grad():
        for number in range(frames):
            heard = F.pad(padded[number * FRAME : number * FRAME + FRAME + 64][None], (0, 64), mode="reflect")
            parts = F.conv1d(heard[:, None], weights["stft_conv.weight"], stride=128)
            x = (parts[:, :129] ** 2 + parts[:, 129:] ** 2).sqrt()
            for layer, stride in ((1, 1), (2, 2), (3, 2), (4, 1)):
                weight, bias = weights[f"conv{layer}.weight"], weights[f"conv{layer}.bias"]
                x = F.conv1d(x, weight, bias, stride=stride, padding=1).relu()
            state = cell(x[..., 0], state)
            level = F.conv1d(state[0][..., None].relu(), weights["final_conv.weight"], weights["final_conv.bias"])
            said.append(float(level.sigmoid()))
    return np.array(said)


def test_as_the_published_network_says(detector: VoiceDetector, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    sound = np.concatenate([babble(1.0), rng.normal(0, 0.05, RATE), babble(0.7, 1)]).astype(np.float32)
    expected = by_torch(sound)
    np.testing.assert_allclose(detector(sound), expected, atol=1e-5)
    monkeypatch.setattr(vad, "_AT_ONCE", 5)  # block by block
    np.testing.assert_allclose(detector(sound), expected, atol=1e-5)
    assert detector(np.zeros(0, np.float32)).shape == (0,)


@pytest.mark.parametrize(
    "sound",
    [
        np.zeros(len(TIME)),
        *(np.random.default_rng(2).normal(0, level, len(TIME)) for level in (0.001, 0.1, 0.5)),
        *(0.3 * np.sin(2 * np.pi * pitch * TIME) for pitch in (100, 440, 3000)),
        0.3 * np.sign(np.sin(2 * np.pi * 200 * TIME)),
        (np.arange(len(TIME)) % 8000 < 20) * 0.5,
    ],
)
def test_nobody_speaks(detector: VoiceDetector, sound: np.ndarray) -> None:
    assert detector.speech_s(sound.astype(np.float32)) == 0


def test_a_voice_is_found(detector: VoiceDetector) -> None:
    sound = np.zeros(4 * RATE, np.float32)
    sound[2 * RATE : 2 * RATE + RATE // 2] = babble(0.5)
    assert 0.3 < detector.speech_s(sound) < 0.8
    assert detector.speech_s(sound, lead=3 * RATE) == 0
    assert detector(sound)[: 2 * RATE // FRAME].max() < 0.1


def test_long_audio_is_cut_where_nobody_speaks(detector: VoiceDetector) -> None:
    """Between two voices is a gap of noise that is louder than they are."""
    noise = np.random.default_rng(3).normal(0, 0.3, RATE).astype(np.float32)
    sound = np.concatenate([babble(3.5), noise, babble(3.5)])
    ((_, by_level), _) = spans(sound, RATE, WindowPolicy(6.0, search_s=1.5, quiet_s=0.6))
    ((_, by_voice), _) = spans(sound, RATE, WindowPolicy(6.0, search_s=1.5, quiet_s=0.6, levels=voice_levels(detector)))
    assert 3.5 <= by_voice / RATE <= 4.5
    assert not 3.5 <= by_level / RATE <= 4.5
    with pytest.raises(ValueError, match="16000"):
        spans(sound, 8000, WindowPolicy(3.0, levels=voice_levels(detector)))


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silero.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda name: None)
        assert silero() is None
    silero.cache_clear()
    spec = importlib.util.spec_from_file_location("silero_vad", tmp_path / "__init__.py")
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda name: spec)
        with pytest.raises(SetupError, match="vad"):
            silero()
    silero.cache_clear()

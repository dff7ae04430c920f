"""PerTh: Resemble's mark, hidden where louder sound covers it, and the detector that finds it. It carries no message.

It is made of a whole sound: how loud the loudest part is decides where there is one. The network works at 32 kHz below
2 kHz. The reference takes the whole sound there and back; here only the difference goes back, so that what the mark
does not touch stays as it was, bit for bit above its band.

Reference: ``resemble-perth`` 1.0.1 (``PerthImplicitWatermarker``), whose wheel has the weights.
"""

from __future__ import annotations

import importlib.util
from math import gcd
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.spec.errors import SetupError
from mstar.spec.model import WeightsRef
from mstar.weights.names import WeightMap

__all__ = ["PACKAGE", "Perth", "PerthDetector", "installed_perth", "perth_weights", "resampled"]

RATE = 32_000
_FFT, _HOP, _HIDDEN, _BANDS = 2048, 320, 256, 128
_LEAST, _FLOOR_DB, _HEADROOM_DB = 1e-9, -180.0, 15.0
_MOST_POWER = 10.0
_AUDIBLE = 0.05
_FILE = "perth/perth_net/pretrained/implicit/perth_net_250000.pth.tar"

PACKAGE = WeightsRef(
    "package",
    "resemble-perth",
    "1.0.1",
    options={
        "files": {
            _FILE: ("a15bce457ebc53ce5e6c9c3f11df78cf7ee2bf9cdab0a798902135b4c4027670", "perth_net_250000.pth"),
        },
        "size": 34_000_000,
        "licence": "MIT",
    },
)
"""The weights in their wheel, for a source of packages."""


def installed_perth() -> Path:
    """The file of weights of the package that is installed, of which nothing else is used.

    :raises SetupError: it is not installed.
    """
    found = importlib.util.find_spec("perth")
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        file = Path(place).parent / _FILE
        if file.is_file():
            return file
    raise SetupError(
        "PerTh's weights are in the package resemble-perth, which is not installed: "
        "pip install --no-deps resemble-perth==1.0.1"
    )


class _Conv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel: int):
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y


def _stack(out: int) -> nn.ModuleList:
    inner = (_Conv(_HIDDEN, _HIDDEN, 7) for _ in range(5))
    return nn.ModuleList([_Conv(_BANDS, _HIDDEN, 1), *inner, _Conv(_HIDDEN, out, 1)])


def _run(layers: nn.ModuleList, x: Tensor) -> Tensor:
    *inner, last = layers
    for layer in inner:
        x = F.leaky_relu(layer(x))
    y: Tensor = last(x)
    return y


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = _stack(_BANDS)

    def forward(self, levels: Tensor) -> Tensor:
        return _run(self.layers, levels[:, :_BANDS]) * _audible(levels)


class _Windowed(nn.Module):
    """Spectra of sounds at :data:`RATE`."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.empty(_FFT), persistent=False)

    def compute_buffers(self, device: torch.device) -> dict[str, Tensor]:
        return {"window": torch.hann_window(_FFT, device=device)}

    def spectrum(self, sound: Tensor) -> Tensor:
        return torch.stft(sound, _FFT, _HOP, window=self.window, return_complex=True)


class Perth(_Windowed):
    """The mark of whole sounds."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _Encoder()

    def forward(self, sound: Tensor, rate: int) -> Tensor:
        """*sound* ``[rows, S]`` at *rate* Hz. Returns its mark ``[rows, S]``, to be added; nothing for less than two
        windows (0.13 s)."""
        wide = resampled(sound, rate, RATE)
        if wide.shape[1] < 2 * _FFT:
            return torch.zeros_like(sound)
        before = self.spectrum(wide)
        levels = _levels(before)
        after = levels[:, :_BANDS] + self.encoder(levels)
        power = (after * (_HEADROOM_DB - _FLOOR_DB) + _FLOOR_DB) / 20
        low = before[:, :_BANDS]
        change = torch.zeros_like(before)
        change[:, :_BANDS] = torch.polar(10 ** power.clamp(max=_MOST_POWER), low.angle()) - low
        mark = torch.istft(change, _FFT, _HOP, window=self.window, length=wide.shape[1])
        return resampled(mark, RATE, rate)[:, : sound.shape[1]]


class PerthDetector(_Windowed):
    """How sure it is that a sound is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleDict({f"{speed}_layers": _stack(2) for speed in _SPEEDS})

    def forward(self, sound: Tensor, rate: int) -> Tensor:
        """*sound* ``[rows, S]`` at *rate* Hz; ``[rows]`` from 0 to 1."""
        levels = _levels(self.spectrum(resampled(sound, rate, RATE)))
        audible = _audible(levels)
        found = []
        for speed, share in _SPEEDS.items():
            frames = int(levels.shape[2] * share)
            low = F.interpolate(levels[:, :_BANDS], frames, mode="linear", align_corners=True)
            heard = F.interpolate(audible, frames, mode="nearest")
            out = _run(self.decoder[f"{speed}_layers"], low)  # type: ignore[arg-type]
            found.append((out * heard).sum(2) / heard.sum(2))
        attention, marked = torch.stack(found, 2).unbind(1)
        return (attention.softmax(1) * marked).sum(1).clamp(0, 1)


_SPEEDS = {"slow": 1.25, "normal": 1.0, "fast": 0.75}
"""A sound that was stretched or squeezed is found by one of these."""


def _levels(spectrum: Tensor) -> Tensor:
    """In dB, from 0 for silence to 1 for 15 dB."""
    return (20 * spectrum.abs().clamp(min=_LEAST).log10() - _FLOOR_DB) / (_HEADROOM_DB - _FLOOR_DB)


def _audible(levels: Tensor) -> Tensor:
    """1 for frames that are more than nearly nothing beside the loudest, else 0. ``[rows, 1, frames]``."""
    total = levels.sum(1, keepdim=True)
    return (total > _AUDIBLE * total.amax(2, keepdim=True)).to(levels.dtype)


def perth_weights(module: Perth | PerthDetector, file: Path) -> WeightMap:
    """The map of *module* from the published *file*."""
    other = r"model\.decoder\..*" if isinstance(module, Perth) else r"model\.encoder\..*"
    return WeightMap.from_module(
        module, {"": "model."}, ignore=(other, r"model\.ap\..*"), float32=(".*",), folder=str(file.resolve())
    )


_CROSSINGS, _ROLLOFF = 24, 0.97


def resampled(sound: Tensor, rate: int, to: int) -> Tensor:
    """*sound* ``[rows, S]`` at *rate* Hz as ``[rows, ceil(S * to / rate)]`` at *to* Hz: a windowed sinc (Smith,
    "Digital Audio Resampling"), as one convolution with a filter for each phase."""
    if rate == to:
        return sound
    step, phases = rate // gcd(rate, to), to // gcd(rate, to)
    cut = min(step, phases) * _ROLLOFF / step  # of the input's own half rate
    reach = int(_CROSSINGS / cut) + 1
    taps = torch.arange(-reach, reach + step, device=sound.device, dtype=torch.float64)
    shift = torch.arange(phases, device=sound.device, dtype=torch.float64)[:, None] * step / phases
    time = ((taps - shift) * cut).clamp(-_CROSSINGS, _CROSSINGS)
    filters = cut * torch.sinc(time) * torch.cos(time * torch.pi / _CROSSINGS / 2).square()
    padded = F.pad(sound, (reach, reach + step))[:, None]
    out = F.conv1d(padded, filters.to(sound.dtype)[:, None], stride=step).transpose(1, 2).flatten(1)
    return out[:, : -(-sound.shape[1] * phases // step)]

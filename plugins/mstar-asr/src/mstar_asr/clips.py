"""Real speech that packages carry, for tests and benchmarks."""

from __future__ import annotations

from typing import Any

from mstar.spec.model import WeightsRef
from mstar.weights.package import PackageSource
from mstar.weights.sources import SourceContext

__all__ = ["CLIPS", "real_speech"]

CLIPS = ("jfk", "beckett", "counting", "quick_brown_fox", "fr", "ja", "zh")
"""One of 11 s (a president, 1961), one of 10 s, and short ones; English, but for those named by their language."""

_AUDIO = "pytest_audioeval/samples/audio"
_OTHERS = WeightsRef(
    "package",
    "pytest-audioeval",
    "0.1.3",
    options={
        "files": {
            f"{_AUDIO}/en/counting.wav": (
                "2b69b8f7894de9774e7433db6bfa1874944e25ed806826c507bed27b9e69fe15",
                "counting.wav",
            ),
            f"{_AUDIO}/en/quick_brown_fox.wav": (
                "adc24a9b99267932370842f0d5be866dc2cd09e65af9762469c198493e36870b",
                "quick_brown_fox.wav",
            ),
            f"{_AUDIO}/fr/pangrama.wav": ("97aee6fca112f4c562aed53be97fb715f744f5ec072e1f4a30ffaf94324da361", "fr.wav"),
            f"{_AUDIO}/ja/pangrama.wav": ("4ccc474a2ab1026ecb093dfcbe66ca737bad8dc3f4ef25842fe4dc50ff066098", "ja.wav"),
            f"{_AUDIO}/zh/jishu.wav": ("8c150057c49d9f52fa0125df8159912258cc83cb644b49569b142442c9e84658", "zh.wav"),
        },
        "also": (
            {
                "distribution": "useful-moonshine-onnx",
                "version": "20251121",
                "files": {
                    "moonshine_onnx/assets/beckett.wav": (
                        "e5a26b3d29e5b0bc8dbd72c11d16a3808a4ec0ac45b21f12a27d2a2fe5c5ae61",
                        "beckett.wav",
                    )
                },
            },
        ),
        "licence": "MIT",
    },
)
_JFK = WeightsRef(
    "package",
    "nodejs-whisper",
    "0.3.1",
    options={
        "index": "npm",
        "files": {
            "package/cpp/whisper.cpp/bindings/go/samples/jfk.wav": (
                "59dfb9a4acb36fe2a2affc14bacbee2920ff435cb13cc314a08c13f66ba7860e",
                "jfk.wav",
            )
        },
        "licence": "MIT",
    },
)


def real_speech(name: str, context: SourceContext) -> Any:
    """One of :data:`CLIPS`, float32 ``[samples]`` at 16 kHz; fetched with pip or npm unless *context*'s cache has it.

    :raises WeightsError: it cannot be had.
    """
    import soundfile

    folder = PackageSource().resolve(_JFK if name == "jfk" else _OTHERS, context)
    samples, rate = soundfile.read(folder / f"{name}.wav", dtype="float32")
    assert rate == 16_000
    return samples

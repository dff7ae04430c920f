"""Qwen3-TTS's codec in a process of its own on the talker's GPU (the layout ``codec_apart``), beside one process.

    python benchmarks/codec_apart.py --out FILE.json                            # one GPU; under a minute
    python benchmarks/codec_apart.py --tiny --device cpu --out FILE.json        # does it work? no figures

Random weights at the published shape, drawn on the device in each worker (``speech/drawn.py``). Both layouts are served
as the server does it, in processes of their own that are ready before anything is measured; they take turns. First both
must say the same for one seed. Then listeners: all at once (``burst``), and each again as soon as it has heard its
answer (``steady``). NOTES.md says what each figure means and what was expected.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, environment, table
from gpu.report import write
from speech.families import FAMILIES, Family, made, tiny
from speech.streams import RATE, Heard, figures

from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.runtime.service import Service, open_service
from mstar.settings import Settings
from mstar.spec.knobs import validate_knobs
from mstar.spec.processor import AudioDelta
from mstar.spec.tasks import SpeechTask

LAYOUTS = (None, "codec_apart")
KV_TOKENS = 65_536
"""Of both layouts: without a size one of them would take what the other needs."""
APART = 1e-3
"""Relative, of one seed's sound from both: kernels may be chosen differently."""


def opened(family: Family, folder: Path, layout: str | None, words: argparse.Namespace) -> Service:
    drawn = () if words.tiny else ("speech.drawn",)
    settings = Settings(plugins=(), extra_plugins=("mstar_tts.plugin", *drawn))
    told: dict[str, Any] = {
        "weights": str(folder),
        "layout": layout,
        "device": words.device,
        "dtype": "float32" if words.device == "cpu" else "bfloat16",
        "executor": "processes",
        "max_concurrent_requests": max(words.streams) + 8,
        "resources": {"kv": {"tokens": 8192 if words.device == "cpu" else KV_TOKENS}},
        "model_kwargs": dict(family.options),
    }
    return open_service(family.key, settings, told, Registry(load_plugins(settings)))


async def hear(
    service: Service, family: Family, seconds: float, seed: int, kept: list[np.ndarray] | None = None
) -> Heard:
    """One answer. *kept*: takes its sound."""
    knobs = validate_knobs(service.spec.knobs, {"seed": seed, **family.knobs(seconds)})
    heard = Heard(time.perf_counter())
    async for delta in await service.generate(SpeechTask(knobs=knobs, text=family.text, want=("audio",))):
        if isinstance(delta, AudioDelta) and len(delta.samples):
            heard.arrivals.append((time.perf_counter(), len(delta.samples)))
            if kept is not None:
                kept.append(np.asarray(delta.samples))
    return heard


async def listened(service: Service, family: Family, streams: int, seconds: float, rounds: int) -> dict[str, Any]:
    """As :func:`speech.streams.run_streams`, of a served model."""
    burst = await asyncio.gather(*(hear(service, family, seconds, seed) for seed in range(streams)))
    spread = max(one.ended - one.asked for one in burst) / streams

    async def listener(number: int) -> list[Heard]:
        await asyncio.sleep(number * spread)
        answers = [await hear(service, family, seconds, streams * (turn + 1) + number) for turn in range(rounds + 1)]
        return answers[1:]

    steady = [one for own in await asyncio.gather(*map(listener, range(streams))) for one in own]
    return {"streams": streams, "burst": figures(burst), "steady": figures(steady)}


async def measure(family: Family, folder: Path, words: argparse.Namespace, result: dict[str, Any], save: Any) -> None:
    services = {str(layout or "one process"): opened(family, folder, layout, words) for layout in LAYOUTS}
    began = time.perf_counter()
    try:
        await asyncio.gather(*(service.start() for service in services.values()))
        result["ready_s"] = time.perf_counter() - began
        result["check"] = await check(services, family, min(words.seconds, 2.0))
        save()
        for streams in words.streams:
            for name, service in services.items():
                await listened(service, family, streams, min(words.seconds, 2.0), 1)  # what is captured late
                row = await listened(service, family, streams, words.seconds, words.rounds)
                result["rows"].append({"layout": name, **row})
                save()
        result["status"] = {name: dict(await service.status()) for name, service in services.items()}
    finally:
        await asyncio.gather(*(service.stop() for service in services.values()), return_exceptions=True)


async def check(services: dict[str, Service], family: Family, seconds: float) -> dict[str, float]:
    """:raises AssertionError: a layout says something else than the first."""
    sounds = []
    for service in services.values():
        await hear(service, family, seconds, 7)
        kept: list[np.ndarray] = []
        await hear(service, family, seconds, 7, kept)
        sounds.append(np.concatenate(kept))
    one, other = sounds
    if len(one) != len(other) or abs(len(one) / RATE - seconds) > 0.1:
        raise AssertionError(f"one seed, {len(one)} and {len(other)} samples for {seconds} s")
    apart = float(np.linalg.norm(one - other) / max(1e-9, np.linalg.norm(one)))
    if not np.isfinite(one).all() or apart > APART:
        raise AssertionError(f"one seed, two sounds: {apart:.2g} apart")
    return {"audio_s": len(one) / RATE, "apart": apart}


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    steady, burst = row["steady"], row["burst"]
    return {
        "layout": row["layout"],
        "streams": row["streams"],
        "first_ms_p50": steady["first_audio_ms"]["p50"],
        "first_ms_p95": steady["first_audio_ms"]["p95"],
        "burst_first_ms_p95": burst["first_audio_ms"]["p95"],
        "rtf_p50": steady["real_time_factor"]["p50"],
        "audio_s_per_s": steady["audio_s_per_s"],
        "burst_audio_s_per_s": burst["audio_s_per_s"],
        "gapless": steady["gapless"],
        "late_ms_p95": steady["late_ms"]["p95"],
    }


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[32, 64])
    parser.add_argument("--seconds", type=float, default=6.0, help="of sound that an answer has")
    parser.add_argument("--rounds", type=int, default=2, help="answers that each listener of steady load hears")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny checkpoint: does it work?")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args(given)
    family = tiny(FAMILIES["qwen3_tts"]) if words.tiny else FAMILIES["qwen3_tts"]
    names = ("seconds", "rounds", "device", "tiny", "streams")
    result: dict[str, Any] = {
        "environment": environment(("torch", "triton", "flashinfer-python", "mstar-core")),
        "settings": {name: getattr(words, name) for name in names},
        "rows": [],
    }
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as scratch:
        folder = made(family, Path(scratch, family.key))
        asyncio.run(measure(family, folder, words, result, lambda: write(words.out, result)))
    write(words.out, result)
    print(f"ready after {result['ready_s']:.1f} s; {result['check']}")
    lines = [summary(row) for row in result["rows"]]
    table("Qwen3-TTS, the codec apart", lines, list(lines[0]), 3)


if __name__ == "__main__":
    main()

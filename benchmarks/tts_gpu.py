"""Speech on a GPU: first audio, real-time factor, audio seconds a second and gaps, beside what the device allows.

    python benchmarks/tts_gpu.py --out FILE.json                                   # all families
    python benchmarks/tts_gpu.py --families orpheus --parts check,streams --streams 1,100 --out FILE.json
    python benchmarks/tts_gpu.py --tiny --device cpu --out FILE.json               # does it work? no figures

Random weights at the published shapes, drawn on the device; answers go on for as long as they are told to, whatever the
model would say. One worker in this process, driven as an executor's loop drives it: HTTP and encoders are not counted.

Parts: ``check`` (what is measured is right: the codec's captured windows against float32, lengths, seeds), ``floors``
(the language model's products and keys alone), ``streams``. Each number of streams is measured twice: all come at once
(``burst``), and each asks again as soon as it has heard its answer (``steady``). NOTES.md says what each figure means.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import environment, table
from gpu.report import write
from speech.check import check
from speech.families import FAMILIES, Family, made, random_weights, tiny
from speech.floors import floors
from speech.streams import Speaker, run_streams

PARTS = ("check", "floors", "streams")
PROMPT = 100
"""Tokens of a prompt, about: what stands before the sound in the language model's context."""


def options_of(family: Family, streams: Sequence[int], seconds: float, device: str, small: bool) -> dict[str, Any]:
    """The deployment: room for the most streams, and for one that comes while another leaves."""
    most = max(streams)
    found: dict[str, Any] = {
        "device": device,
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "max_concurrent_requests": most + 8,
    }
    if family.parts and not small:
        tokens = int((PROMPT + 64 + family.steps_per_s * (seconds + 1)) * (most + 8))
        tokens = max(tokens, family.options["max_tokens"])  # there is always room for the longest request
        found["resources"] = {"kv": {"tokens": -(-tokens // 256) * 256}}
        found["model_kwargs"] = dict(family.options)
    return found


def measure(family: Family, words: argparse.Namespace, result: dict[str, Any], save: Callable[[], None]) -> None:
    """Fill *result*, which *save* writes after each part."""
    device, parts = words.device, words.parts.split(",")
    streams = [int(n) for n in words.streams.split(",")] if words.streams else list(family.streams)
    if "floors" in parts and family.parts:
        context = PROMPT + int(family.steps_per_s * words.seconds / 2)
        result["floors"] = floors(family, torch.device(device), streams, context, words.tiny)
        save()
        _free()
    if not {"check", "streams"} & set(parts):
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = made(family, Path(scratch, family.key))
        with random_weights(family.edit):
            options = options_of(family, streams, words.seconds, device, words.tiny)
            options["model_kwargs"] = {**options.get("model_kwargs", {}), **words.kwargs}
            speaker = Speaker(family, folder, options)
        result.update(ready_s=speaker.load_s, phases=speaker.phases)
        try:
            if "check" in parts:
                result["check"] = check(speaker, words.seconds)
                print(f"  check: {result['check']}", flush=True)
                save()
            rows = result["rows"] = []
            for count in streams if "streams" in parts else ():
                run_streams(speaker, count, min(2.0, words.seconds), 1)  # what is captured late is captured here
                row = run_streams(speaker, count, words.seconds, words.rounds)
                floor = result.get("floors", {}).get("audio_s_per_s", {}).get(str(count))
                if floor is not None:
                    row["of_floor"] = row["steady"]["audio_s_per_s"] / floor
                rows.append(row)
                result["captured"] = captured(speaker)
                print(f"  {count} streams: {summary(row)}", flush=True)
                save()
        finally:
            speaker.close()
    _free()


def captured(speaker: Speaker) -> dict[str, Any]:
    """How many graphs there are, and which steps run without one, and why."""
    runner: Any = speaker.worker.engine.runner
    faults = {str(key[:4]): reason for key, reason in getattr(runner, "faults", {}).items()}
    return {**runner.status(), "without": faults}


def summary(row: dict[str, Any]) -> dict[str, float]:
    """One line of the table."""
    steady, burst = row["steady"], row["burst"]
    return {
        "streams": row["streams"],
        "first_ms_p50": steady["first_audio_ms"]["p50"],
        "first_ms_p95": steady["first_audio_ms"]["p95"],
        "burst_first_ms_p95": burst["first_audio_ms"]["p95"],
        "rtf_p50": steady["real_time_factor"]["p50"],
        "audio_s_per_s": steady["audio_s_per_s"],
        "of_floor": row.get("of_floor", float("nan")),
        "gapless": steady["gapless"],
        "late_ms_p50": steady["late_ms"]["p50"],
        "late_ms_p95": steady["late_ms"]["p95"],
        "burst_gapless": burst["gapless"],
    }


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="of " + ", ".join(FAMILIES))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--streams", default="", help="how many at once, with commas; default: those of the family")
    parser.add_argument("--seconds", type=float, default=10.0, help="of sound that an answer has")
    parser.add_argument("--rounds", type=int, default=2, help="answers that each listener of steady load hears")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="model_kwargs of the deployment, as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny checkpoints: does it work?")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    facts = environment(("torch", "triton", "flashinfer-python", "mstar-core"))
    settings = {"seconds": words.seconds, "rounds": words.rounds, "device": words.device, "tiny": words.tiny}
    settings["kwargs"] = words.kwargs
    result: dict[str, Any] = {"environment": facts, "settings": settings, "families": {}}
    for name in words.families.split(","):
        print(name, flush=True)
        found = result["families"].setdefault(name, {})
        if importlib.util.find_spec(f"mstar_tts.{name}") is None:
            found["skipped"] = f"mstar_tts has no {name}"
            continue
        family = tiny(FAMILIES[name]) if words.tiny else FAMILIES[name]
        try:
            measure(family, words, found, lambda: write(words.out, result))
        except Exception as error:  # the others are measured all the same
            traceback.print_exc()
            found["failed"] = f"{type(error).__name__}: {error}"
        except KeyboardInterrupt:
            found["failed"] = "interrupted"
        _free()
        write(words.out, result)
    for name, found in result["families"].items():
        rows = [summary(row) for row in found.get("rows", [])]
        if rows:
            table(f"{name}, {words.device}", rows, list(rows[0]))
    failed = [f"{name}: {found['failed']}" for name, found in result["families"].items() if "failed" in found]
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()

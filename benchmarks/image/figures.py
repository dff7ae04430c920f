"""What follows from the figures of the parts, and how they are shown."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import table

__all__ = ["derive", "psnr", "show"]

LOAD_COLUMNS = ["step", "rows", "captured", "times", "ms", "ms_a_row"]


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Peak signal to noise of pictures of 8 bits, in dB; 99 for the same picture."""
    error = float(np.mean((one.astype(np.float64) - other.astype(np.float64)) ** 2))
    return 99.0 if error == 0 else 10 * math.log10(255**2 / error)


def derive(results: dict[str, Any], scratch: Path, engines: Sequence[str]) -> None:
    """Add to *results*, of one shape, what compares its parts: PSNR to the pictures of ``plain``, and ``derived``.

    :param scratch: where the parts left their pictures. :param engines: the parts that make such.
    """
    plain = scratch / "plain.npy"
    for part in engines:
        file = scratch / f"{part}.npy"
        if part != "plain" and plain.is_file() and file.is_file():
            pairs = zip(np.load(file), np.load(plain), strict=True)
            results[part]["psnr_db"] = min(psnr(one, other) for one, other in pairs)
    best = min((results[p]["latency_s"] for p in engines if "latency_s" in results.get(p, {})), default=None)
    for part, word in (("diffusers", "over_diffusers"), ("diffusers-compiled", "over_compiled_diffusers")):
        if best and "latency_s" in results.get(part, {}):
            results.setdefault("derived", {})[word] = results[part]["latency_s"] / best
    if "latency_s" in results.get("http", {}) and "latency_s" in results.get("graphs", {}):
        http, offline = results["http"], results["graphs"]["latency_s"]
        derived = results.setdefault("derived", {})
        derived["http_over_offline"] = http["latency_s"] / offline
        # offline nobody makes a PNG file of it, and base64 of that
        derived["http_over_encoded"] = http["latency_s"] / (offline + http["encode_s"])
    floor = results.get("floor", {})
    if "step_floor_s" in floor:
        derived = results.setdefault("derived", {})
        derived["floor_s_a_step"] = floor["step_floor_s"]
        derived |= {f"{way}_share_of_floor": floor["step_floor_s"] / floor[f"{way}_step_s"] for way in _timed(floor)}
        decoding = [results.get(part, {}) for part in ("vae", "vae-compiled")]
        vae = min((found[key] for found in decoding for key in ("plain_s", "compiled_s") if key in found), default=None)
        if best and vae is not None:
            derived["share_of_floor"] = floor["steps"] * floor["step_floor_s"] / max(best - vae, 1e-9)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}


def _timed(floor: dict[str, Any]) -> list[str]:
    return [way for way in ("plain", "fused", "captured") if f"{way}_step_s" in floor]


def show(results: dict[str, Any]) -> None:
    """Print *results*, by shape and part."""
    for shape, parts in results.items():
        rows = [{"part": name, **{k: v for k, v in found.items() if k != "error"}} for name, found in parts.items()]
        columns = [
            "part",
            "latency_s",
            "pictures_per_s_1",
            "pictures_per_s_4",
            "pictures_per_s_16",
            "psnr_db",
            "part_s",
        ]
        table(shape, rows, columns, digits=3)
        for count, found in parts.get("load", {}).items():
            if isinstance(found, dict):
                table(f"{shape}, {count} at once: {found['busy']:.3f} busy", found["steps"], LOAD_COLUMNS)
        if "steps" in parts.get("timeline", {}):
            from image.timeline import stages  # where torch is

            table(f"{shape}, one picture", stages(parts["timeline"]), ["part", "ms", "share"])
            steps = [{**step, "host": json.dumps(_rounded(step["host"]))} for step in parts["timeline"]["steps"]]
            table(f"{shape}, its steps", steps, ["step", "ms", "gap", "captured", "ahead", "host"])
        for name, found in parts.items():
            if "error" in found:
                print(f"{shape} {name}: {found['error']}", file=sys.stderr)
        print(json.dumps(parts.get("derived", {})))

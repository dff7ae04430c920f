"""Measurements from files that ``benchmarks/decode_gpu.py`` wrote. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.simulate.cost import Sample, StepShape
from mstar.spec.errors import SetupError, nearest

__all__ = ["Results", "read_results"]


@dataclass(frozen=True)
class Results:
    """Of one *shape* on one *device*: measurements, and what is *known* of a step's cost beside them."""

    shape: str
    device: str
    samples: Sequence[Sample]
    known: Mapping[str, float]


def read_results(path: Path, shape: str | None = None) -> Results:
    """What *path* says.

    :param shape: of which model's shape, if there are several. :raises SetupError: there is none of that.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SetupError(f"{path} is no JSON: {error}") from None
    shapes = found.get("shapes") if isinstance(found, dict) else None
    if not isinstance(shapes, dict) or not shapes:
        raise SetupError(f"{path} has no measurements of steps ('shapes', as benchmarks/decode_gpu.py writes them)")
    if shape is None and len(shapes) > 1:
        raise SetupError(f"{path} has several shapes; which? --shape {' or '.join(shapes)}")
    name = shape or next(iter(shapes))
    if name not in shapes:
        raise SetupError(f"{path} has no shape {name!r}{nearest(name, shapes)}")
    samples = [*_decodes(shapes[name]), *_prompts(shapes[name])]
    if len(samples) < 3:
        raise SetupError(f"{path}: {name} has {len(samples)} measurements of steps; at least three are needed")
    gpus = found.get("environment", {}).get("gpu") or [""]
    return Results(name, str(gpus[0]), samples, _known(shapes[name]))


def _known(shape: Mapping[str, Any]) -> dict[str, float]:
    """The context of all measured steps is the same for each row, so what it costs is not to be learned from them: its
    keys and values are read at the speed of a copy, as the benchmark measured it."""
    floors = shape.get("floors")
    if not isinstance(floors, dict) or not floors.get("copy_bytes_per_s") or "kv_bytes_per_token" not in floors:
        return {}
    return {"context": float(floors["kv_bytes_per_token"]) / float(floors["copy_bytes_per_s"])}


def _rows(part: Any) -> list[Mapping[str, Any]]:
    rows = part.get("rows") if isinstance(part, dict) else None
    return [row for row in rows or [] if isinstance(row, dict)]


def _decodes(shape: Mapping[str, Any]) -> Iterator[Sample]:
    for row in _rows(shape.get("decode")) or [{**row, "context": 0} for row in _listed(shape)]:
        if row.get("mode", "greedy") == "greedy" and "step_s" in row:
            batch = int(row["batch"])
            yield Sample(float(row["step_s"]), [StepShape(batch, batch, round(batch * float(row["context"])))])


def _listed(shape: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    summary = shape.get("summary")
    return list(summary.get("decode", [])) if isinstance(summary, dict) else []


def _prompts(shape: Mapping[str, Any]) -> Iterator[Sample]:
    for row in _rows(shape.get("prefill")):
        tokens, steps = int(row["tokens"]), max(1, int(row.get("steps", 1)))
        each = -(-tokens // steps)
        shapes = [
            StepShape(1, min(each, tokens - at), min(at + each, tokens), min(each, tokens - at) * (at + each / 2))
            for at in range(0, tokens, each)
        ]
        yield Sample(float(row["seconds"]), shapes)
    for row in _rows(shape.get("load")):
        streams, prompt = int(row["streams"]), int(row["prompt"])
        if "prompts_s" in row:
            yield Sample(
                float(row["prompts_s"]),
                [StepShape(1, prompt, prompt, prompt * (prompt + 1) / 2) for _ in range(streams)],
            )

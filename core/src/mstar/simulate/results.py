"""Measurements from files that ``benchmarks/decode_gpu.py`` wrote. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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


_MOST = 10_000_000
"""Of rows, tokens and steps."""


def read_results(path: Path, shape: str | None = None) -> Results:
    """What *path* says.

    :param shape: of which model's shape, if there are several. :raises SetupError: there is none of that.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SetupError(f"{path} is no JSON: {error}") from None
    shapes = found.get("shapes") if isinstance(found, dict) else None
    if not isinstance(shapes, dict) or not shapes:
        raise SetupError(f"{path} has no measurements of steps ('shapes', as benchmarks/decode_gpu.py writes them)")
    if shape is None and len(shapes) > 1:
        raise SetupError(f"{path} has several shapes; which? --shape {' or '.join(shapes)}")
    name = shape or next(iter(shapes))
    if name not in shapes:
        raise SetupError(f"{path} has no shape {name!r}{nearest(name, shapes)}")
    measured = _Measured(f"{path}: {name}", shapes[name] if isinstance(shapes[name], dict) else {})
    samples = [*_decodes(measured), *_prompts(measured)]
    if len(samples) < 3:
        raise SetupError(f"{path}: {name} has {len(samples)} measurements of steps; at least three are needed")
    return Results(name, _device(found.get("environment")), samples, _known(measured))


class _Measured:
    """A part of the file, whose numbers are looked at as they are taken. *where*: how errors call it."""

    def __init__(self, where: str, values: Mapping[str, Any]):
        self._where, self._values = where, values

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def text(self, key: str, default: str) -> str:
        return str(self._values.get(key, default))

    def part(self, key: str) -> _Measured:
        """The mapping *key*; an empty one where there is none."""
        part = self._values.get(key)
        return _Measured(f"{self._where}: {key}", part if isinstance(part, dict) else {})

    def rows(self, key: str) -> Iterator[_Measured]:
        """The mappings in the list *key*, if there is one."""
        rows = self._values.get(key)
        for number, row in enumerate(rows if isinstance(rows, list) else [], 1):
            if isinstance(row, dict):
                yield _Measured(f"{self._where}, row {number}", row)

    def seconds(self, key: str) -> float:
        """How long something took."""
        return self._number(key, "a number of seconds, more than 0", lambda value: 0 < value < math.inf)

    def amount(self, key: str) -> float:
        """0 or more of something."""
        return self._number(key, "a number, 0 or more", lambda value: 0 <= value < math.inf)

    def count(self, key: str, default: int | None = None) -> int:
        """How many there were of something; *default*: where that is not said."""
        if default is not None and key not in self:
            return default
        return int(
            self._number(
                key, f"a whole number from 1 to {_MOST:,}", lambda value: 1 <= value <= _MOST and value == int(value)
            )
        )

    def _number(self, key: str, wanted: str, fits: Callable[[float], bool]) -> float:
        value = self._values.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not fits(value):
            said = f"is {value!r}" if key in self._values else "is missing"
            raise SetupError(f"{self._where}: {key!r} {said}; it must be {wanted}")
        return value


def _device(environment: Any) -> str:
    """What was measured on, as far as the file says it."""
    gpus = environment.get("gpu") if isinstance(environment, dict) else None
    return str(gpus[0]) if isinstance(gpus, list) and gpus else ""


def _known(shape: _Measured) -> dict[str, float]:
    """The context of all measured steps is the same for each row, so what it costs is not to be learned from them: its
    keys and values are read at the speed of a copy, as the benchmark measured it."""
    floors = shape.part("floors")
    if "copy_bytes_per_s" not in floors or "kv_bytes_per_token" not in floors:
        return {}
    speed = floors.amount("copy_bytes_per_s")
    return {"context": floors.amount("kv_bytes_per_token") / speed} if speed else {}


def _decodes(shape: _Measured) -> Iterator[Sample]:
    rows = [*shape.part("decode").rows("rows")]
    for row in rows or shape.part("summary").rows("decode"):
        if row.text("mode", "greedy") == "greedy" and "step_s" in row:
            batch, context = row.count("batch"), row.amount("context") if rows else 0.0
            yield Sample(row.seconds("step_s"), [StepShape(batch, batch, round(batch * context))])


def _prompts(shape: _Measured) -> Iterator[Sample]:
    for row in shape.part("prefill").rows("rows"):
        tokens, steps = row.count("tokens"), row.count("steps", 1)
        each = -(-tokens // steps)
        shapes = [
            StepShape(1, min(each, tokens - at), min(at + each, tokens), min(each, tokens - at) * (at + each / 2))
            for at in range(0, tokens, each)
        ]
        yield Sample(row.seconds("seconds"), shapes)
    for row in shape.part("load").rows("rows"):
        streams, prompt = row.count("streams"), row.count("prompt")
        if "prompts_s" in row:
            yield Sample(
                row.seconds("prompts_s"),
                [StepShape(1, prompt, prompt, prompt * (prompt + 1) / 2) for _ in range(streams)],
            )

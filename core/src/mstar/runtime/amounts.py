"""How much a request brought and what was made of it, in units that people know: what usage reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mstar.spec.processor import AudioDelta, Delta, FramesDelta
from mstar.spec.request import Amount
from mstar.spec.tasks import Audio, Image, Part, Task, Video

__all__ = ["Made", "brought"]

_UNITS = {"audio": "audio_seconds", "image": "images", "video": "frames"}
"""Modality, of which a worker counts items (samples, say) → the unit that they are reported in."""


def brought(task: Task, prompt_tokens: int) -> dict[str, Amount]:
    """The input of *task*: ``tokens`` of the prompt, ``audio_seconds``, ``pixels`` of images, ``frames`` of videos."""
    amounts: dict[str, Amount] = {"tokens": prompt_tokens} if prompt_tokens else {}
    for part in task.media:
        for unit, amount in _amounts(part):
            amounts[unit] = amounts.get(unit, 0) + amount
    return amounts


def _amounts(part: Part) -> Iterable[tuple[str, Amount]]:
    match part:
        case Image():
            yield "pixels", part.pixels.shape[0] * part.pixels.shape[1]
        case Audio():
            yield "audio_seconds", len(part.samples) / part.rate
        case Video():
            yield "frames", len(part.frames)
            if part.audio is not None:
                yield from _amounts(part.audio)


class Made:
    """Counts an answer's deltas: ``audio_seconds``, ``images``, ``frames`` of videos. Tokens are the engine's to count:
    one answer's text may come from another model than its sound."""

    def __init__(self) -> None:
        self._amounts: dict[str, Amount] = {}

    def add(self, delta: Delta) -> None:
        match delta:
            case AudioDelta():
                self._add("audio_seconds", len(delta.samples) / delta.rate)
            case FramesDelta():
                self._add("images" if delta.fps is None else "frames", len(delta.frames))
            case _:
                pass

    def _add(self, unit: str, amount: Amount) -> None:
        self._amounts[unit] = self._amounts.get(unit, 0) + amount

    def of(self, counted: Mapping[str, Amount]) -> dict[str, Amount]:
        """What a worker *counted* in items, with known units where the deltas had them."""
        rest = {
            name: items
            for name, items in counted.items()
            if _UNITS.get(name) not in self._amounts and (items or name == "tokens")
        }
        return rest | self._amounts

"""Long audio in windows that a model can hear, cut where nobody speaks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mstar.spec.errors import RequestError
from mstar.spec.tasks import Audio, TranscriptionTask

__all__ = ["Levels", "WindowPolicy", "cut", "energy_levels", "rest_of", "spans", "speaks"]

Levels = Callable[[np.ndarray, int], tuple[np.ndarray, int]]
"""(samples, rate) → (one level a frame, samples a frame); lower is quieter. A voice detector's probability of speech
will do (Silero's has frames of 512 samples at 16 kHz); :func:`energy_levels` is the default."""

_FRAME_S = 0.01
_SPEECH_RMS = 0.003  # −50 dBFS: what a quiet room's microphone stays under


@dataclass(frozen=True)
class WindowPolicy:
    """How a family wants long audio cut, in seconds.

    :param window_s: longest window. :param whole_s: longest clip that is heard whole; default: *window_s*.
    :param search_s: how far from an even division a cut may be. :param quiet_s: how long the quietest stretch is whose
        middle becomes the cut. :param levels: what quiet is measured by.
    """

    window_s: float
    whole_s: float | None = None
    search_s: float = 5.0
    quiet_s: float = 0.1
    levels: Levels | None = None

    def within(self, seconds: float | None) -> WindowPolicy:
        """This policy with *seconds* as the longest clip and window, where a request asked for that."""
        return self if seconds is None else dataclasses.replace(self, window_s=seconds, whole_s=seconds)


def energy_levels(samples: np.ndarray, rate: int) -> tuple[np.ndarray, int]:
    """Root mean square of frames of 10 ms; a last, shorter frame counts as one."""
    size = max(1, round(rate * _FRAME_S))
    frames = -(-len(samples) // size)
    squares = np.zeros(frames * size, dtype=np.float32)
    np.square(samples, out=squares[: len(samples)], dtype=np.float32, casting="unsafe")
    return np.sqrt(squares.reshape(frames, size).mean(1)), size


def spans(samples: np.ndarray, rate: int, policy: WindowPolicy) -> list[tuple[int, int]]:
    """Where *samples* (float32 ``[samples]``) are cut: (start, end) of each window, one after the other, none left out.

    One window up to ``policy.whole_s``, else the fewest of at most ``policy.window_s`` that leave room to choose the
    cuts (at least a sixteenth of a window to either side). They are of about equal length: a cut is the middle of the
    quietest stretch near an even division.
    """
    total, longest = len(samples), max(1, int(policy.window_s * rate))
    if total <= max(longest, int((policy.whole_s or 0.0) * rate)):
        return [(0, total)]
    search = int(policy.search_s * rate)
    count = math.ceil(total / max(1, longest - 2 * min(search, longest // 16)))
    levels, size = (policy.levels or energy_levels)(samples, rate)
    quiet = max(1, round(policy.quiet_s * rate / size))
    search = min(search, int(longest - total / count) // 2)  # two cuts so far apart are a window apart still
    cuts = [_quietest(levels, size, number * total // count, search, quiet) for number in range(1, count)]
    return list(pairwise([0, *cuts, total]))


def _quietest(levels: np.ndarray, size: int, even: int, search: int, quiet: int) -> int:
    """The middle, in samples, of the quietest *quiet* frames up to *search* samples from *even*; of several that are
    alike the one nearest to *even*."""
    half = quiet * size // 2  # of the stretch, whose middle is to be in reach
    first = max(0, -(-(even - search - half) // size))
    part = levels[first : (even + search + half) // size].astype(np.float64)
    if len(part) < quiet:
        return even
    means = np.convolve(part, np.ones(quiet) / quiet, "valid")
    alike = np.flatnonzero(means <= means.min() + 1e-9)
    middles = (first + alike) * size + half
    best = int(middles[np.abs(middles - even).argmin()])
    return min(max(best, even - search), even + search)


def cut(task: TranscriptionTask, policy: WindowPolicy) -> Sequence[TranscriptionTask]:
    """*task* in windows, as :meth:`mstar.spec.processor.Processor.windows` returns them. Nothing is copied."""
    audio = task.audio
    if audio is None:  # it is heard live
        return (task,)
    samples = np.asarray(audio.samples)
    pieces = spans(samples, audio.rate, policy)
    if len(pieces) == 1:
        return (task,)
    return [
        dataclasses.replace(task, audio=Audio(samples[a:b], audio.rate), offset=task.offset + a / audio.rate)
        for a, b in pieces
    ]


def speaks(samples: Any, rate: int, shortest_s: float = 0.3) -> bool:
    """Whether *samples* have sound for at least *shortest_s* seconds in all."""
    levels, size = energy_levels(np.asarray(samples), rate)
    return bool((levels > _SPEECH_RMS).sum() * size >= shortest_s * rate)


def rest_of(task: TranscriptionTask, heard_s: float, shortest_s: float = 1.0) -> TranscriptionTask | None:
    """What of *task*'s window comes after *heard_s* seconds, if there is sound in it: a
    :attr:`~mstar.spec.processor.Renderer.follow` of models that sometimes end before their window does.

    :param shortest_s: a shorter rest is not worth hearing again.
    """
    if task.audio is None:
        raise RequestError("a live stream has no rest", param="audio")
    samples, rate = np.asarray(task.audio.samples), task.audio.rate
    start = max(0, int(heard_s * rate))
    tail = samples[start:]
    if start == 0 or len(tail) < shortest_s * rate or not speaks(tail, rate):
        return None
    return dataclasses.replace(task, audio=Audio(tail, rate), offset=task.offset + start / rate)

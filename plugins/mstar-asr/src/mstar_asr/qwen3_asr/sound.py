"""A clip as the encoder takes it: a row for each second. No torch.

A row is float32 ``[1 + CONTEXT + second + CONTEXT]``: how many of its spectrogram frames count (100, in the last row of
a clip what is left), then the second's samples with 200 more on either side, so that its frames are those of the whole
clip's spectrogram. Before a clip's start and after its end these are the clip's reflection; what is missing in the last
row is 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mstar_asr.whisper.request import CONTEXT, HOP, RATE

__all__ = ["SHORTEST", "normalized", "row_width", "sound_rows"]

SHORTEST = RATE // 2
"""Samples of the shortest clip. What is shorter is followed by silence, which counts as sound, as in the reference
(``MIN_ASR_INPUT_SECONDS``)."""

Samples = np.ndarray[Any, np.dtype[np.float32]]


def row_width(frames: int) -> int:
    """Numbers in a row whose second has *frames* frames."""
    return 1 + frames * HOP + 2 * CONTEXT


def normalized(samples: Any) -> Samples:
    """A clip that is louder than full scale is divided by its peak, as in the reference."""
    clip: Samples = np.nan_to_num(np.asarray(samples, np.float32), posinf=1.0, neginf=-1.0)
    peak = float(np.abs(clip).max(initial=0.0))
    return clip / np.float32(peak) if peak > 1.0 else clip


def sound_rows(samples: Samples, frames: int) -> Samples:
    """The rows of a whole clip, ``[n, row_width(frames)]``. *samples*: float32 ``[samples]`` at 16 kHz."""
    if len(samples) < SHORTEST:
        samples = np.pad(samples, (0, SHORTEST - len(samples)))
    total = len(samples) // HOP
    count, size = -(-total // frames), frames * HOP
    known = np.zeros(count * size + 2 * CONTEXT, np.float32)
    padded = np.pad(samples, CONTEXT, mode="reflect")[: len(known)]
    known[: len(padded)] = padded
    rows = np.empty((count, row_width(frames)), np.float32)
    rows[:, 0] = np.minimum(frames, total - frames * np.arange(count))
    rows[:, 1:] = np.lib.stride_tricks.sliding_window_view(known, size + 2 * CONTEXT)[::size]
    return rows

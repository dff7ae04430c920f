"""A clip as windows are taken from it, and where in it somebody speaks. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mstar.processing.speech.vad import RATE as VOICE_RATE
from mstar.processing.speech.vad import VoiceDetector, silero, voice_levels
from mstar.processing.speech.windows import Levels, WindowPolicy, energy_levels, spans
from mstar_asr.whisper.longform import FRAMES_PER_S, frames_of
from mstar_asr.whisper.request import CONTEXT, FRAMES, HOP, RATE, WINDOW
from mstar_asr.whisper.spectrum import loudest

__all__ = ["Clip", "chunks"]

assert VOICE_RATE == RATE
_LEAD = RATE // 2 // 512 * 512
"""Samples that the voice detector hears before those it is asked about: whole frames of it, half a second."""
_ONE_WORD_S = 0.06
"""Seconds of speech that make a window worth hearing: the detector finds more in any word, and less in noise."""
_QUIET_RMS = 0.003


@dataclass(frozen=True, eq=False)
class Clip:
    """:param samples: float32 ``[samples]`` at 16 kHz. :param offset: where it begins in the client's clip, in seconds.
    :param bins: of the mel spectrogram."""

    samples: np.ndarray
    bins: int = 80
    offset: float = 0.0

    @property
    def frames(self) -> int:
        return frames_of(len(self.samples))

    @cached_property
    def loudest(self) -> float:
        """Input ``loudest`` of windows that are not the whole clip."""
        return loudest(self.samples, self.bins)

    def window(self, seek: int) -> np.ndarray:
        """Input ``samples`` of the window that begins at frame *seek* (:mod:`mstar_asr.whisper.request`)."""
        out = np.zeros(WINDOW + 2 * CONTEXT, np.float32)
        start = seek * HOP - CONTEXT
        part = self.samples[max(0, start) : start + len(out)]
        before = max(0, -start)
        out[before : before + len(part)] = part
        if before:
            out[:before] = out[2 * before : before : -1]
        return out

    def speech_s(self, first: int, last: int) -> float:
        """Seconds of speech from frame *first* to frame *last*. Without the detector's weights all that is louder than
        a quiet room counts."""
        start, end = first * HOP, last * HOP
        detector = silero()
        if detector is not None:
            lead = min(_LEAD, start)
            return detector.speech_s(self.samples[start - lead : end], lead)
        levels, size = energy_levels(self.samples[start:end], RATE)
        return float((levels > _QUIET_RMS).sum()) * size / RATE

    def next_speech(self, seek: int, end: int) -> int:
        """Where the first window begins, from frame *seek* on, in which somebody speaks; *end* if there is none."""
        while seek < end:
            following = min(seek + FRAMES, end)
            if self.speech_s(seek, following) > _ONE_WORD_S:
                return seek
            seek = following
        return end


def chunks(clip: Clip) -> Iterator[tuple[int, int]]:
    """*clip* cut where nobody speaks, in stretches of at most 30 s: first frame and the one after the last."""
    policy = WindowPolicy(WINDOW / RATE - 1 / FRAMES_PER_S, levels=_levels(silero()))
    for start, end in spans(clip.samples, RATE, policy):
        yield start // HOP, end // HOP


def _levels(detector: VoiceDetector | None) -> Levels:
    """Where the detector hears nobody; among such moments, where it is quiet."""
    if detector is None:
        return energy_levels
    voices = voice_levels(detector)

    def levels(samples: np.ndarray, rate: int) -> tuple[np.ndarray, int]:
        found, size = voices(samples, rate)
        squares = np.zeros(len(found) * size, np.float32)
        squares[: len(samples)] = np.square(samples)
        return found + np.sqrt(squares.reshape(len(found), size).mean(1)), size

    return levels

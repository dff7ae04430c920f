"""Audio deltas → bytes of one format: the sound of an answer, whole or while it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mstar.spec.processor import AudioDelta
from mstar.spec.sound import channels
from mstar_server.media.encode.audio import AudioEncoder, audio_encoder, encode_audio, encoded_rate

__all__ = ["Sound", "SoundStream", "heavy", "whole_sound"]

Samples = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sound:
    """A file. *rate* and *channels* are those of the file."""

    data: bytes
    rate: int
    channels: int


def heavy(name: str) -> bool:
    """Whether encoding format *name* takes long enough to need a thread."""
    return name not in ("wav", "pcm")


def whole_sound(deltas: Sequence[AudioDelta], name: str) -> Sound | None:
    """*deltas* as one file of format *name*, with exact sizes; ``None`` if there is no sound in them."""
    heard = [delta for delta in deltas if len(delta.samples)]
    if not heard:
        return None
    first = heard[0]
    samples = np.concatenate([_samples(delta, first) for delta in heard])
    data = encode_audio(samples, first.rate, name)
    return Sound(data, encoded_rate(name, first.rate), channels(samples))


class SoundStream:
    """One file of format *name* while its sound is made. Sizes in its header are open-ended.

    :ivar rate: of the file in Hz, and *channels*: known from the first sound on.
    """

    def __init__(self, name: str):
        self.name, self.rate, self.channels = name, 0, 0
        self._first: AudioDelta | None = None
        self._encoder: AudioEncoder | None = None

    @property
    def begun(self) -> bool:
        return self._encoder is not None

    def feed(self, deltas: Iterable[AudioDelta]) -> bytes:
        """The bytes that are ready now; perhaps none."""
        return b"".join([self._feed(delta) for delta in deltas if len(delta.samples)])

    def _feed(self, delta: AudioDelta) -> bytes:
        if self._encoder is None or self._first is None:
            self._first, self.channels = delta, channels(np.asarray(delta.samples))
            self._encoder = audio_encoder(self.name, delta.rate, self.channels)
            self.rate = self._encoder.rate
        return self._encoder.feed(_samples(delta, self._first))

    def finish(self) -> bytes:
        """The rest; nothing if there was no sound."""
        return b"" if self._encoder is None else self._encoder.finish()


def _samples(delta: AudioDelta, first: AudioDelta) -> Samples:
    samples = np.asarray(delta.samples, np.float32)
    if delta.rate != first.rate or samples.shape[1:] != np.shape(first.samples)[1:]:
        raise ValueError(
            f"the model's sound changes from {first.rate} Hz and shape {np.shape(first.samples)} to {delta.rate} Hz "
            f"and shape {samples.shape} within one answer"
        )
    return samples

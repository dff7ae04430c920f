"""Speech that arrives while a request runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from mstar.spec.errors import RequestError
from mstar.spec.processor import Intake
from mstar.spec.request import Push
from mstar.spec.tasks import Audio, Part

__all__ = ["LiveSound"]


class LiveSound(Intake):
    """Sound of any rate becomes samples of the graph's stream, float32 at *rate* Hz, as if it had come at once: however
    a client cuts it, no seam is heard. Bare numbers are samples of that rate already.

    :param stream: the one that sound goes to; others take arrays as they are. :param longest_s: more sound is refused.
    :param remedy: what whoever has more to say can do, for the error.
    """

    def __init__(self, stream: str, rate: int, longest_s: float, remedy: str = ""):
        self._stream, self._rate, self._longest, self._remedy = stream, rate, int(longest_s * rate), remedy
        self._from = 0
        self._resampler: Any = None
        self._count = 0

    def push(self, stream: str, part: Any, request_id: str, end: bool = False) -> Push:
        if stream != self._stream:
            if isinstance(part, Part):
                kind = type(part).__name__.lower()
                raise RequestError(f"stream {stream!r} takes arrays, not {kind}", param=stream)
            return Push(id=request_id, stream=stream, data=part, end=end)
        pieces = [] if part is None else [self._samples(part)]
        if end and self._resampler is not None:
            pieces.append(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
        data = np.concatenate(pieces) if pieces else None
        if data is not None:
            if self._count + len(data) > self._longest:
                message = f"{stream!r}: a live request hears at most {self._longest / self._rate:g} seconds of sound"
                message += f"; {self._remedy}" if self._remedy else ""
                raise RequestError(message, param=stream, code="audio_too_long")
            self._count += len(data)
        return Push(id=request_id, stream=stream, data=data, end=end)

    def _samples(self, part: Any) -> np.ndarray[Any, Any]:
        if not isinstance(part, Audio):
            if isinstance(part, Part):
                kind = type(part).__name__.lower()
                raise RequestError(f"stream {self._stream!r} takes sound, not {kind}", param=self._stream)
            return self._numbers(part)
        samples = self._numbers(part.samples)
        if self._from not in (0, part.rate):
            message = f"{self._stream!r}: the sound has had {self._from} samples a second, and now {part.rate}"
            raise RequestError(message, param=self._stream)
        if not self._from:
            self._from = part.rate
            if part.rate != self._rate:
                import soxr

                self._resampler = soxr.ResampleStream(part.rate, self._rate, 1, dtype="float32")
        return samples if self._resampler is None else self._resampler.resample_chunk(samples)

    def _numbers(self, samples: Any) -> np.ndarray[Any, Any]:
        try:
            found: np.ndarray[Any, Any] = np.asarray(samples, np.float32)
        except (TypeError, ValueError):
            raise RequestError(f"{self._stream!r} takes samples: numbers in -1 to 1", param=self._stream) from None
        if found.ndim != 1:
            message = f"{self._stream!r} takes samples, one after the other, got an array of shape {found.shape}"
            raise RequestError(message, param=self._stream)
        clipped: np.ndarray[Any, Any] = np.clip(np.nan_to_num(found), -1.0, 1.0)
        return clipped

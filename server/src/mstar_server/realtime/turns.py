"""Who speaks when: turns found by the loudness of what comes in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mstar.spec.errors import RequestError, nearest

__all__ = ["TurnDetector", "TurnSettings", "read_turns"]

_FRAME_S = 0.02
_START_FRAMES = 3  # speech is no single click
_FLOOR_FRAMES = 200  # the quietest of the last 4 s is the background
_KNOWN_FRAMES = 50
_QUIETEST_DB, _ROOM_DB, _SPEECH_DB = -70.0, -50.0, -50.0

_EAGERNESS_MS = {"low": 1000, "medium": 600, "auto": 600, "high": 300}


@dataclass(frozen=True)
class TurnSettings:
    """As the protocol's ``server_vad``. :param threshold: 0…1: how far above the background speech must be, 4 to 20 dB.
    :param prefix_padding_ms: of audio before a turn that belong to it. :param silence_duration_ms: that end a turn.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    create_response: bool = True
    interrupt_response: bool = True

    def object(self) -> dict[str, Any]:
        return {
            "type": "server_vad",
            "threshold": self.threshold,
            "prefix_padding_ms": self.prefix_padding_ms,
            "silence_duration_ms": self.silence_duration_ms,
            "idle_timeout_ms": None,
            "create_response": self.create_response,
            "interrupt_response": self.interrupt_response,
        }


_BOUNDS: dict[str, tuple[float, float]] = {
    "threshold": (0, 1),
    "prefix_padding_ms": (0, 5000),
    "silence_duration_ms": (20, 30_000),
}


def read_turns(value: Any, param: str) -> TurnSettings | None:
    """Settings from a client's object; ``None`` where the client wants to commit itself.

    ``semantic_vad`` becomes ``server_vad`` with a silence that its eagerness stands for: what holds is told by the
    session's next event.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") not in ("server_vad", "semantic_vad"):
        kind = value.get("type") if isinstance(value, dict) else value
        known = nearest(str(kind), ("server_vad", "semantic_vad"))
        raise RequestError(f"'{param}.type': {str(kind)[:80]!r} is unknown{known}", param=f"{param}.type")
    fields = dict(value)
    semantic = fields.pop("type") == "semantic_vad"
    if fields.pop("idle_timeout_ms", None) is not None:
        where = f"{param}.idle_timeout_ms"
        raise RequestError(f"{where!r} is not supported", param=where, code="unsupported_parameter")
    if semantic:
        eagerness = fields.pop("eagerness", None) or "auto"
        if eagerness not in _EAGERNESS_MS:
            where = f"{param}.eagerness"
            message = f"{where!r}: {str(eagerness)[:80]!r} is unknown{nearest(str(eagerness), _EAGERNESS_MS)}"
            raise RequestError(message, param=where)
        fields.setdefault("silence_duration_ms", _EAGERNESS_MS[eagerness])
    known_fields = (*_BOUNDS, "create_response", "interrupt_response")
    for name, given in fields.items():
        where = f"{param}.{name}"
        if name not in known_fields:
            message = f"unknown parameter {where[:160]!r}{nearest(name, known_fields)}"
            raise RequestError(message, param=where, code="unknown_parameter")
        if given is not None:
            _check(name, given, where)
    return TurnSettings(**{name: given for name, given in fields.items() if given is not None})


def _check(name: str, value: Any, where: str) -> None:
    if name not in _BOUNDS:
        if not isinstance(value, bool):
            raise RequestError(f"{where!r} must be true or false", param=where)
        return
    low, high = _BOUNDS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or (name.endswith("_ms") and value != int(value)):
        raise RequestError(f"{where!r} must be a number", param=where)
    if not low <= value <= high:
        near = min(max(value, low), high)
        raise RequestError(f"{where!r} must be {low:g}…{high:g}; the nearest valid value is {near:g}", param=where)


class TurnDetector:
    """Fed with samples, it tells where speech starts and stops, in samples since it was made.

    Speech is louder than the background by a margin, for longer than a click; the background is the quietest of the
    last seconds, so that a steady noise is none.
    """

    def __init__(self, settings: TurnSettings, rate: int):
        self.settings, self.rate = settings, rate
        self.speaking = False
        self._frame = int(rate * _FRAME_S)
        self._rest = np.zeros(0, np.float32)
        self._levels: deque[float] = deque(maxlen=_FLOOR_FRAMES)
        self._at = 0  # samples judged
        self._loud = self._quiet = 0  # frames in a row

    def feed(self, samples: np.ndarray) -> Iterator[tuple[Literal["started", "stopped"], int]]:
        samples = np.concatenate([self._rest, samples])
        frames = len(samples) // self._frame
        self._rest = samples[frames * self._frame :]
        shaped = samples[: frames * self._frame].reshape(frames, self._frame)
        rms = np.sqrt(np.square(shaped, dtype=np.float32).mean(1))
        for level in 20 * np.log10(np.maximum(rms, 1e-6)):
            self._at += self._frame
            if event := self._judge(float(level)):
                yield event

    def _judge(self, level: float) -> tuple[Literal["started", "stopped"], int] | None:
        self._levels.append(max(level, _QUIETEST_DB))
        # until a second is known, the background is taken to be a room's: who begins at once is heard
        floor = min(self._levels) if len(self._levels) >= _KNOWN_FRAMES else _ROOM_DB
        margin = 4 + 16 * self.settings.threshold
        loud = level > max(_SPEECH_DB, floor + margin - (4 if self.speaking else 0))
        self._loud, self._quiet = (self._loud + 1, 0) if loud else (0, self._quiet + 1)
        if not self.speaking and self._loud >= _START_FRAMES:
            self.speaking = True
            return "started", self._at - self._loud * self._frame
        if self.speaking and self._quiet * _FRAME_S * 1000 >= self.settings.silence_duration_ms:
            self.speaking = False
            return "stopped", self._at
        return None

    def reset(self) -> None:
        """The turn has ended otherwise: what comes next may start one."""
        self.speaking, self._loud, self._quiet = False, 0, 0

"""A whole answer, put together from its deltas: what the offline API and the client return."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mstar.spec.processor import ArrayDelta, AudioDelta, Delta, FramesDelta, SegmentDelta, TextDelta
from mstar.spec.request import TokenLogprob, Usage

__all__ = ["Result"]

D = TypeVar("D", bound=Delta)


@dataclass(frozen=True, kw_only=True)
class Result:
    """All that one request produced.

    :param outputs: what came on each stream, joined: its text, audio, video. Images and arrays stay apart.
    :param tokens: ids of the generated tokens of all text. :param finish_reason: why the answer ended.
    """

    outputs: dict[str, list[Delta]]
    finish_reason: str
    usage: Usage
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, deltas: Iterable[Delta], finish_reason: str, usage: Usage) -> Result:
        """The result of a request that has ended well with *deltas*."""
        streams: dict[str, list[Delta]] = {}
        for delta in deltas:
            streams.setdefault(delta.stream, []).append(delta)
        texts = [delta for stream in streams.values() for delta in stream if isinstance(delta, TextDelta)]
        return cls(
            outputs={stream: _joined(found) for stream, found in streams.items()},
            finish_reason=finish_reason,
            usage=usage,
            tokens=tuple(token for text in texts for token in text.tokens),
            logprobs=tuple(logprob for text in texts for logprob in text.logprobs),
        )

    @property
    def text(self) -> str:
        """The generated text; empty when there is none."""
        return "".join(delta.text for delta in self._all(TextDelta))

    @property
    def audio(self) -> AudioDelta | None:
        """The first audio stream, whole."""
        return next(iter(self._all(AudioDelta)), None)

    @property
    def images(self) -> list[NDArray[np.uint8]]:
        """Images, uint8 ``[H, W, 3]`` each."""
        return [image for delta in self._all(FramesDelta) if delta.fps is None for image in delta.frames]

    @property
    def video(self) -> FramesDelta | None:
        """The first video stream, whole."""
        return next((delta for delta in self._all(FramesDelta) if delta.fps is not None), None)

    @property
    def arrays(self) -> list[Any]:
        """Actions, states, embeddings… in the order in which they came."""
        return [delta.data for delta in self._all(ArrayDelta)]

    @property
    def segments(self) -> list[SegmentDelta]:
        """A transcript's pieces with their times, in order."""
        return self._all(SegmentDelta)

    def _all(self, kind: type[D]) -> list[D]:
        return [delta for found in self.outputs.values() for delta in found if isinstance(delta, kind)]


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Deltas of one stream, with neighbours of one kind made one."""
    joined: list[Delta] = []
    for _, run in groupby(deltas, key=_kind):
        joined.extend(_join(list(run)))
    return joined


def _kind(delta: Delta) -> tuple[type, float | None]:
    """What may be joined: texts, audio of one rate, frames of one video; ``None`` for what stays apart."""
    match delta:
        case AudioDelta():
            return AudioDelta, delta.rate
        case FramesDelta():
            return FramesDelta, delta.fps
        case _:
            return type(delta), None


def _join(run: list[Any]) -> list[Delta]:
    first = run[0]
    match first:
        case TextDelta():
            tokens = tuple(token for delta in run for token in delta.tokens)
            logprobs = tuple(logprob for delta in run for logprob in delta.logprobs)
            return [TextDelta("".join(delta.text for delta in run), tokens, logprobs, first.stream)]
        case AudioDelta():
            return [AudioDelta(np.concatenate([delta.samples for delta in run]), first.rate, first.stream)]
        case FramesDelta() if first.fps is not None:
            return [FramesDelta(np.concatenate([delta.frames for delta in run]), first.fps, first.stream)]
        case _:
            return run

"""Listeners: streams of speech from one worker in this process, and what each of them would have heard when."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import percentiles
from gpu.engine import STALLED_S, EngineError, Loop

from mstar.plugins import load_plugins
from mstar.registry import Registry, load_object
from mstar.runtime.deployment_files import packaged_deployment
from mstar.settings import Settings
from mstar.spec.deployment import merge_deployment
from mstar.spec.knobs import read_options, validate_knobs
from mstar.spec.processor import AudioDelta, ProcessorContext, Renderer
from mstar.spec.request import Done, Emit, Failed
from mstar.spec.tasks import SpeechTask
from speech.families import Family

__all__ = ["Heard", "Speaker", "figures", "playback", "run_streams", "until"]

RATE = 24_000


@dataclass
class Heard:
    """One answer. :param asked: when. :param arrivals: (when, samples) of each piece of sound that came.
    :param open: how many of its requests run."""

    asked: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    open: int = 0
    fault: str | None = None

    @property
    def first_s(self) -> float:
        return self.arrivals[0][0] - self.asked

    @property
    def audio_s(self) -> float:
        return sum(samples for _, samples in self.arrivals) / RATE

    @property
    def ended(self) -> float:
        return self.arrivals[-1][0]


def playback(heard: Heard) -> float:
    """The longest silence, in seconds, of a player that begins with the first piece and plays what it has: how late the
    latest piece was. 0: gapless."""
    (begun, _), worst, played = heard.arrivals[0], 0.0, 0
    for when, samples in heard.arrivals:
        worst = max(worst, when - begun - played / RATE)
        played += samples
    return worst if len(heard.arrivals) > 1 else 0.0


class Speaker(Loop):
    """A worker and its model's processor. An answer of several pieces (each of which comes as one sound) is asked piece
    by piece, the next one when the one before has come, as the server does."""

    def __init__(self, family: Family, folder: Path, options: Mapping[str, Any]):
        settings = Settings(plugins=(), extra_plugins=("mstar_tts.plugin",), accept_licences=(family.key,))
        registry = Registry(load_plugins(settings))
        super().__init__(registry, family.key, folder, options)
        spec = registry.model(family.key)
        merged = merge_deployment(spec.key, packaged_deployment(spec), dict(options))
        context = ProcessorContext(spec, folder, read_options(spec.options, merged.model_kwargs))
        self.family, self.spec = family, spec
        self.processor = load_object(spec.processor)(context)
        self.heard: dict[str, Heard] = {}  # of a request, by its id
        self._renderers: dict[str, Renderer] = {}
        self._rest: dict[str, list[SpeechTask]] = {}
        self._seeds = itertools.count(1)
        self.keep: dict[str, list[np.ndarray]] | None = None  # the sound itself, where somebody wants it

    def speak(self, seconds: float, **knobs: Any) -> Heard:
        """Ask for so many seconds."""
        given = {"seed": next(self._seeds), **self.family.knobs(seconds), **knobs}
        task = SpeechTask(knobs=validate_knobs(self.spec.knobs, given), text=self.family.text, want=("audio",))
        heard, pieces = Heard(time.perf_counter()), list(self.processor.pieces(task))
        if self.family.steps_per_s and len(pieces) > 1:
            raise ValueError("the text is too long to be one stream of codes")
        self._ask(heard, pieces)
        return heard

    def _ask(self, heard: Heard, tasks: list[SpeechTask]) -> None:
        task, *rest = tasks
        prepared = self.processor.prepare(task, self.name())
        name = self.ask(prepared.request)
        heard.open += 1
        self.heard[name], self._renderers[name], self._rest[name] = heard, self.processor.renderer(task, prepared), rest

    def busy(self, heard: Heard) -> bool:
        return heard.open > 0

    def take(self) -> int:
        found = 0
        for event in self.worker.events():
            if isinstance(event, Emit):
                found += self._hear(event.id, self._renderers[event.id].feed(event))
                self.worker.ack(event.id, event.stream, 1)
                continue
            found += self._hear(event.id, self._renderers[event.id].finish(event if isinstance(event, Done) else None))
            if isinstance(event, Failed):
                raise EngineError(f"{event.code}: {event.message}")
            self._next(event.id)
            self.heard.pop(event.id).open -= 1
            del self._renderers[event.id]
            self.ended.add(event.id)
        return found

    def _hear(self, name: str, deltas: Any) -> int:
        count, now = 0, time.perf_counter()
        for delta in deltas:
            if not isinstance(delta, AudioDelta) or not len(delta.samples):
                continue
            heard = self.heard[name]
            heard.arrivals.append((now, len(delta.samples)))
            if not np.isfinite(delta.samples).all() or np.abs(delta.samples).max() > 1:
                heard.fault = "the sound is not within -1 and 1"
            if self.keep is not None:
                self.keep.setdefault(name, []).append(np.asarray(delta.samples))
            count += 1
        if count:
            self._next(name)
        return count

    def _next(self, name: str) -> None:
        rest = self._rest.get(name)
        if rest:
            self._rest[name] = []
            self._ask(self.heard[name], rest)


def run_streams(speaker: Speaker, streams: int, seconds: float, rounds: int) -> dict[str, Any]:
    """*streams* listeners at once: first all come together (``burst``), then each, having begun at a time of its own,
    asks again as soon as it has heard its answer, *rounds* times (``steady``)."""
    burst = [speaker.speak(seconds) for _ in range(streams)]
    until(speaker, burst)
    began = last = time.perf_counter()
    spread = max(h.ended - h.asked for h in burst) / streams
    answers: list[list[Heard]] = [[] for _ in range(streams)]
    while any(len(own) < rounds + 1 or speaker.busy(own[-1]) for own in answers):
        now = time.perf_counter()
        for number, own in enumerate(answers):
            due = began + number * spread
            if (not own and now >= due) or (own and len(own) <= rounds and not speaker.busy(own[-1])):
                own.append(speaker.speak(seconds))
        if speaker.step() or not speaker.heard:
            last = time.perf_counter()
        elif now - last > STALLED_S:
            raise EngineError(_stalled(speaker))
        if not speaker.heard:
            time.sleep(1e-4)  # nobody has come yet
    steady = [heard for own in answers for heard in own[1:]]
    faults = {heard.fault for heard in (*burst, *steady)} - {None}
    if faults:
        raise AssertionError("; ".join(map(str, faults)))
    return {"streams": streams, "burst": figures(burst), "steady": figures(steady)}


def until(speaker: Speaker, answers: Sequence[Heard]) -> None:
    """Step until all *answers* have been heard.

    :raises EngineError: nothing is heard any more.
    """
    last = time.monotonic()
    while any(speaker.busy(heard) for heard in answers):
        if speaker.step():
            last = time.monotonic()
        elif time.monotonic() - last > STALLED_S:
            raise EngineError(_stalled(speaker))


def _stalled(speaker: Speaker) -> str:
    return f"no sound for {STALLED_S:.0f} s; the worker says {speaker.worker.status()}"


def figures(answers: Sequence[Heard]) -> dict[str, Any]:
    """What *answers* were like to their listeners."""
    silences = [playback(heard) for heard in answers]
    span = max(heard.ended for heard in answers) - min(heard.asked for heard in answers)
    return {
        "first_audio_ms": percentiles([1e3 * heard.first_s for heard in answers], (50, 95)),
        "real_time_factor": percentiles([(h.ended - h.asked) / h.audio_s for h in answers], (50, 95)),
        "audio_s_per_s": math.fsum(heard.audio_s for heard in answers) / span,
        "gapless": sum(silence <= 1e-3 for silence in silences) / len(silences),
        "late_ms": percentiles([1e3 * silence for silence in silences], (50, 95)),
        "span_s": span,
    }

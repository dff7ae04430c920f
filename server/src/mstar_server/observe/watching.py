"""From what happens to metrics, spans and lines of statistics: one watcher for a server, one watch for a request."""

from __future__ import annotations

import time
from typing import Any

from starlette.datastructures import Headers

from mstar.runtime.watch import Outcome
from mstar.spec.errors import RequestError
from mstar.spec.model import ModelSpec
from mstar.spec.processor import ArrayDelta, AudioDelta, Delta
from mstar.spec.request import Emit, EngineRequest, Event, Profile
from mstar.spec.tasks import Task
from mstar_server.exchange import Exchange, current
from mstar_server.observe.catalog import REASONS
from mstar_server.observe.metrics import Bins, Metrics
from mstar_server.observe.stats import log_stats
from mstar_server.observe.tracing import Tracing

__all__ = ["Observer"]

_OUTPUT = {
    "tokens": "mstar_generated_tokens_total",
    "audio_seconds": "mstar_audio_output_seconds_total",
    "images": "mstar_images_total",
    "frames": "mstar_frames_total",
}
_INPUT = {
    "tokens": "mstar_prompt_tokens_total",
    "audio_seconds": "mstar_audio_input_seconds_total",
    "pixels": "mstar_input_pixels_total",
    "frames": "mstar_input_frames_total",
}
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WEBSOCKET")


class Observer:
    """Watches the exchanges and the services of one server.

    :param tracing: ``None``: nobody traces. :param stats: log one line for each request to a model.
    """

    def __init__(self, metrics: Metrics, tracing: Tracing | None = None, stats: bool = False):
        self.metrics, self.tracing, self.stats = metrics, tracing, stats

    @property
    def profiles(self) -> bool:
        """Whether workers are to tell where each request's time goes."""
        return self.tracing is not None or self.stats

    def close(self) -> None:
        """Send out what traces are left."""
        if self.tracing is not None:
            self.tracing.close()

    def begin(self, spec: ModelSpec, task: Task, request_id: str) -> RequestWatch:
        return RequestWatch(self, spec.key, request_id, current())

    def exchange_begins(self, exchange: Exchange, headers: Headers) -> None:
        self.metrics.move("mstar_http_requests_running", 1)
        if self.tracing is not None:
            self.tracing.exchange_begins(exchange, headers)

    def exchange_ends(self, exchange: Exchange) -> None:
        self.metrics.move("mstar_http_requests_running", -1)
        method = exchange.scope.get("method", "WEBSOCKET")
        method = method if method in _METHODS else "other"
        self.metrics.count("mstar_http_requests_total", 1, exchange.route, method, str(exchange.status))
        self.metrics.observe("mstar_http_request_duration_seconds", time.monotonic() - exchange.began, exchange.route)
        if self.tracing is not None:
            self.tracing.exchange_ends(exchange)


class RequestWatch:
    """One request to a model. Times are monotonic seconds, ``None`` for what has not happened.

    :ivar arrived: when its HTTP request did.
    """

    def __init__(self, observer: Observer, model: str, request_id: str, exchange: Exchange | None):
        self.model, self.id = model, request_id
        self.exchange_id = "" if exchange is None else exchange.id
        self.route = "none" if exchange is None else exchange.route
        self.asked = time.monotonic()
        self.arrived = self.asked if exchange is None else exchange.began
        self.submitted: float | None = None
        self.first: float | None = None
        self.first_audio: float | None = None
        self.last = 0.0
        self.outputs = 0
        self.arrays = 0
        self.span: Any = None
        self._observer = observer
        self._gaps: Bins = observer.metrics.gaps[model]
        observer.metrics.move("mstar_requests_running", 1, model)
        if observer.tracing is not None:
            self.span = observer.tracing.request_begins(self, None if exchange is None else exchange.span)

    def prepared(self, request: EngineRequest) -> None:
        self.submitted = time.monotonic()
        request.profile = self._observer.profiles
        if self._observer.tracing is not None:
            request.traceparent = self._observer.tracing.traceparent(self.span)

    def heard(self, event: Event) -> None:
        if type(event) is Emit:
            now = time.monotonic()
            if self.outputs:
                self._gaps.add(now - self.last)
            else:
                self.first = now
            self.last = now
            self.outputs += 1

    def made(self, delta: Delta) -> None:
        if isinstance(delta, AudioDelta):
            if self.first_audio is None and len(delta.samples):
                self.first_audio = time.monotonic()
        elif isinstance(delta, ArrayDelta):
            self.arrays += 1

    def ended(self, outcome: Outcome, profile: Profile | None) -> None:
        observer, reason = self._observer, reason_of(outcome)
        _count(observer.metrics, self, outcome, reason)
        if observer.tracing is not None:
            observer.tracing.request_ends(self, outcome, reason, profile)
        if observer.stats:
            log_stats(self, outcome, reason, profile)


def reason_of(outcome: Outcome) -> str:
    """One of :data:`~mstar_server.observe.catalog.REASONS`."""
    if outcome.error is not None:
        status = outcome.error.status if isinstance(outcome.error, RequestError) else 500
        if isinstance(outcome.error, Exception):
            return "timeout" if status == 504 else "failed" if status >= 500 else "refused"
        return "left"  # its task was cancelled
    if outcome.reason is None:
        return "left"
    return outcome.reason if outcome.reason in REASONS[:5] else "other"


def _count(metrics: Metrics, watch: RequestWatch, outcome: Outcome, reason: str) -> None:
    model = watch.model
    metrics.move("mstar_requests_running", -1, model)
    metrics.count("mstar_requests_total", 1, model, watch.route, reason)
    metrics.observe("mstar_request_duration_seconds", outcome.ended - watch.arrived, model, watch.route)
    if watch.submitted is not None:
        metrics.observe("mstar_request_prepare_seconds", watch.submitted - watch.asked, model)
    if watch.first is not None:
        metrics.observe("mstar_time_to_first_output_seconds", watch.first - watch.arrived, model)
    if watch.first_audio is not None:
        metrics.observe("mstar_time_to_first_audio_seconds", watch.first_audio - watch.arrived, model)
    if watch.first is not None and outcome.tokens > 1:
        each = (watch.last - watch.first) / (outcome.tokens - 1)
        metrics.observe("mstar_time_per_output_token_seconds", each, model)
    if watch.arrays:
        metrics.count("mstar_actions_total", watch.arrays, model)
    _count_usage(metrics, watch, outcome)


def _count_usage(metrics: Metrics, watch: RequestWatch, outcome: Outcome) -> None:
    model, usage = watch.model, outcome.usage
    if usage is None:  # it did not end well; what it cost all the same, as far as that is known
        metrics.count("mstar_prompt_tokens_total", outcome.prompt_tokens, model)
        metrics.count("mstar_generated_tokens_total", outcome.tokens, model)
        return
    for amounts, names in ((usage.input, _INPUT), (usage.output, _OUTPUT)):
        for unit, amount in amounts.items():
            if unit in names:
                metrics.count(names[unit], amount, model)
    metrics.count("mstar_cached_tokens_total", usage.cached, model)
    if usage.run_s:  # unknown for an answer that a stop string ended
        metrics.observe("mstar_request_queue_seconds", usage.queued_s, model)
        metrics.observe("mstar_request_run_seconds", usage.run_s, model)
    if made := usage.output.get("audio_seconds"):
        factor = (outcome.ended - watch.arrived) / made
        metrics.observe("mstar_audio_real_time_factor", factor, model, "out")
    elif (heard := usage.input.get("audio_seconds")) and usage.run_s:
        metrics.observe("mstar_audio_real_time_factor", usage.run_s / heard, model, "in")

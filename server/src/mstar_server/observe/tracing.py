"""OpenTelemetry: one trace for a request, from the HTTP exchange to the worker's stages.

A client's ``traceparent`` is continued. Below the exchange's span each request to a model has one, and below that
``prepare``, ``queue`` and one span for each entry of a node that worked for it: a stage, not a call, since an answer
may have thousands. The worker measures the stages and sends them with the request's last event; spans are made here, so
that a worker needs neither exporter nor network. Plugins in the worker find the ``traceparent`` in the request.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from mstar import __version__
from mstar.runtime.watch import Outcome
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.request import Profile

if TYPE_CHECKING:
    from mstar_server.exchange import Exchange
    from mstar_server.observe.watching import RequestWatch

__all__ = ["Tracing", "open_tracing"]


def open_tracing(endpoint: str) -> Tracing:
    """Traces that go to the OTLP collector at *endpoint* (``http://host:4318``), over HTTP.

    Raises :class:`SetupError` when the exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SetupError(
            f"--otel needs packages that are not installed ({error.name}); run `pip install 'mstar-server[otel]'`"
        ) from None
    url = endpoint if endpoint.rstrip("/").endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=5)))


class Tracing:
    """:param processor: an OpenTelemetry ``SpanProcessor``: where spans go."""

    def __init__(self, processor: Any):
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "mstar", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("mstar", __version__)
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()

    def close(self) -> None:
        """Send what is left. Takes as long as the exporter's time-out when the collector does not answer."""
        self._provider.shutdown()

    def exchange_begins(self, exchange: Exchange, headers: Headers) -> None:
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        exchange.span = self._tracer.start_span(
            exchange.scope["type"],
            self._propagator.extract(carrier),
            self._trace.SpanKind.SERVER,
            {"http.request.method": exchange.scope.get("method", "GET"), "mstar.request.id": exchange.id},
        )

    def exchange_ends(self, exchange: Exchange) -> None:
        span = exchange.span
        span.update_name(f"{exchange.scope.get('method', 'WEBSOCKET')} {exchange.route}")
        span.set_attributes({"http.route": exchange.route, "http.response.status_code": exchange.status})
        if exchange.status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end()

    def request_begins(self, watch: RequestWatch, parent: Any) -> Any:
        """A span for one request to a model, below that of its exchange."""
        return self._tracer.start_span(
            f"generate {watch.model}",
            None if parent is None else self._trace.set_span_in_context(parent),
            attributes={"gen_ai.request.model": watch.model, "gen_ai.response.id": watch.id},
        )

    def traceparent(self, span: Any) -> str:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return carrier.get("traceparent", "")

    def request_ends(self, watch: RequestWatch, outcome: Outcome, reason: str, profile: Profile | None) -> None:
        span = watch.span
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": outcome.prompt_tokens,
                "gen_ai.usage.output_tokens": outcome.tokens,
                "gen_ai.response.finish_reasons": [reason],
            }
        )
        if isinstance(outcome.error, Exception):
            code = outcome.error.code if isinstance(outcome.error, RequestError) else type(outcome.error).__name__
            span.set_attribute("error.type", code or "error")
            span.set_status(self._trace.StatusCode.ERROR)  # without the message: it may repeat what a client wrote
        clock = time.time() - time.monotonic()
        if watch.submitted is not None:
            self._child(span, "prepare", watch.asked + clock, watch.submitted + clock)
        for name, when in (("first output", watch.first), ("first audio", watch.first_audio)):
            if when is not None:
                span.add_event(name, timestamp=_ns(when + clock))
        if profile is not None:
            self._worker(span, profile)
        span.end(_ns(outcome.ended + clock))

    def _worker(self, span: Any, profile: Profile) -> None:
        waited = profile.ended_s if profile.queued_s is None else profile.queued_s
        self._child(span, "queue", profile.arrived, profile.arrived + waited)
        for stage in profile.stages:
            facts = {
                "mstar.calls": stage.calls,
                "mstar.tokens": stage.tokens,
                "mstar.mean_rows": stage.rows / stage.calls,
            }
            name = f"{stage.node}.{stage.entry}"
            self._child(span, name, profile.arrived + stage.first, profile.arrived + stage.last, facts)

    def _child(
        self, parent: Any, name: str, start: float, end: float, attributes: dict[str, Any] | None = None
    ) -> None:
        context = self._trace.set_span_in_context(parent)
        self._tracer.start_span(name, context, attributes=attributes, start_time=_ns(start)).end(_ns(end))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

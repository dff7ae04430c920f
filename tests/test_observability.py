"""Metrics, traces and logs of a real server: what they say is what happened, and nothing that a client wrote."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from mstar.log_format import JsonFormatter
from mstar_server.observe import tracing as tracing_module
from mstar_server.observe.catalog import CATALOG, REASONS

from .serving import Server, serving

MODELS = ("mini_chat", "mini_denoise")
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Lines(logging.Handler):
    """Keeps log lines as they would be written."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture(scope="module")
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def lines() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="module")
def server(spans: InMemorySpanExporter, lines: Lines) -> Iterator[Server]:
    """The worker of one model is a process of its own: its part of a trace crosses over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mstar_server.app.open_tracing", lambda url: tracing_module.Tracing(SimpleSpanProcessor(spans)))
        extra = ("mstar.testing.miniatures",)
        options = {"otel": "http://none", "log_stats": True}
        with serving(*MODELS, extra_plugins=extra, server_options=options) as running:
            yield running


def scraped(server: Server) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
    }


def value(found: dict[Any, float], name: str, **labels: str) -> float:
    return found.get((name, tuple(sorted(labels.items()))), 0.0)


def chat(server: Server, text: str, tokens: int, **more: Any) -> httpx.Response:
    body = {"model": "mini_chat", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, **more}
    return server.http.post("/v1/chat/completions", json=body)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_metrics_say_what_happened(server: Server) -> None:
    before = scraped(server)
    asked: Any = {"model": "mini_chat", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 7}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        usage = [client.chat.completions.create(**asked).usage for _ in range(3)]
    assert chat(server, "abc", 7, temperature=-1).status_code == 400
    route = "/v1/chat/completions"
    until(lambda: value(scraped(server), "mstar_http_requests_total", route=route, method="POST", status="400"))
    after = scraped(server)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("mstar_requests_total", model="mini_chat", route=route, reason="length") == 3
    assert grown("mstar_http_requests_total", route=route, method="POST", status="200") == 3
    assert grown("mstar_http_requests_total", route=route, method="POST", status="400") == 1
    assert grown("mstar_generated_tokens_total", model="mini_chat") == 21
    assert grown("mstar_prompt_tokens_total", model="mini_chat") == sum(u.prompt_tokens for u in usage if u)
    assert grown("mstar_time_to_first_output_seconds_count", model="mini_chat") == 3
    assert grown("mstar_inter_output_seconds_count", model="mini_chat") == 3 * 6
    assert grown("mstar_request_queue_seconds_count", model="mini_chat") == 3
    assert value(after, "mstar_requests_running", model="mini_chat") == 0
    assert value(after, "mstar_worker_up", model="mini_chat") == 1
    assert value(after, "mstar_worker_requests_running", model="mini_chat") == 0
    rows = [k for k in after if k[0] == "mstar_worker_batch_rows_sum" and ("model", "mini_chat") in k[1]]
    assert sum(after[k] - before.get(k, 0) for k in rows) >= 21
    assert value(after, "mstar_memory_bytes", model="mini_chat", kind="resident") > 1e7
    assert abs(value(after, "mstar_worker_start_time_seconds", model="mini_chat") - time.time()) < 600
    known = {name.removesuffix("_total") for name in CATALOG}
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    assert {f.name for f in families if not f.name.endswith("_created")} <= known | set(CATALOG)


def test_images_and_their_steps_are_counted(server: Server) -> None:
    before = scraped(server)
    reply = server.http.post(
        "/generate", data={"model": "mini_denoise", "text": "abc", "model_kwargs": json.dumps({"steps": 3})}
    )
    assert reply.status_code == 200, reply.text
    after = scraped(server)
    key = "mstar_images_total", (("model", "mini_denoise"),)
    assert after[key] - before.get(key, 0.0) == 1
    key = "mstar_denoise_steps_total", (("entry", "update"), ("model", "mini_denoise"), ("node", "denoiser"))
    assert after[key] - before.get(key, 0.0) == 3


def test_a_client_that_leaves_is_counted_once(server: Server) -> None:
    labels = {"model": "mini_chat", "route": "/v1/chat/completions"}

    def ended() -> float:
        found = scraped(server)
        return sum(value(found, "mstar_requests_total", reason=reason, **labels) for reason in REASONS)

    before = ended()
    body = {"model": "mini_chat", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 200, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        assert value(scraped(server), "mstar_http_requests_running") >= 1
    until(lambda: ended() > before)
    until(lambda: value(scraped(server), "mstar_requests_running", model="mini_chat") == 0)
    assert ended() == before + 1


def test_one_trace_from_the_client_to_the_worker(server: Server, spans: InMemorySpanExporter) -> None:
    spans.clear()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-ID": "traced-1"}
    body = {"model": "mini_chat", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 9}
    assert server.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    until(lambda: any(span.name.startswith("POST") for span in spans.get_finished_spans()))
    found = {span.name: span for span in spans.get_finished_spans() if span.context.trace_id == int(TRACE, 16)}
    exchange, request = found["POST /v1/chat/completions"], found["generate mini_chat"]
    assert exchange.parent is not None
    assert exchange.parent.span_id == int(PARENT, 16)
    assert exchange.attributes is not None
    assert request.attributes is not None
    assert exchange.attributes["http.response.status_code"] == 200
    assert exchange.attributes["mstar.request.id"] == "traced-1"
    assert parent(request) == exchange.context.span_id
    assert request.attributes["gen_ai.usage.output_tokens"] == 9
    stages = [span for span in found.values() if span not in (exchange, request)]
    assert all(parent(span) == request.context.span_id for span in stages)
    assert {"prepare", "queue"} < {span.name for span in stages}
    work = [span for span in stages if span.name not in ("prepare", "queue")]
    assert sum(int(span.attributes["mstar.calls"]) for span in work if span.attributes) >= 9
    assert [event.name for event in request.events] == ["first output"]
    for span in stages:  # a worker's clock is the same clock
        assert request.start_time <= span.start_time + 5_000_000
        assert span.end_time <= request.end_time + 50_000_000


def parent(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def test_stats_of_a_request_are_one_line(server: Server, lines: Lines) -> None:
    reply = chat(server, "abc", 5).json()
    found = [json.loads(line) for line in lines.lines if '"mstar.stats"' in line]
    (mine,) = [line for line in found if line["answer"] == reply["id"]]
    assert (mine["tokens"], mine["reason"], mine["model"]) == (5, "length", "mini_chat")
    assert 0 <= mine["queued_s"] <= mine["first_output_s"] <= mine["total_s"] < 60
    assert any(isinstance(figures, dict) and figures["calls"] >= 4 for figures in mine.values())


def test_no_log_line_and_no_span_has_what_a_client_wrote(
    server: Server, lines: Lines, spans: InMemorySpanExporter
) -> None:
    secret, key = "xyzzyplugh", "sk-verysecret"
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": "mini_chat", "messages": [{"role": "user", "content": secret}], "max_tokens": 3}
    for change in ({}, {"stream": True}, {"temperature": secret}, {"nonsense": secret}, {"stop": [secret]}):
        server.http.post("/v1/chat/completions", json={**body, **change}, headers=headers, params={"api_key": key})
    server.http.post("/generate", data={"model": "mini_chat", "text": secret, "model_kwargs": "{" + secret})
    server.http.post("/v1/completions", json={"model": "mini_chat", "prompt": secret, "echo": True}, headers=headers)
    ours = [line for line in lines.lines if json.loads(line)["logger"].startswith("mstar")]
    assert any("/v1/chat/completions" in line for line in ours)
    for text in (*ours, *(span.to_json() for span in spans.get_finished_spans())):
        assert secret not in text
        assert key not in text

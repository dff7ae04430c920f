"""``/metrics`` and what feeds it: exchanges, requests, workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mstar.cluster.base import Phase
from mstar.runtime.watch import Outcome
from mstar.spec.errors import RequestError
from mstar.spec.request import Usage
from mstar_server.observe import watching
from mstar_server.observe.catalog import CATALOG, REASONS
from mstar_server.routes import metrics as route


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, sorted labels) → value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def names(text: str) -> Iterator[str]:
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):  # when a counter began: the library's own
            continue
        yield family.name + ("_total" if family.type == "counter" else "")


async def test_it_answers_while_a_model_loads(kit: Any) -> None:
    service = kit.Service()
    service.phase = Phase(name="weights", progress=0.5)
    async with kit.client(service) as client:
        reply = await client.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain")
    found = samples(reply.text)
    assert found["mstar_model_ready", (("model", "tiny"),)] == 0
    assert found["mstar_model_phase", (("model", "tiny"), ("phase", "weights"))] == 1
    assert found["mstar_worker_up", (("model", "tiny"),)] == 0


async def test_a_worker_that_hangs_does_not_hang_it(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "STATUS_TIMEOUT_S", 0.05)
    service = kit.Service()

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    service.status = never
    async with kit.client(service) as client:
        async with asyncio.timeout(5):
            reply = await client.get("/metrics")
    found = samples(reply.text)
    assert found["mstar_worker_up", (("model", "tiny"),)] == 0
    assert found["mstar_model_ready", (("model", "tiny"),)] == 1


async def test_openmetrics_when_asked_for(kit: Any) -> None:
    async with kit.client(kit.Service()) as client:
        reply = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert reply.text.endswith("# EOF\n")


async def test_labels_are_few_whatever_clients_send(kit: Any, chat: Any) -> None:
    async with kit.client(kit.Service(kit.HELLO)) as client:
        await client.post("/v1/chat/completions", json=chat())
        size = len(samples((await client.get("/metrics")).text))
        for number in range(20):
            await client.get(f"/nowhere/{number}")
            await client.request(f"ODD{number}", "/v1/chat/completions")
            await client.delete(f"/v1/requests/none-{number}")
            await client.post("/v1/chat/completions", json=chat(model=f"none-{number}"))
        text = (await client.get("/metrics")).text
    found = samples(text)
    assert len(found) < size + 200  # a few routes' histograms
    assert not any("none-" in value or "nowhere" in value for _, labels in found for _, value in labels)
    gone = (("method", "DELETE"), ("route", "/v1/requests/{request_id}"), ("status", "404"))
    assert found["mstar_http_requests_total", gone] == 20
    assert found["mstar_http_requests_total", (("method", "GET"), ("route", "unmatched"), ("status", "404"))] == 20
    assert found["mstar_http_requests_running", ()] == 1  # the scrape itself
    assert set(names(text)) <= set(CATALOG)


async def test_two_servers_share_no_numbers(kit: Any) -> None:
    async with kit.client(kit.Service()) as one, kit.client(kit.Service()) as other:
        for _ in range(3):
            await one.get("/v1/models")
        mine, yours = samples((await one.get("/metrics")).text), samples((await other.get("/metrics")).text)
    key = ("mstar_http_requests_total", (("method", "GET"), ("route", "/v1/models"), ("status", "200")))
    assert mine[key] == 3
    assert key not in yours


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome("stop", usage=Usage()), "stop"),
        (Outcome("a word of the model's", usage=Usage()), "other"),
        (Outcome("left", usage=Usage()), "other"),  # also where it is one of ours
        (Outcome(), "left"),
        (Outcome(error=asyncio.CancelledError()), "left"),
        (Outcome(error=RequestError("no")), "refused"),
        (Outcome(error=RequestError("busy", status=429)), "refused"),
        (Outcome(error=RequestError("late", status=504)), "timeout"),
        (Outcome(error=RequestError("bug", status=503)), "failed"),
        (Outcome(error=ValueError()), "failed"),
    ],
)
def test_reasons_are_of_a_fixed_list(outcome: Outcome, reason: str) -> None:
    assert watching.reason_of(outcome) == reason
    assert reason in REASONS


def test_names_follow_prometheus_conventions() -> None:
    for name, metric in CATALOG.items():
        assert name.startswith("mstar_")
        assert metric.meaning.endswith(".")
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert bool(metric.buckets) == (metric.kind == "histogram" and metric.source == "server"), name
        assert list(metric.buckets) == sorted(set(metric.buckets))


async def test_ranks_have_figures_of_their_own(kit: Any) -> None:
    rank = {"rank": 1, "steps": 7, "resources": {"kv": {"used": 2, "total": 9}}, "memory": {"resident": 5}}
    silent = {"rank": 1, "flying": 0}  # it has not answered
    service = kit.Service()

    async def status() -> dict[str, Any]:
        return {"running": 0, "ranks": [rank], "copies": [{"ranks": [rank]}, {"ranks": [silent]}]}

    service.status = status
    async with kit.client(service) as client:
        found = samples((await client.get("/metrics")).text)
    labels = (("copy", "0"), ("model", "tiny"))
    assert found["mstar_rank_steps_total", (*labels, ("rank", "1"))] == 7
    assert found["mstar_rank_pool_used", (*labels, ("pool", "kv"), ("rank", "1"))] == 2
    assert found["mstar_rank_pool_size", (*labels, ("pool", "kv"), ("rank", "1"))] == 9
    assert found["mstar_rank_memory_bytes", (labels[0], ("kind", "resident"), labels[1], ("rank", "1"))] == 5
    assert not [key for key in found if ("copy", "1") in key[1]]

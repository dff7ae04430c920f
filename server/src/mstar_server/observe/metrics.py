"""The instruments behind ``/metrics``. Each server has its own; nothing is global.

What is counted for every event of every request is an addition into a list; the library's instruments, which lock, see
each request once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from mstar_server.observe.catalog import CATALOG, Metric

__all__ = ["Bins", "Metrics"]


class Bins:
    """A histogram that one thread fills, for what happens so often that an instrument's lock would be felt."""

    __slots__ = ("counts", "ends", "total")

    def __init__(self, ends: Sequence[float]):
        self.ends, self.counts, self.total = ends, [0] * (len(ends) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.ends, value)] += 1
        self.total += value


class Metrics:
    """Instruments by their names in the catalog (:meth:`count`, :meth:`observe`), and what is asked of workers.

    :ivar gaps: of each model, ``mstar_inter_output_seconds``.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._instruments = {
            name: _instrument(metric, self._registry)
            for name, metric in CATALOG.items()
            if metric.source == "server" and name not in _COLLECTED
        }
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}  # labels are few (see the catalog)
        self.gaps = {model: Bins(CATALOG["mstar_inter_output_seconds"].buckets) for model in models}
        self._scrape = _Scrape(self.gaps)
        self._registry.register(self._scrape)

    def count(self, name: str, amount: float, *labels: str) -> None:
        """Add *amount* to a counter."""
        self._labelled(name, labels).inc(amount)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Put *value* into a histogram."""
        self._labelled(name, labels).observe(max(value, 0.0))

    def move(self, name: str, by: int, *labels: str) -> None:
        """Let a gauge rise or fall."""
        self._labelled(name, labels).inc(by)

    def _labelled(self, name: str, labels: tuple[str, ...]) -> Any:
        child = self._children.get((name, labels))
        if child is None:
            instrument = self._instruments[name]
            child = self._children[name, labels] = instrument.labels(*labels) if labels else instrument
        return child

    def render(
        self, phases: Mapping[str, str], statuses: Mapping[str, Mapping[str, Any]], accept: str = ""
    ) -> tuple[bytes, str]:
        """All metrics in the format that *accept* (an ``Accept`` header) asks for, and its content type.

        :param phases: of each model. :param statuses: of each worker that has answered.
        """
        self._scrape.phases, self._scrape.statuses = phases, statuses
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


_COLLECTED = ("mstar_inter_output_seconds", "mstar_model_ready", "mstar_model_phase")
_PHASES = ("unloaded", "starting", "weights", "warmup", "ready", "draining", "unloading", "failed", "stopped")


def _instrument(metric: Metric, registry: CollectorRegistry) -> Any:
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.meaning, metric.labels, registry=registry, buckets=metric.buckets)
    kind = Counter if metric.kind == "counter" else Gauge
    return kind(metric.name, metric.meaning, metric.labels, registry=registry)


class _Scrape(Collector):
    """What is put together when it is asked for. A worker's counters begin anew when it does, as counters may."""

    def __init__(self, gaps: Mapping[str, Bins]):
        self._gaps = gaps
        self.phases: Mapping[str, str] = {}
        self.statuses: Mapping[str, Mapping[str, Any]] = {}

    def collect(self) -> Iterator[Family]:
        families = _Families()
        for model, bins in self._gaps.items():
            if any(bins.counts):
                families.histogram("mstar_inter_output_seconds", (model,), bins.ends, bins.counts, bins.total)
        for model, phase in self.phases.items():
            families.add("mstar_model_ready", (model,), float(phase == "ready"))
            for name in _PHASES:
                families.add("mstar_model_phase", (model, name), float(phase == name))
            families.add("mstar_worker_up", (model,), float(model in self.statuses))
        for model, status in self.statuses.items():
            _worker(families, model, status)
        yield from families.by_name.values()


class _Families:
    """The families of one scrape, made when they get their first sample."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}

    def add(self, name: str, labels: Sequence[str], value: float) -> None:
        self._family(name).add_metric(labels, value)

    def histogram(
        self, name: str, labels: Sequence[str], ends: Sequence[float], counts: Sequence[int], total: float
    ) -> None:
        """*counts* has one number more than *ends*."""
        so_far, buckets = 0, []
        for end, count in zip((*map(str, map(float, ends)), "+Inf"), counts, strict=True):
            so_far += count
            buckets.append((end, so_far))
        self._family(name).add_metric(labels, buckets, total)

    def _family(self, name: str) -> Any:
        family = self.by_name.get(name)
        if family is None:
            metric = CATALOG[name]
            kinds = {
                "counter": CounterMetricFamily,
                "gauge": GaugeMetricFamily,
                "histogram": HistogramMetricFamily,
            }
            family = self.by_name[name] = kinds[metric.kind](name, metric.meaning, labels=metric.labels)
        return family


def _worker(families: _Families, model: str, status: Mapping[str, Any]) -> None:
    """The samples of one worker's *status* (:meth:`mstar.worker.core.Worker.status`). A plugin's executor may report
    less."""
    plain = {
        "mstar_worker_start_time_seconds": status.get("began"),
        "mstar_worker_requests_running": status.get("running"),
        "mstar_worker_requests_waiting": status.get("waiting"),
        "mstar_worker_sessions": status.get("sessions"),
        "mstar_prefix_cache_tokens_total": status.get("prefix", {}).get("tokens"),
        "mstar_prefix_cache_hit_tokens_total": status.get("prefix", {}).get("hits"),
        "mstar_media_embeddings_total": status.get("media", {}).get("embeddings"),
        "mstar_media_embedding_hits_total": status.get("media", {}).get("hits"),
    }
    for name, value in plain.items():
        if isinstance(value, int | float):
            families.add(name, (model,), value)
    for entry in status.get("entries", ()):
        labels = (model, entry["node"], entry["entry"])
        families.add("mstar_worker_steps_total", labels, entry["steps"])
        families.add("mstar_worker_step_seconds_total", labels, entry["seconds"])
        families.add("mstar_worker_tokens_total", labels, entry["tokens"])
        ends, counts = zip(*entry["sizes"], strict=True)
        families.histogram("mstar_worker_batch_rows", labels, ends[:-1], counts, entry["rows"])
        if entry["counted_loop"]:
            families.add("mstar_denoise_steps_total", labels, entry["rows"])
    for pool, usage in status.get("resources", {}).items():
        families.add("mstar_pool_used", (model, pool), usage["used"])
        families.add("mstar_pool_size", (model, pool), usage["total"])
        families.add("mstar_pool_cached", (model, pool), usage["cached"])
    for pool, counts in status.get("checkpoints", {}).items():
        families.add("mstar_checkpoints_made_total", (model, pool), counts["made"])
        families.add("mstar_checkpoints_evicted_total", (model, pool), counts["evicted"])
    for kind, amount in status.get("memory", {}).items():
        families.add("mstar_memory_bytes", (model, kind), amount)
    for copy, told in enumerate(status.get("copies", (status,))):
        for rank in told.get("ranks", ()):
            _rank(families, (model, str(copy), str(rank["rank"])), rank)
    for observer, failures in status.get("observer_failures", {}).items():
        families.add("mstar_observer_failures_total", (model, observer), failures)


def _rank(families: _Families, labels: tuple[str, str, str], status: Mapping[str, Any]) -> None:
    """The samples of a rank's *status* (:meth:`mstar.worker.follower.Follower.status`), as far as it has answered."""
    if "steps" in status:
        families.add("mstar_rank_steps_total", labels, status["steps"])
    for pool, usage in status.get("resources", {}).items():
        families.add("mstar_rank_pool_used", (*labels, pool), usage["used"])
        families.add("mstar_rank_pool_size", (*labels, pool), usage["total"])
    for kind, amount in status.get("memory", {}).items():
        families.add("mstar_rank_memory_bytes", (*labels, kind), amount)

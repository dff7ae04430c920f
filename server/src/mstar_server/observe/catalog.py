"""Every metric of ``/metrics``, in one place: what it is called, what it counts, by which labels.

The page ``docs/observability.md`` is made from it. All labels have few values: models and routes are those that the
server has, reasons and statuses come from fixed lists. Nothing that a client writes becomes a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["CATALOG", "REASONS", "Metric"]

REASONS = ("stop", "length", "done", "end_of_input", "cancelled", "other", "left", "refused", "timeout", "failed")
"""Values of the label ``reason``: the engine's finish reasons (a model's own word is ``other``); ``left``: nobody read
to the end; ``refused``: a 4xx; ``timeout``: a 504; ``failed``: any other 5xx."""

_LATENCY = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0, 600.0)
_GAP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.5, 1.0, 5.0)
_FACTOR = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 5.0)


@dataclass(frozen=True)
class Metric:
    """:param name: as Prometheus shows it, unit and ``_total`` included. :param meaning: a sentence.
    :param buckets: upper ends, of a histogram. :param source: where the number comes from.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: Sequence[str] = ("model",)
    buckets: Sequence[float] = ()
    source: Literal["server", "worker"] = "server"


def _worker(name: str, kind: Literal["counter", "gauge", "histogram"], meaning: str, *labels: str) -> Metric:
    return Metric(name, kind, meaning, ("model", *labels), source="worker")


_ENTRIES = (
    Metric(
        "mstar_http_requests_total",
        "counter",
        "HTTP requests that have ended, by status; 499: the client left before an answer, 101: a websocket.",
        ("route", "method", "status"),
    ),
    Metric("mstar_http_requests_running", "gauge", "HTTP requests and websockets that go on.", ()),
    Metric(
        "mstar_http_request_duration_seconds", "histogram", "From a request's head to its last byte.",
        ("route",), _LATENCY,
    ),
    Metric(
        "mstar_requests_total", "counter",
        "Requests to models that have ended, by reason. One HTTP request makes several with n > 1.",
        ("model", "route", "reason"),
    ),
    Metric("mstar_requests_running", "gauge", "Requests that are being prepared, waiting or running."),
    Metric(
        "mstar_request_duration_seconds", "histogram", "From arrival until all has been taken.",
        ("model", "route"), _LATENCY,
    ),
    Metric(
        "mstar_request_prepare_seconds", "histogram", "In the processor: chat template, tokens, media.",
        ("model",), _LATENCY,
    ),
    Metric("mstar_request_queue_seconds", "histogram", "In the worker's queue.", ("model",), _LATENCY),
    Metric("mstar_request_run_seconds", "histogram", "In the worker, from admission to the end.", ("model",), _LATENCY),
    Metric(
        "mstar_time_to_first_output_seconds", "histogram",
        "From arrival to the first output of the worker: for text, the time to the first token.", ("model",), _LATENCY,
    ),
    Metric(
        "mstar_time_to_first_audio_seconds", "histogram", "From arrival to the first sound.", ("model",), _LATENCY
    ),
    Metric(
        "mstar_inter_output_seconds", "histogram",
        "Between two outputs of a request: for streamed text, between two tokens.", ("model",), _GAP,
    ),
    Metric(
        "mstar_time_per_output_token_seconds", "histogram",
        "Mean of each request: from its first output to its last, by the tokens after the first.", ("model",), _GAP,
    ),
    Metric(
        "mstar_audio_real_time_factor", "histogram",
        "Seconds of work for a second of sound: made (out: arrival to end) or understood (in: admission to end). "
        "Below 1 is faster than it plays.",
        ("model", "direction"), _FACTOR,
    ),
    Metric("mstar_prompt_tokens_total", "counter", "Tokens of prompts."),
    Metric("mstar_cached_tokens_total", "counter", "Those of them that were not computed, their prefix being known."),
    Metric("mstar_generated_tokens_total", "counter", "Tokens that language models generated."),
    Metric("mstar_audio_input_seconds_total", "counter", "Sound that requests brought."),
    Metric("mstar_audio_output_seconds_total", "counter", "Sound that was made."),
    Metric("mstar_input_pixels_total", "counter", "Pixels of the images that requests brought."),
    Metric("mstar_input_frames_total", "counter", "Frames of the videos that requests brought."),
    Metric("mstar_images_total", "counter", "Images that were made."),
    Metric("mstar_frames_total", "counter", "Frames of videos that were made."),
    Metric("mstar_actions_total", "counter", "Arrays that were made: actions, states, embeddings."),
    Metric("mstar_model_ready", "gauge", "1 while the model takes requests."),
    Metric(
        "mstar_model_phase", "gauge", "1 for the phase that the model is in.", ("model", "phase")
    ),
    _worker("mstar_worker_up", "gauge", "1 when the worker answered this scrape in time."),
    _worker("mstar_worker_start_time_seconds", "gauge", "When it became ready, Unix time; changes at a restart."),
    _worker("mstar_worker_requests_running", "gauge", "Requests that have been admitted: they hold memory."),
    _worker("mstar_worker_requests_waiting", "gauge", "Requests in the queue."),
    _worker("mstar_worker_sessions", "gauge", "Sessions whose state is kept."),
    _worker("mstar_worker_steps_total", "counter", "Steps, by what ran.", "node", "entry"),
    _worker("mstar_worker_step_seconds_total", "counter", "Time of steps, launch to landing.", "node", "entry"),
    _worker("mstar_worker_tokens_total", "counter", "Tokens (items) that steps computed.", "node", "entry"),
    _worker("mstar_worker_batch_rows", "histogram", "Requests together in a step; the sum is that of rows.",
            "node", "entry"),
    _worker("mstar_denoise_steps_total", "counter",
            "Calls of entries in loops of a set number of rounds, as denoising is. An entry that each round calls once "
        "counts the steps; one that guidance calls too counts its branches.", "node", "entry"),
    _worker("mstar_pool_used", "gauge", "Units (pages of KV cache, slots) in use or promised.", "pool"),
    _worker("mstar_pool_size", "gauge", "Units in all.", "pool"),
    _worker("mstar_pool_cached", "gauge", "Free pages, or kept states, that prompts may begin from.", "pool"),
    _worker("mstar_checkpoints_made_total", "counter", "Recurrent states kept for prompts that begin alike.", "pool"),
    _worker("mstar_checkpoints_evicted_total", "counter", "Those that made room for others.", "pool"),
    _worker("mstar_prefix_cache_tokens_total", "counter", "Tokens of prompts that were looked up in the prefix cache."),
    _worker("mstar_prefix_cache_hit_tokens_total", "counter", "Those of them that were found."),
    _worker("mstar_media_embeddings_total", "counter", "Embeddings of pictures and frames that requests brought."),
    _worker("mstar_media_embedding_hits_total", "counter", "Those of them that were known by their content."),
    _worker("mstar_memory_bytes", "gauge",
            "Memory: resident (the process); on a GPU allocated and reserved by the worker, used by everyone, total.",
            "kind"),
    _worker("mstar_rank_steps_total", "counter", "Steps of a rank other than 0, of which the figures above are.",
            "copy", "rank"),
    _worker("mstar_rank_pool_used", "gauge", "Its units in use or promised.", "copy", "rank", "pool"),
    _worker("mstar_rank_pool_size", "gauge", "Its units in all.", "copy", "rank", "pool"),
    _worker("mstar_rank_memory_bytes", "gauge", "Its memory.", "copy", "rank", "kind"),
    _worker("mstar_observer_failures_total", "counter", "Exceptions that plugins' observer hooks raised.", "observer"),
)  # fmt: skip

CATALOG = {metric.name: metric for metric in _ENTRIES}

"""What crosses the border between the API side and a worker: requests in, events out.

All of it is plain data (msgspec structs); arrays travel as :class:`numpy.ndarray` inside the ``inputs`` and ``data``
fields and are moved by the executor (by reference inline, through shared memory between processes). The structs that
travel as messages are tagged, so that a frame may hold any mix of them.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "Amount",
    "Cancel",
    "Done",
    "Emit",
    "EngineRequest",
    "Event",
    "Failed",
    "FinishReason",
    "Push",
    "SamplingParams",
    "TokenLogprob",
    "Usage",
]

FinishReason = str
"""``stop``, ``length``, ``end_of_input``, ``done``, ``cancelled`` or a word of the model's own."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request samples. Neutral defaults: greedy needs ``temperature=0``.

    Order (that of vLLM and transformers): logit bias, then the masks of ``min_tokens``, allowed tokens and grammar →
    repetition, frequency and presence penalties → temperature → top-k → top-p → min-p → draw. Log-probabilities are
    those of the raw logits.

    :param seed: the request's own random stream; the same seed gives the same tokens in any batch. ``None`` is
        replaced by a random seed when the request is admitted.
    :param stop_token_ids: ids that end the generation. :param ignore_eos: do not stop on them.
    :param logprobs: number of alternatives to report with each token (0: the chosen one only); ``None``: no report.
    :param grammar: a constraint for structured output as JSON (:mod:`mstar.spec.constraints`). Where it is complete
        only stop tokens may come, also before ``min_tokens``.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: str | None = None


class EngineRequest(msgspec.Struct, kw_only=True, tag=True, tag_field="kind"):
    """A prepared request: nothing in it needs a tokenizer, a file or the network any more.

    :param inputs: the graph's input values, and what client streams begin with, as numpy arrays.
    :param params: validated knobs that the walks' :class:`~mstar.spec.graph.Param` and the route read.
    :param sampling: sampler resource's name → parameters.
    :param want: modalities that the client asked for (a route may skip partitions that nobody listens to).
    :param client_streams: streams that the client will feed with :class:`Push`; others are closed from the start.
    :param session: keep state under this name after the request; bounded in number and age.
    :param sibling_of: id of a request with the very same prompt (``n`` samples): share its prompt state.
    :param cache_salt: prefix-cache pages are only shared among requests with the same salt (tenant isolation).
    """

    id: str
    inputs: dict[str, Any] = {}
    params: dict[str, Any] = {}
    sampling: dict[str, SamplingParams] = {}
    want: tuple[str, ...] = ()
    client_streams: tuple[str, ...] = ()
    session: str | None = None
    sibling_of: str | None = None
    tenant: str = ""
    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""


class Push(msgspec.Struct, kw_only=True, tag=True, tag_field="kind"):
    """Items from the client for one of its streams. ``data`` is ``[n, *item shape]`` or ``None``; ``end`` closes it."""

    id: str
    stream: str
    data: Any = None
    end: bool = False


class Cancel(msgspec.Struct, kw_only=True, tag=True, tag_field="kind"):
    """End the request within one step. ``reason`` becomes its finish reason (``stop`` for a stop string)."""

    id: str
    reason: FinishReason = "cancelled"


class TokenLogprob(msgspec.Struct, kw_only=True):
    """Natural-log probabilities of one sampled token and of the most likely alternatives, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


Amount = int | float


class Usage(msgspec.Struct, kw_only=True):
    """What the request cost; *queued_s* and *run_s* are seconds before and after admission.

    A worker counts in *output* the ``tokens`` that language models generated, heard by the client or not, and the items
    of every other modality that went out. A client is told ``audio_seconds``, ``images`` and ``frames`` of videos
    instead, and in *input* ``tokens`` of the prompt, ``audio_seconds``, ``pixels`` of images and ``frames``.

    :param cached: the prompt's items that were not computed.
    """

    input: dict[str, Amount] = {}
    output: dict[str, Amount] = {}
    cached: int = 0
    queued_s: float = 0.0
    run_s: float = 0.0


class Emit(msgspec.Struct, kw_only=True, tag=True, tag_field="kind"):
    """Items of one stream to the client. For streams of ``tokens`` modality *data* is a list of ints.

    :param seq: 0, 1, 2… within the stream.
    :param heard: client stream → how many of its items had been read for what this was computed from, through however
        many partitions. ``None`` for a request without live input.
    """

    id: str
    stream: str
    seq: int
    data: Any
    logprobs: list[TokenLogprob] | None = None
    heard: dict[str, int] | None = None


class Done(msgspec.Struct, kw_only=True, tag=True, tag_field="kind"):
    """The request has ended well and holds nothing any more. *reasons*: finish reason per partition."""

    id: str
    reason: FinishReason
    reasons: dict[str, FinishReason] = {}
    usage: Usage = msgspec.field(default_factory=Usage)


class Failed(msgspec.Struct, kw_only=True, tag=True, tag_field="kind"):
    """The request has ended with an error and holds nothing any more."""

    id: str
    message: str
    code: str = "internal_error"
    status: int = 500
    type: str = "server_error"
    param: str | None = None
    retry_after: float | None = None


Event = Emit | Done | Failed

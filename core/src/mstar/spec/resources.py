"""What per-request device state a model needs, as plain data.

A model's ``resources()`` returns ``{name: ResourceSpec}``. ``kind`` selects the implementation that a plugin registered
through ``mstar_resources``; a deployment file may override any field under ``resources: {name: {field: value}}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

__all__ = [
    "CrossKV",
    "MediaEmbeddings",
    "PagedKV",
    "Positions",
    "RaggedAttention",
    "RecurrentState",
    "ResourceSpec",
    "Sampler",
    "WindowKV",
]


@dataclass(frozen=True)
class ResourceSpec:
    """Base of all resource declarations.

    :cvar rewinds: whether contexts can be taken back any number of tokens (:class:`mstar.spec.graph.Draft`).
    """

    kind: ClassVar[str] = ""
    rewinds: ClassVar[bool] = False


@dataclass(frozen=True)
class PagedKV(ResourceSpec):
    """Keys and values of self-attention, grown token by token in pages.

    :param tokens: size of the pool in tokens over all requests; ``None`` sizes it at start-up as
        ``max_concurrent_requests`` × ``max_tokens`` bounded by the memory budget.
    :param max_tokens: the most tokens one context may hold (the model's context length).
    :param prefix_cache: keep the pages of finished requests for later ones that start alike.
    :param windows: per layer the sliding window in tokens, or ``None`` for full attention; empty = all full.
    """

    kind: ClassVar[str] = "paged_kv"
    rewinds: ClassVar[bool] = True
    layers: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    query_heads: int = 1
    max_tokens: int = 2048
    tokens: int | None = None
    page_size: int = 16
    dtype: str | None = None
    prefix_cache: bool = True
    windows: tuple[int | None, ...] = ()
    backend: str | None = None


@dataclass(frozen=True)
class CrossKV(ResourceSpec):
    """Keys and values of an encoder's output, written once per request and read every step.

    :param max_tokens: the longest memory of one request. :param slots: requests held; ``None`` = the concurrency cap.
    """

    kind: ClassVar[str] = "cross_kv"
    layers: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    query_heads: int = 1
    max_tokens: int = 1500
    slots: int | None = None
    dtype: str | None = None
    backend: str | None = None


@dataclass(frozen=True)
class WindowKV(ResourceSpec):
    """Bounded, rolling keys and values: the last *window* tokens per layer, in one slot per context.

    :param sink: the first *sink* tokens stay for ever (attention sinks, a conditioning image).
    :param max_step: the most tokens that one step appends to a context.
    """

    kind: ClassVar[str] = "window_kv"
    layers: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    query_heads: int = 1
    window: int = 1024
    sink: int = 0
    max_step: int = 1
    slots: int | None = None
    dtype: str | None = None
    backend: str | None = None


@dataclass(frozen=True)
class RecurrentState(ResourceSpec):
    """Fixed-size tensors per context: conv windows, SSM and DeltaNet states, LSTM cells, codec state, latents.

    With *checkpoints* a prompt that begins like an earlier one goes on from that one's state. States are kept at
    boundaries of pages: every so many tokens of a prompt, at its last one, where an earlier prompt went another way,
    and at the last one of an answer.

    :param tensors: name → (shape of one context's tensor, dtype). They start as zeros. *dtype*: a torch dtype's name,
        ``"model"``, or ``"state"`` for *state_dtype*.
    :param layers: how many layers have these tensors, each its own.
    :param slots: contexts held; ``None`` = the concurrency cap.
    :param state_dtype: ``"float32"``, or ``"bfloat16"`` for half the memory and traffic at some loss.
    :param checkpoints: states kept; 0: no prompt is shared; ``None``: two for each context, as far as an eighth of
        the memory that the slots leave allows.
    :param page: tokens of a page of the keys and values beside this state.
    :param checkpoint_tokens: the most tokens between two checkpoints of a prompt, whose steps end there; at its end
        there is one if the last is a quarter of that away.
    """

    kind: ClassVar[str] = "recurrent_state"
    tensors: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    slots: int | None = None
    layers: int = 1
    state_dtype: str = "float32"
    checkpoints: int | None = 0
    page: int = 16
    checkpoint_tokens: int = 2048


@dataclass(frozen=True)
class RaggedAttention(ResourceSpec):
    """Attention within each row of a packed step, without any cache (encoders, ViTs, denoise transformers).

    :param segments: name of a request input whose first column (integers ``[S]`` or ``[S, …]``) says how long the
        consecutive segments of a call's items are; attention is then within these. Steps hold whole segments.
    """

    kind: ClassVar[str] = "ragged_attention"
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    backend: str | None = None
    segments: str | None = None


@dataclass(frozen=True)
class MediaEmbeddings(ResourceSpec):
    """What an encoder makes of pictures, sounds or frames, kept by their content: an entry that advances it writes, and
    one that lists it as ``frozen`` finds it in the place of its prompt's media. What nobody needs any more stays for
    others that bring the same, until the room is needed.

    Media are *pieces*, each encoded by itself: an image, the frames that an encoder looks at together. A request that
    has some brings input *pieces*, int64 ``[S, 4]``: of each, in the order of the prompt, its items at the encoder
    (patches), its embeddings, and two words of a digest of its content. In its *prompt*, int64 ``[T]``, there is a
    negative id for each embedding. Ids that are made from the digest keep prompts with other media apart in a prefix
    cache.

    :param width: of an embedding. :param items: items at the encoder that become one embedding.
    :param tokens: embeddings held in all; :param max_tokens: of one request.
    :param cache: keep what no request needs any more.
    """

    kind: ClassVar[str] = "media_embeddings"
    width: int = 1
    items: int = 1
    tokens: int = 65536
    max_tokens: int = 32768
    pieces: str = "pieces"
    prompt: str = "prompt"
    cache: bool = True


@dataclass(frozen=True)
class Sampler(ResourceSpec):
    """Turns logits into tokens under each request's own sampling parameters.

    :param vocab: size of the logits' last dimension.
    :param prompt: name of the request input with the prompt's ids (penalties count them), or ``None``.
    """

    kind: ClassVar[str] = "sampler"
    vocab: int = 0
    prompt: str | None = "prompt"


@dataclass(frozen=True)
class Positions(ResourceSpec):
    """The position of each token of a step in its context: 0, 1, 2… per context, or *axes* of them (multimodal rope).

    With ``axes > 1`` a request may bring explicit positions for its prompt in input *prompt* ``[axes, T]``; tokens
    after it go on from the largest one.
    """

    kind: ClassVar[str] = "positions"
    rewinds: ClassVar[bool] = True
    axes: int = 1
    prompt: str | None = None

"""What a resource asks of an attention implementation.

A step is planned once on the host (:meth:`AttentionBackend.plan_kv`, :meth:`AttentionBackend.plan_ragged`) and the plan
is then used by every layer. That is the shape that libraries with host-side planning (FlashInfer's ``plan``/``run``)
and captured CUDA graphs want: a backend may keep static buffers per plan and refill them in the planning call.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.nn.ops import HeadNorms
from mstar.nn.rotary import Rotation
from mstar.resources.attention.memory import KVMemory
from mstar.resources.staging import Stage
from mstar.spec.errors import SetupError, nearest

__all__ = ["AttentionBackend", "AttentionNeed", "KVBatch", "KVPlan", "RaggedPlan", "pick_backend"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionNeed:
    """What one resource needs, known at start-up.

    :param mode: ``kv`` (attention over a :class:`KVMemory`) or ``ragged`` (within the rows of a step).
    :param page_size: tokens per page of the tables (1 for rings). :param windows: the sliding windows in use.
    :param kv_dtype: of the keys and values in the memory; ``None``: that of the queries.
    :param deterministic: a row's results must not depend on the rest of its step (``engine.deterministic``).
    """

    mode: Literal["kv", "ragged"]
    device: torch.device
    dtype: torch.dtype
    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 1
    windows: frozenset[int] = frozenset()
    kv_dtype: torch.dtype | None = None
    deterministic: bool = False


@dataclass(slots=True)
class KVBatch:
    """One step over contexts in a :class:`KVMemory`. Arrays are host arrays with one entry a row.

    :param lengths: queries of each row. The packed queries are the rows' one after the other.
    :param starts: tokens of context listed in *tables* before the step's own.
    :param tables: int32 ``[rows, pages]``: page numbers; token *i* of the context stands at place
        ``tables[row, i // page_size] * page_size + i % page_size``.
    :param step_kv: where the step's own keys and values are: ``written`` into the memory as tokens ``starts …
        starts + lengths - 1`` of the table; ``beside`` it, passed to ``attend`` and kept nowhere; ``none``: there are
        none.
    :param sink: the first *sink* tokens are seen through any window.
    :param gaps: tokens that are missing from the table after the first *sink* ones (a ring that has forgotten them).
    :param most_pages: as wide as *tables* can become; what a lane keeps room for. 0: no wider than it is.
    :param query_heads: of the layers that will attend; 0: not known.
    """

    lengths: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    page_size: int = 1
    step_kv: Literal["written", "beside", "none"] = "written"
    sink: int = 0
    gaps: npt.NDArray[np.int64] | None = None
    most_pages: int = 0
    query_heads: int = 0


class KVPlan(abc.ABC):
    """A planned step over a :class:`KVMemory`."""

    @abc.abstractmethod
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        window: int | None = None,
        causal: bool = True,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention of the packed queries ``[N, query_heads, head_dim]`` over their rows' contexts.

        :param k: the step's own keys (*v*: values) ``[N, kv_heads, head_dim]``; ``None`` when the step has none. With
            ``step_kv="written"`` they are in the memory already and a backend may read them from either place.
        :param window: a query at position *p* sees positions ``> p - window`` (and sinks).
        :param causal: ``False``: the tokens of a row's step all see each other, whatever the window.
        :param scale: of the logits, by default ``head_dim ** -0.5``.
        :param softcap: logits become ``softcap * tanh(logits / softcap)`` before masking (Gemma 2).
        :returns: ``[N, query_heads, head_dim]`` in the dtype of *q*.
        """

    def attend_heads(
        self,
        layer: int,
        heads: Tensor,
        q_heads: int,
        rotation: Rotation,
        norms: HeadNorms | None,
        places: Tensor,
        *,
        window: int | None = None,
        causal: bool = True,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor | None:
        """``ops.rotate_store`` and :meth:`attend` in one operation, of a step whose keys and values are kept.

        :param heads: ``[N, q_heads + 2 * kv_heads, head_dim]``: queries, keys, values, neither normed nor rotated.
        :param places: int64 ``[N]``, where in the memory the step's keys and values go.
        :returns: as :meth:`attend`; ``None`` if the plan has no such operation, and nothing was done. On a lane the
            answer is the same in each step.
        """
        return None


class RaggedPlan(abc.ABC):
    """Planned attention within consecutive segments."""

    @abc.abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        """``[N, query_heads, head_dim]`` from q ``[N, query_heads, head_dim]`` and k, v ``[N, kv_heads, head_dim]``."""


class AttentionBackend(abc.ABC):
    """An attention implementation, made once a worker. ``priority``: the highest that supports a need is used."""

    name: str = ""
    priority: int = 0
    capturable: bool = False
    """Whether a plan made on a :class:`~mstar.resources.staging.Lane` can be refilled for the replays of a graph: one
    query a row, ``step_kv`` ``written`` or ``none``."""
    capturable_chunks: bool = False
    """Whether also for rows of any number of queries, as long as there are as many in all."""
    capturable_beside: bool = False
    """Whether also for ``step_kv`` ``beside``, and plans of segments; of rows as :attr:`capturable_chunks` says."""

    @abc.abstractmethod
    def supports(self, need: AttentionNeed) -> str | None:
        """``None`` if it can serve *need*, else the reason why not, in words for the operator."""

    def batch_invariant(self, need: AttentionNeed) -> bool:
        """Whether a row's results follow from the row alone, bit for bit: not from the step's other rows nor their
        number, nor from how its tokens are divided into steps. Only then it serves a deterministic need."""
        return False

    @abc.abstractmethod
    def plan_kv(self, memory: KVMemory, batch: KVBatch, stage: Stage, key: str) -> KVPlan:
        """Plan one step over *memory*.

        :param stage: what the plan needs on the device goes through it, under keys that begin with *key*. On a lane the
            plan is the same object in each step.
        """

    @abc.abstractmethod
    def plan_ragged(self, lengths: Sequence[int], stage: Stage, key: str) -> RaggedPlan:
        """Plan attention within segments of these *lengths*; *stage* and *key* as in :meth:`plan_kv`. On a lane as many
        segments in each step, of which some may be empty."""

    def plan_windows(self, windows: int, length: int) -> RaggedPlan | None:
        """Plan attention within so many *windows* of one *length*, for captured steps: as often as it is used, by
        whichever lane, it stays as it is. ``None``: steps with windows are not captured."""
        return None


def pick_backend(
    backends: Sequence[AttentionBackend], need: AttentionNeed, forced: str | None = None
) -> AttentionBackend:
    """The backend of highest priority that supports *need*, or the one named *forced*. On a GPU the log says why those
    of higher priority are not used.

    :raises SetupError: none does; the message lists each backend with its reason.
    """
    names = [backend.name for backend in backends]
    if forced is not None and forced not in names:
        raise SetupError(f"attention backend {forced!r} is not installed{nearest(forced, names)}")
    reasons: list[str] = []
    for backend in sorted(backends, key=lambda backend: -backend.priority):
        if forced is not None and backend.name != forced:
            continue
        if need.deterministic and not backend.batch_invariant(need):
            reason: str | None = "its results depend on the step's other rows, which engine.deterministic forbids"
        else:
            reason = backend.supports(need)
        if reason is None:
            if reasons and need.device.type not in ("cpu", "meta"):  # meta: a check, maybe on another machine
                log.warning("attention backend %s is used: %s", backend.name, "; ".join(reasons))
            return backend
        reasons.append(f"{backend.name}: {reason}")
    listed = "\n  ".join(reasons) or "(no backend is installed)"
    raise SetupError(f"no attention backend can serve {need}:\n  {listed}")

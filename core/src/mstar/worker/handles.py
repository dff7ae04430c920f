"""Values that lie on another rank: how rank 0 names them, and what crosses between ranks.

A step's outputs stay where they were computed. Rank 0 knows each by a *key*; it sends the key when a later step on that
rank wants the value, and the contents only to ranks that do not have them. When rank 0 lets go of a value, so does the
rank.

Contents travel as raw bytes beside a header: within a host through shared memory, never pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from mstar.graph.values import Ref
from mstar.resources.staging import to_device
from mstar.spec.request import EngineRequest, Failed, TokenLogprob

__all__ = [
    "Close",
    "Contents",
    "Drop",
    "Fetch",
    "Fetched",
    "FromRank",
    "Handle",
    "Landed",
    "Learn",
    "Made",
    "Open",
    "Part",
    "Refused",
    "Rewind",
    "Row",
    "Run",
    "Skip",
    "ToRank",
    "output_key",
    "pack",
    "unpack",
]


class Contents(msgspec.Struct, frozen=True, array_like=True):
    """A tensor: *data* holds its bytes, uint8 ``[n]``; ``None`` where only its shape is told."""

    key: int
    dtype: str
    shape: tuple[int, ...]
    data: Any = None


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Items *start:stop*, or row *start*, of the value *key*. *host*: its number, if it is one that rank 0 knows."""

    key: int
    start: int
    stop: int
    row: bool
    host: int | None = None


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One call's share of a step.

    :param session: key of the session whose state it uses where sessions keep state; else the request's.
    :param length: of the whole call along its primary input. :param inputs: port → what goes into it.
    """

    request: str
    session: str | None
    length: int
    start: int
    tokens: int
    complete: bool
    inputs: dict[str, Part | int | float | bool | None]


# --- rank 0 to another -----------------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Begin *request*'s state: (resource, owner's key, context, units) each. Promised already by rank 0's books."""

    request: EngineRequest
    needs: list[tuple[str, str, str, int]]


class Close(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Free (resource, owner's key, context) each; and all of *request*, which has ended, unless it is empty."""

    owners: list[tuple[str, str, str]]
    request: str = ""


class Run(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Run a step. *op*: number of the call in the plan. *values*: contents that it needs and this rank has not.
    *answers*: this rank is to send the outputs that others need; else only whether the step succeeded."""

    step: int
    op: int
    rows: list[Row]
    values: list[Contents] = []
    answers: bool = True


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Nobody will ask for these values again."""

    keys: list[int]


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Send the contents of a value; answered by :class:`Fetched`."""

    key: int


class Rewind(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Take back an owner's last *tokens* (:meth:`mstar.resources.base.Resource.retract`)."""

    resource: str
    owner: tuple[str, str]
    tokens: int
    complete: bool = True


class Learn(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Ids of an owner's tokens that were committed without (:meth:`mstar.resources.base.Resource.learn`)."""

    resource: str
    owner: tuple[str, str]
    ids: list[int]


class Skip(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Take over known state (:meth:`mstar.resources.base.Resource.skip`, after the same ``match``)."""

    resource: str
    owner: tuple[str, str]
    ids: list[int]
    sibling: tuple[str, str] | None


ToRank = Open | Close | Run | Drop | Fetch | Rewind | Learn | Skip


# --- and back --------------------------------------------------------------------------------------------------------


class Made(msgspec.Struct, frozen=True, array_like=True):
    """What a step gave one call: port → (number of the base, start, stop, row), or why it failed."""

    outputs: dict[str, tuple[int, int, int, bool]] = {}
    logprobs: list[TokenLogprob] | None = None
    failed: Failed | None = None


class Landed(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """A step is done. *calls*: empty where the rank does not answer and every call succeeded."""

    rank: int
    step: int
    seconds: float
    bases: list[Contents] = []
    calls: list[Made] = []


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """A request's state could not be begun."""

    rank: int
    failed: Failed


class Fetched(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    rank: int
    contents: Contents


FromRank = Landed | Refused | Fetched


class Handle:
    """Rank 0's hold on a value of another rank. Let go of, it puts its key into *dropped*."""

    __slots__ = ("_dropped", "key")

    def __init__(self, key: int, dropped: list[int]):
        self.key, self._dropped = key, dropped

    def __del__(self) -> None:
        self._dropped.append(self.key)


def output_key(step: int, call: int, port: int) -> int:
    """The key of the tensor that holds output *port* of the step's calls from *call* on. Every rank that runs a step
    names its outputs so without being told. Keys of values that rank 0 sends are negative."""
    return (step << 24) | (call << 8) | port


def pack(key: int, tensor: Tensor, contents: bool = True) -> Contents:
    """*tensor* as a message; without *contents* only what it looks like."""
    data = None
    if contents:
        # without autograd's marks, on the CPU, as bytes: numpy knows no bfloat16
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
    return Contents(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def unpack(contents: Contents, device: torch.device) -> Tensor:
    """The tensor on *device*; on the meta device if its contents were not sent."""
    dtype = getattr(torch, contents.dtype)
    if contents.data is None:
        return torch.empty(contents.shape, dtype=dtype, device="meta")
    if not contents.data.size:
        return torch.empty(contents.shape, dtype=dtype, device=device)
    return to_device(torch.from_numpy(contents.data).view(dtype).reshape(contents.shape), device)


def ids_of(tensor: Tensor) -> Sequence[int] | None:
    """The numbers of a list of ids, which resources may want on the host."""
    return (
        tensor.tolist() if tensor.ndim == 1 and not tensor.is_floating_point() and tensor.device.type == "cpu" else None
    )


def held(contents: Contents, device: torch.device) -> tuple[Tensor, Any]:
    """The tensor, and what the host knows of it."""
    tensor = unpack(contents, torch.device("cpu"))
    return to_device(tensor, device), ids_of(tensor)


def ref_of(part: Part, base: Tensor, host: Any) -> Ref:
    """*part* of *base*. *host*: what the host knows of all of *base*."""
    known = part.host if part.host is not None else (host[part.start : part.stop] if host and not part.row else None)
    return Ref(base, part.start, part.stop, part.row, host=known)

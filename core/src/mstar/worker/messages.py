"""What crosses between rank 0 and another rank. Plain data; no torch.

Tensors travel as raw bytes beside a header (:class:`Contents`): by a lane, or within a host through shared memory,
never pickled.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mstar.spec.request import EngineRequest, Failed, TokenLogprob

__all__ = [
    "Agreed",
    "Close",
    "Contents",
    "Drop",
    "Export",
    "Exported",
    "Fetch",
    "Fetched",
    "Found",
    "FromRank",
    "Held",
    "Import",
    "Landed",
    "Learn",
    "Made",
    "Match",
    "Meet",
    "Met",
    "Missed",
    "Open",
    "Part",
    "Refused",
    "Rewind",
    "Row",
    "Run",
    "Seek",
    "Skip",
    "ToRank",
    "UseLanes",
]


class Contents(msgspec.Struct, frozen=True, array_like=True):
    """A tensor: *data* holds its bytes, uint8 ``[n]``; ``None`` where only its shape is told, and where the bytes come
    by a lane, as its *number*-th (:mod:`mstar.worker.tensor_channel`)."""

    key: int
    dtype: str
    shape: tuple[int, ...]
    data: Any = None
    number: int | None = None


class Held(msgspec.Struct, frozen=True, array_like=True):
    """What a pool holds for an owner (:class:`mstar.resources.base.State`)."""

    resource: str
    key: str
    context: str
    facts: dict[str, Any]
    tensors: dict[str, Contents]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Items *start:stop*, or row *start*, of the value *key*. *host*: its number, if it is one that rank 0 knows."""

    key: int
    start: int
    stop: int
    row: bool
    host: int | None = None


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One call's share of a step.

    :param op: number of the call in the plan; those of one step are of one node and entry. :param session: key of the
        session whose state it uses where sessions keep state; else the request's. :param length: of the whole call
        along its primary input. :param inputs: port → what goes into it.
    """

    request: str
    op: int
    session: str | None
    length: int
    start: int
    tokens: int
    complete: bool
    inputs: dict[str, Part | int | float | bool | None]


# --- rank 0 to another -----------------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Begin *request*'s state: (resource, owner's key, context, units) each. Promised already by rank 0's books.

    :param later: likewise what is only reserved: its state is elsewhere, and will come.
    """

    request: EngineRequest
    needs: list[tuple[str, str, str, int]]
    later: list[tuple[str, str, str, int]] = []


class Close(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Free (resource, owner's key, context) each; and all of *request*, which has ended, unless it is empty."""

    owners: list[tuple[str, str, str]]
    request: str = ""


class Run(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Run a step. *values*: contents that it needs and this rank has not. *answers*: this rank is to send the outputs
    that others need; else only whether the step succeeded."""

    step: int
    rows: list[Row]
    values: list[Contents] = []
    answers: bool = True


class Agreed(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Calls of a mesh's step failed on rank 0, too: where a rank fails alone, the others wait for it in an exchange."""

    step: int


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


class Match(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Look for known state (:meth:`mstar.resources.base.Resource.match`), whose answer rank 0 knows."""

    resource: str
    owner: tuple[str, str]
    ids: list[int]
    sibling: tuple[str, str] | None


class Missed(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """See :meth:`mstar.resources.base.Resource.missed`."""

    resource: str
    owner: tuple[str, str]
    tokens: int


class Export(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Send what is held for (resource, owner's key, context) each, of *request*; answered by :class:`Exported`."""

    move: int
    request: str
    owners: list[tuple[str, str, str]]


class Import(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Go on with what another rank held for *request*."""

    request: str
    held: list[Held]


class Seek(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Skip the head of a prompt that is known (:func:`mstar.worker.prompt_heads.skip_known`); answered by
    :class:`Found`. *op*, *session*: as in :class:`Row`. *sibling*: the request that has the same prompt."""

    number: int
    request: str
    op: int
    session: str | None
    ids: list[int]
    sibling: str | None


class Meet(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Open lanes for tensors with rank 0 by *backend* (:mod:`mstar.worker.lanes`); answered by :class:`Met`."""

    backend: str


class UseLanes(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """The lanes are open at both ends: tensors may be sent by them. Or, not *open*, they will not be."""

    open: bool = True


ToRank = (
    Meet
    | UseLanes
    | Open
    | Close
    | Run
    | Export
    | Import
    | Seek
    | Agreed
    | Drop
    | Fetch
    | Rewind
    | Learn
    | Skip
    | Match
    | Missed
)


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
    """A value that rank 0 asked for."""

    rank: int
    contents: Contents


class Exported(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """State that rank 0 asked for, on its way to another rank."""

    rank: int
    move: int
    held: list[Held]


class Found(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """*asked* and *tokens*: see :class:`mstar.worker.prompt_heads.Skipped`. *cuts*: at how many tokens of the prompt
    steps of it should end (:meth:`mstar.resources.base.Resource.cuts`)."""

    number: int
    asked: bool
    tokens: int
    cuts: list[int] = []


class Met(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """The lanes are open here; or why they are not."""

    rank: int
    fault: str = ""


FromRank = Met | Landed | Refused | Fetched | Exported | Found

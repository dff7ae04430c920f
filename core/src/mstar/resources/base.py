"""The life of per-request device state.

``reserve`` (admission) → ``open`` → per step ``plan`` → the node uses the view → ``commit`` or ``rollback`` →
``close``.

*Owners.* State belongs to an owner: a pair (request id or session key, context name). *Units* are what a resource
counts: pages, slots.

*Purity.* Between ``plan`` and ``commit`` nothing that a repeated ``plan`` + forward would read may change: a KV pool
writes past the committed length, a recurrent state stages its writes and applies them at ``commit``, a sampler derives
its randomness from (seed, draws so far). That makes a failed step repeatable with fewer rows (promise P7).

This module imports no torch: schedulers and tests use it bare.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from mstar.spec.errors import MstarError
from mstar.spec.request import EngineRequest

if TYPE_CHECKING:
    from mstar.resources.staging import Stage

__all__ = ["IntegrityError", "Owner", "Resource", "ResourceContext", "Row", "State", "Usage"]


class IntegrityError(MstarError):
    """A pool's books do not balance: something leaked or was freed twice."""


class Owner(NamedTuple):
    """Whose state it is. *key*: request id, or ``session:NAME``; *context*: ``"main"``, ``"uncond"``…"""

    key: str
    context: str = "main"


@dataclass(slots=True, eq=False)
class Row:
    """One request's share of a step. A request's single steps of one kind are the same object, so that a resource can
    tell cheaply that it plans the same rows as before; resources whose state has one owner may get the same row.

    :param length: tokens (items of the packed inputs) in this step. :param complete: its call ends with this step.
    :param ids: the tokens' ids if the host knows them and the entry's chunk port holds integers.
    :param start: items of its call that come before this step's.
    """

    owner: Owner
    length: int = 1
    complete: bool = True
    ids: Sequence[int] | None = None
    start: int = 0


class State(NamedTuple):
    """One owner's state, to go on with in another rank's pool. *facts*: plain data (numbers, bytes, lists of numbers);
    *tensors*: torch tensors of their own, which later steps do not change. What they hold is the resource's affair."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, Any]


class Usage(NamedTuple):
    """Units in use and units in all; ``cached`` of the free ones hold reusable content."""

    used: int
    total: int
    cached: int = 0


@dataclass(frozen=True)
class ResourceContext:
    """What a resource is built from. *device* and *dtype* are torch objects; *max_owners* is the most contexts that may
    be open at once (``max_concurrent_requests`` × contexts in the graph, plus sessions); *memory* a budget in bytes;
    *deterministic*: see :attr:`Resource.batch_invariant`; *stage* takes a step's host data to the device, the same one
    for all resources of a worker; *vocabulary* gives the bytes of each token that a sampler chooses from, if they are
    known (:meth:`mstar.nn.model.Model.vocabulary`)."""

    device: Any
    dtype: Any
    max_owners: int
    memory: int | None = None
    attention_backends: Sequence[Any] = ()
    deterministic: bool = False
    vocabulary: Callable[[], Sequence[bytes]] | None = None
    stage: Stage = field(kw_only=True)


class Resource(abc.ABC):
    """A pool and the per-owner state in it. Subclasses say in their docstring what their view offers a node."""

    kind: str = ""

    capturable: bool = False
    """Whether its views can be used in a captured graph: see :mod:`mstar.resources.staging`."""

    capturable_chunks: bool = False
    """Whether also in one whose rows have any number of tokens each, from step to step another."""

    speculates: bool = False
    """Whether :meth:`retract` works: then a request's next step may be launched before it is known whether the step
    before ended its loop."""

    moves: bool = False
    """Whether :meth:`export` and :meth:`adopt` work: then a node that uses it may have a place for each walk."""

    batch_invariant: bool = False
    """Whether, in a deterministic context, what its views compute for a row follows from the row alone, bit for bit.
    Others are refused with ``engine.deterministic`` on a GPU."""

    def __init__(self, name: str, spec: Any, context: ResourceContext):
        self.name, self.spec, self.context = name, spec, context

    looks_at: Sequence[str] | None = None
    """Fields of its declaration that name what :meth:`open` reads of a request's inputs. ``None``: it may read any."""

    # --- admission ------------------------------------------------------------------------------------------------
    @abc.abstractmethod
    def units(self, tokens: int) -> int:
        """Units that a context of up to *tokens* tokens needs at most (1 for slot resources)."""

    @abc.abstractmethod
    def capacity(self) -> int:
        """Units in all."""

    @abc.abstractmethod
    def reserve(self, owner: Owner, units: int) -> bool:
        """Promise *units* to *owner*; ``False`` when they are not free now. All-or-nothing, no side effect on failure.
        An owner that is open already (a session) is promised them beside what it holds."""

    @abc.abstractmethod
    def open(self, owner: Owner, request: EngineRequest) -> None:
        """Begin *owner*'s state within its reservation. An owner that is open already (a session) goes on."""

    @abc.abstractmethod
    def close(self, owner: Owner) -> None:
        """Free everything of *owner*: state and reservation. Closing an unknown owner is an error."""

    def taken(self, owner: Owner) -> int:
        """Units that the state of *owner* takes so far, where that grows with its tokens; 0 for one that is not
        open."""
        return 0

    def follow(self, owner: Owner, tokens: int) -> None:
        """The pool on another rank whose books these are has *tokens* more of *owner*, or fewer if negative. So that
        :meth:`reserve` answers for a session as that pool would."""

    # --- from one rank to another -------------------------------------------------------------------------------------
    def export(self, owner: Owner) -> State:
        """*owner*'s state, all that is committed, for :meth:`adopt` of a pool that was declared alike. The owner stays
        as it is until it is closed."""
        raise NotImplementedError(f"{type(self).__name__} cannot hand over what an owner holds")

    def adopt(self, owner: Owner, request: EngineRequest, state: State) -> None:
        """:meth:`open` for an *owner* that has a reservation here and goes on with *state*, whose tensors are on this
        pool's device. *request*: the one under way."""
        raise NotImplementedError(f"{type(self).__name__} cannot take over what an owner held elsewhere")

    def inputs(self) -> Sequence[str] | None:
        """The request's inputs that :meth:`open` looks at, by name; ``None``: it may look at any."""
        if self.looks_at is None:
            return None
        return [name for name in (getattr(self.spec, field) for field in self.looks_at) if name is not None]

    # --- prefix reuse -----------------------------------------------------------------------------------------------
    def match(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> int | None:
        """How many of *ids*, from the first, need not be computed for this fresh owner. ``None``: no opinion (the
        resource can start anywhere); 0: everything must be computed."""
        return 0

    def skip(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> None:
        """Take over the state after *ids* (no longer than what :meth:`match` answered)."""
        raise NotImplementedError(f"{type(self).__name__} cannot skip")

    def missed(self, owner: Owner, tokens: int) -> None:
        """Another resource could have begun *owner*'s prompt behind its first *tokens* tokens, and this one could not.
        A hint: the next prompt that begins so may come soon."""

    def cut(self, owner: Owner, tokens: int) -> int:
        """How many of the *tokens* that are left of a prompt the next step should take at most, so that it ends where
        this resource would like to keep its state. By default all."""
        return tokens

    def cuts(self, owner: Owner, tokens: int) -> Sequence[int]:
        """Where :meth:`cut` would end the steps of a prompt of which *tokens* are left, if nothing else did: how many
        of them come before each, but for the last. For a rank that cannot ask before each step."""
        return ()

    # --- calls in pieces ----------------------------------------------------------------------------------------------
    def portion(self, owner: Owner, start: int, most: int) -> tuple[int, int] | None:
        """Which items of a call a step computes, from item *start* on, for entries that advance this resource and whose
        items belong together in pieces (patches of a picture): how many are left out, because what they come to is
        known, and how many follow that are computed, in whole pieces, no more than *most* unless the first piece is
        larger. ``None``: any number, and none is left out."""
        return None

    @property
    def cuts_calls(self) -> bool:
        """Whether :meth:`portion` has a say."""
        return type(self).portion is not Resource.portion

    def lookups(self) -> tuple[int, int] | None:
        """Items whose results might have been known, over all requests, and those of them that were; ``None``: it keeps
        no results."""
        return None

    # --- a step -------------------------------------------------------------------------------------------------------
    def variant(self, rows: Sequence[Row], frozen: bool = False) -> Hashable | None:
        """What of *rows* decides which operations the view will run: a graph is captured for each variant. ``None``:
        these rows cannot run in a captured graph."""
        return () if self.capturable else None

    @property
    def variants(self) -> Sequence[Hashable]:
        """The variants that graphs are captured for before the first request."""
        return ((),)

    @abc.abstractmethod
    def plan(self, rows: Sequence[Row], frozen: bool = False) -> Any:
        """Prepare a step over *rows* on the host and return the view that the node will use. *frozen*: see
        :class:`mstar.spec.graph.Entry`."""

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        """The step succeeded: its state is now *rows*' state."""

    def rollback(self, rows: Sequence[Row], frozen: bool = False) -> None:
        """The step failed, or is planned again: forget it. It may not have been planned."""

    def retract(self, row: Row) -> None:
        """Undo the last commit of *row*, which a step that should not have been launched has made. Only the owner's
        last step can be retracted.

        Where the spec says ``rewinds``, a row of any length takes back the last so many tokens, of however many steps,
        which were committed without ids."""
        raise NotImplementedError(f"{type(self).__name__} cannot retract")

    def learn(self, owner: Owner, ids: Sequence[int]) -> None:
        """The ids of the earliest of *owner*'s committed tokens that were committed without them."""

    # --- books --------------------------------------------------------------------------------------------------------
    @abc.abstractmethod
    def usage(self) -> Usage: ...

    def checkpoint_counts(self) -> Mapping[str, int] | None:
        """States kept for the prefix cache so far: *made*, and of these *evicted*. ``None``: it keeps none."""
        return None

    def device_bytes(self) -> int:
        """Bytes that the pool takes on its device for as long as it lives; what grows with use is not counted."""
        return 0

    @abc.abstractmethod
    def check(self, owners: Sequence[Owner]) -> None:
        """Raise :class:`IntegrityError` unless exactly *owners* are open and every unit is accounted for."""

"""States kept under the name of the tokens that they are the state of. No torch.

A checkpoint is made when a step ends at a page's boundary, and named once all ids up to there are known. While it is
kept, a context that begins with the same tokens may begin with it. The one used longest ago makes room. One whose pages
of keys and values are gone is not found any more, since it is looked for within what they hold, and ages away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mstar.resources.base import IntegrityError
from mstar.resources.prefix import PageChain, page_digests, salted
from mstar.resources.state_places import Places, StatePlaces

__all__ = ["Checkpoint", "Checkpoints", "Lineage"]


@dataclass(slots=True, eq=False)
class Checkpoint:
    """*places* hold the state after *length* tokens, whose digest is *key* once it is known. One that *moves* gives way
    to the next one of its context."""

    places: Places
    length: int
    moves: bool
    key: bytes | None = None


class Checkpoints:
    """At most *most* of them.

    :param page: tokens of a page. :ivar made, evicted: how many so far.
    """

    def __init__(self, most: int, page: int, places: StatePlaces):
        self.most, self.page = most, page
        self._places = places
        self._kept: OrderedDict[Checkpoint, None] = OrderedDict()  # used longest ago first
        self._named: dict[bytes, Checkpoint] = {}
        self.made = self.evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def full(self) -> bool:
        return len(self._kept) >= self.most

    def make(self, slot: int, length: int, moves: bool) -> Checkpoint:
        """Keep the state of *slot*, which is that after *length* tokens."""
        while self.full:
            self.drop(next(iter(self._kept)))
            self.evicted += 1
        made = Checkpoint(self._places.keep(slot), length, moves)
        self._kept[made] = None
        self.made += 1
        return made

    def name(self, checkpoint: Checkpoint, key: bytes) -> bool:
        """*key* is the digest of its tokens. ``False``: it is not needed, or no longer there."""
        if checkpoint not in self._kept:
            return False
        known = self._named.get(key)
        if known is not None:
            self._kept.move_to_end(known)
            self.drop(checkpoint)
            return False
        checkpoint.key = key
        self._named[key] = checkpoint
        return True

    def drop(self, checkpoint: Checkpoint) -> None:
        """Keep it no longer, if it is still kept."""
        if checkpoint not in self._kept:
            return
        del self._kept[checkpoint]
        if checkpoint.key is not None:
            del self._named[checkpoint.key]
        self._places.release(checkpoint.places)

    def find(self, salt: str, ids: Sequence[int]) -> Checkpoint | None:
        """The longest one of a beginning of *ids*."""
        found = None
        if self._named:
            for digest in page_digests(salted(salt), ids, self.page):
                found = self._named.get(digest, found)
        if found is not None:
            self._kept.move_to_end(found)
        return found

    def check(self) -> list[Places]:
        """The places that are held, once the books balance."""
        named = {checkpoint.key: checkpoint for checkpoint in self._kept if checkpoint.key is not None}
        if named != self._named or len(self._kept) > self.most:
            raise IntegrityError(f"{len(self._kept)} checkpoints of {self.most} and {len(self._named)} names")
        return [checkpoint.places for checkpoint in self._kept]


class Lineage:
    """One context's tokens, as far as they are known, and the checkpoints that are made on the way.

    :ivar length: committed tokens. :ivar last: where its last checkpoint is. :ivar branch: up to where
        others hold what they need to go on with its prompt, beyond the longest checkpoint.
    """

    __slots__ = ("_chain", "_lost", "_moving", "_store", "_waiting", "branch", "last", "length", "salt")

    def __init__(self, store: Checkpoints, salt: str):
        self._store, self.salt = store, salt
        self._chain = PageChain(salt, store.page)
        self._waiting: list[Checkpoint] = []
        self._moving: Checkpoint | None = None
        self._lost = False
        self.length = self.last = self.branch = 0

    def facts(self) -> dict[str, Any]:
        """What is known of the context, without its checkpoints: see :meth:`restore`."""
        return {"chain": self._chain.facts(), "lost": self._lost, "length": self.length}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Go on with a context of another pool, whose :meth:`facts` these are. Its checkpoints stay there."""
        digest, rest, known = facts["chain"]
        self._chain.restore(digest, rest, known)
        self._lost, self.length, self.last = facts["lost"], facts["length"], facts["length"]

    def skip(self, ids: Sequence[int]) -> None:
        """Begin behind *ids*."""
        self._chain.add(ids)
        self.length = self.last = len(ids)

    def advance(self, slot: int, tokens: int, ids: Sequence[int] | None, complete: bool) -> None:
        """*tokens* more are committed; their *ids* if they are known. *slot* has the state after them.

        :param complete: they are the last of a prompt, or one of an answer: only the last checkpoint of those stays.
        """
        if ids is not None and self._chain.known < self.length:
            self._lose()
        self.length += tokens
        if self.length % self._store.page == 0 and not self._lost:
            if complete and self._moving is not None and self._store.full:
                self._store.drop(self._moving)  # rather than one of somebody else's
            self._waiting.append(self._store.make(slot, self.length, moves=complete))
            self.last = self.length
        if ids is not None:
            self.learn(ids)

    def _lose(self) -> None:
        """Some ids in between will never be told: the step that read them was under way when its request was cancelled,
        and a session goes on. What comes behind them has no name."""
        self._lost = True
        self.end()

    def learn(self, ids: Sequence[int]) -> None:
        """The ids of the first tokens that were not known."""
        if self._lost:
            return
        for length, key in self._chain.add(ids):
            if self._waiting and self._waiting[0].length == length:
                self._named(self._waiting.pop(0), key)
        if self._chain.known > self.length:
            raise IntegrityError(f"a context learns {self._chain.known} ids and has {self.length} tokens")

    def _named(self, checkpoint: Checkpoint, key: bytes) -> None:
        if self._store.name(checkpoint, key) and checkpoint.moves:
            if self._moving is not None:
                self._store.drop(self._moving)
            self._moving = checkpoint

    def retract(self, tokens: int) -> None:
        """The last *tokens*, whose ids were never told, are no more."""
        self.length -= tokens
        if self._chain.known > self.length and not self._lost:
            raise IntegrityError("a context cannot take back tokens whose ids are known")
        while self._waiting and self._waiting[-1].length > self.length:
            self._store.drop(self._waiting.pop())

    def end(self) -> None:
        """Nothing more will be known."""
        while self._waiting:
            self._store.drop(self._waiting.pop())

    def cut(self, tokens: int, apart: int) -> int:
        """How many of the *tokens* left of a prompt to run before the next checkpoint; all if none is wanted.

        :param apart: the most tokens between two.
        """
        return self._next_cut(self.length, self.last, self.length + tokens, apart) - self.length

    def cuts(self, tokens: int, apart: int) -> list[int]:
        """How many of the *tokens* left come before each place where :meth:`cut` would end a step."""
        at, last, end, found = self.length, self.last, self.length + tokens, []
        while (at := self._next_cut(at, last, end, apart)) < end:
            found.append(at - self.length)
            last = at if at % self._store.page == 0 else last
        return found

    def _next_cut(self, length: int, last: int, end: int, apart: int) -> int:
        """Where the step from *length* on is to end, of a prompt up to *end* whose last checkpoint is at *last*."""
        page = self._store.page
        wanted = [(length // apart + 1) * apart, self.branch]
        final = (end - 1) // page * page  # the last token is always computed
        if final - last >= apart // 4:
            wanted.append(final)
        return min((at for at in wanted if length < at < end), default=end)

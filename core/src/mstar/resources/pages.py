"""Books of a paged pool: who holds which page, what was promised to whom, what may be reused. No torch.

*Promises.* Admission promises an owner the pages of its worst case; physical pages are taken as its context grows,
which never fails within the promise, because at all times ``pages in use + pages promised but not taken + pages owed to
copies <= pages``. A page that several owners share is in use once, so sharing a prefix makes room for further promises.

*Prefix cache.* A full page whose ids are known is registered under a digest of (salt, digest of the page before, ids),
as in vLLM's automatic prefix caching. Pages that nobody holds any more stay registered until they are needed, least
recently used first and the end of a prefix before its beginning.

*Copy-on-write.* A sibling shares its parent's pages, the partial last one included. Whoever writes first into a page
that others hold (or that is registered) gets a copy; one page is owed for each such copy from the moment of sharing.

*Contiguity.* A context that begins claims a run of free pages for its whole promise, softly: others may take the unused
rest, but only when nothing else is left. Contexts so tend to be one run, which a backend can read without a gather.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mstar.resources.base import IntegrityError, Owner, Row, Usage
from mstar.resources.prefix import page_digests, salted
from mstar.resources.runs import FreeRuns
from mstar.spec.errors import RequestError

__all__ = ["Growth", "PagePool"]

_EVICT_AT_LEAST = 8
"""Idle pages are reclaimed for one context in lots of about this many, so that it gets a run and not scattered
pages."""


class Growth(NamedTuple):
    """What :meth:`PagePool.grow` changed: table entries from index *first* on; *copies* are (source, target) pages
    whose contents must be copied before the step writes."""

    first: int
    copies: list[tuple[int, int]]


class _Context:
    """One owner's books. ``ids`` are those of its first committed tokens: all of them, or up to the first whose id the
    host does not know (yet). ``lost``: it will never be told, since its step was under way when its request was
    cancelled, and a session went on behind it."""

    __slots__ = ("home", "ids", "is_open", "keys", "length", "lost", "promise", "salt", "table")

    def __init__(self) -> None:
        self.promise = 0
        self.table: list[int] = []
        self.length = 0
        self.home = range(0)
        self.is_open = False
        self.salt = b""
        self.ids: array[int] = array("q")
        self.keys: list[bytes] = []
        self.lost = False


class PagePool:
    """*pages* pages of *page_size* tokens each.

    :param prefix_cache: register full pages and keep them after their owners are gone.
    """

    def __init__(self, pages: int, page_size: int, prefix_cache: bool = True):
        self.pages, self.page_size, self.prefix_cache = pages, page_size, prefix_cache
        self._contexts: dict[Owner, _Context] = {}
        self._references = [0] * pages
        self._free = FreeRuns(pages)
        self._idle: dict[int, None] = {}  # registered pages that nobody holds, first to be evicted first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._owed: dict[int, int] = {}  # shared page -> copies that its writers may still need
        self._in_use = 0
        self._promised = 0  # over all owners: promised and not taken, plus owed copies

    # --- admission --------------------------------------------------------------------------------------------------
    def units(self, tokens: int) -> int:
        """Pages that *tokens* tokens fill."""
        return -(-tokens // self.page_size)

    def reserve(self, owner: Owner, pages: int) -> bool:
        """Promise *pages* in all to *owner* (an earlier, larger promise stands); to an open one, a session that goes
        on, *pages* beside those of its committed tokens. ``False``: not free now, nothing done.

        :raises RequestError: an open owner would need more pages than there are.
        """
        context = self._contexts.get(owner)
        if context is not None and context.is_open:
            pages += self.units(context.length)
            if pages > self.pages:
                raise RequestError(
                    f"the session holds {context.length} tokens; with this request it would need {pages} pages of "
                    f"{self.page_size} tokens, and there are {self.pages}; begin a new session or ask for less",
                    param="session",
                    code="request_too_large",
                )
        more = max(0, pages - (context.promise if context else 0))
        if self._in_use + self._promised + more > self.pages:
            return False
        if context is None:
            context = self._contexts[owner] = _Context()
        context.promise += more
        self._promised += more
        return True

    def open(self, owner: Owner, salt: str = "") -> None:
        """Begin *owner*'s context; one that is open goes on."""
        context = self._get(owner)
        if not context.is_open:
            context.is_open, context.salt = True, salted(salt)

    def close(self, owner: Owner) -> None:
        """Free *owner*'s pages and promise."""
        context = self._get(owner)
        written = self._partial(context)
        for index in range(len(context.table) - 1, -1, -1):
            self._release(context.table[index], writer=index == written)
        self._free.add(context.home)
        self._promised -= context.promise - len(context.table)
        del self._contexts[owner]

    # --- prefix reuse -----------------------------------------------------------------------------------------------
    def match(self, owner: Owner, ids: Sequence[int]) -> int:
        """Tokens at the start of *ids* that cached pages hold for a fresh *owner*. Never all: the last is computed."""
        if not self.prefix_cache:
            return 0
        return self.page_size * len(self._cached(self._get(owner), ids))

    def attach(self, owner: Owner, ids: Sequence[int]) -> None:
        """Begin fresh *owner* with cached pages that hold exactly *ids* (whole pages of them)."""
        context = self._get_fresh(owner)
        wanted = array("q", ids)
        pages = self._cached(context, [*wanted, 0])
        if len(pages) * self.page_size != len(wanted):
            raise IntegrityError(f"{owner} cannot skip {len(wanted)} tokens: cached pages hold less or were evicted")
        self._take_over(context, pages, wanted, [self._key_of[page] for page in pages])

    def shares(self, owner: Owner, sibling: Owner, ids: Sequence[int]) -> bool:
        """Whether *sibling* has committed all of *ids* (under *owner*'s salt), so that *owner* may :meth:`fork` it."""
        parent = self._contexts.get(sibling)
        if parent is None or not parent.is_open or parent.salt != self._get(owner).salt:
            return False
        return len(parent.ids) >= len(ids) and parent.ids[: len(ids)] == array("q", ids)

    def fork(self, owner: Owner, sibling: Owner, tokens: int) -> None:
        """Begin fresh *owner* with the first *tokens* committed tokens of *sibling*, sharing its pages."""
        context, parent = self._get_fresh(owner), self._get(sibling)
        if tokens > len(parent.ids):
            raise IntegrityError(f"{owner} cannot share {tokens} tokens of {sibling}: {len(parent.ids)} are known")
        pages, full = parent.table[: self.units(tokens)], tokens // self.page_size
        self._take_over(context, pages, parent.ids[:tokens], parent.keys[:full])
        if len(pages) > full:
            self._owed[pages[-1]] = self._owed.get(pages[-1], 0) + 1
            self._promised += 1

    # --- from another pool --------------------------------------------------------------------------------------------
    def known(self, owner: Owner) -> tuple[list[int], bool]:
        """The ids of *owner*'s first tokens, as far as they are known, and whether more may be learnt."""
        context = self._get(owner)
        return context.ids.tolist(), not context.lost

    def follow(self, owner: Owner, tokens: int) -> None:
        """Another pool, of which this one only keeps the promises, has *tokens* more of *owner*."""
        context = self._get(owner)
        context.length, context.lost = context.length + tokens, True

    def fill(self, owner: Owner, tokens: int, ids: Sequence[int], learns: bool = True) -> None:
        """Begin fresh *owner* with pages of its own for *tokens* committed tokens, which another pool has computed.
        *ids* and *learns*: as that pool's :meth:`known` says."""
        context, pages = self._get_fresh(owner), self.units(tokens)
        if pages > context.promise or len(ids) > tokens:
            raise IntegrityError(f"{owner} comes with {tokens} tokens, and {context.promise} pages were promised to it")
        context.table.extend(self._take(context, pages))
        self._promised -= pages
        context.length, context.lost = tokens, not learns
        self._add_ids(context, ids)

    # --- a step -------------------------------------------------------------------------------------------------------
    def fits(self, owner: Owner, tokens: int) -> bool:
        """Whether *tokens* more tokens stay within the promise."""
        context = self._get(owner)
        return context.is_open and self.units(context.length + tokens) <= context.promise

    def grow(self, owner: Owner, tokens: int) -> Growth:
        """Make room for *tokens* tokens past the committed ones, in pages that only *owner* writes."""
        context = self._get(owner)
        needed = self.units(context.length + tokens) - len(context.table)
        if not self.fits(owner, tokens):
            total = context.length + tokens
            raise IntegrityError(f"{owner} grows to {total} tokens but {context.promise} pages were promised to it")
        first, copies = len(context.table), []
        written = self._partial(context)
        if written is not None and tokens and self._is_shared(context.table[written]):
            copies.append(self._copy_on_write(context, written))
            first = written
        if needed > 0:
            context.table.extend(self._take(context, needed))
            self._promised -= needed
        return Growth(first, copies)

    def commit(self, owner: Owner, tokens: int, ids: Sequence[int] | None) -> None:
        """*tokens* tokens were written. Full pages whose *ids* are known, all from the context's first on, are
        registered; ids that are not known yet may be told later (:meth:`learn`)."""
        self._commit(owner, self._get(owner), tokens, ids)

    def commit_rows(self, rows: Sequence[Row]) -> None:
        """:meth:`commit` for all rows of a step."""
        contexts = self._contexts
        for row in rows:
            context = contexts.get(row.owner) or self._get(row.owner)
            ids = row.ids
            if ids is None:
                context.length += row.length
            else:
                self._commit(row.owner, context, row.length, ids)

    def _commit(self, owner: Owner, context: _Context, tokens: int, ids: Sequence[int] | None) -> None:
        if ids is None:
            context.length += tokens
            return
        if len(ids) != tokens:
            raise IntegrityError(f"{owner} committed {tokens} tokens with {len(ids)} ids")
        if len(context.ids) < context.length:
            context.lost = True
        context.length += tokens
        if not context.lost:
            self._add_ids(context, ids)

    def learn(self, owner: Owner, ids: Sequence[int]) -> None:
        """The *ids* of the first committed tokens whose ids were not known."""
        context = self._get(owner)
        if context.lost:
            return
        if len(context.ids) + len(ids) > context.length:
            raise IntegrityError(f"{owner} learns more ids than it has tokens")
        self._add_ids(context, ids)

    def retract(self, owner: Owner, tokens: int) -> None:
        """Forget the last *tokens* committed tokens, whose ids were never told. Their pages stay the owner's."""
        context = self._get(owner)
        context.length -= tokens
        if context.length < len(context.ids):
            raise IntegrityError(f"{owner} cannot retract tokens whose ids are known")

    def _add_ids(self, context: _Context, ids: Sequence[int]) -> None:
        context.ids.extend(ids)
        if self.prefix_cache and len(context.ids) >= (len(context.keys) + 1) * self.page_size:
            self._register(context)

    def held(self, owner: Owner) -> int:
        """Committed tokens of an open owner; 0 for one that is not open."""
        context = self._contexts.get(owner)
        return context.length if context is not None and context.is_open else 0

    def length(self, owner: Owner) -> int:
        """Committed tokens."""
        return self._get(owner).length

    def table(self, owner: Owner) -> Sequence[int]:
        """*owner*'s pages in order. May extend past the committed length."""
        return self._get(owner).table

    # --- inside -------------------------------------------------------------------------------------------------------
    def _get(self, owner: Owner) -> _Context:
        try:
            return self._contexts[owner]
        except KeyError:
            raise IntegrityError(f"{owner} has no reservation") from None

    def _get_fresh(self, owner: Owner) -> _Context:
        context = self._get(owner)
        if not context.is_open or context.table:
            raise IntegrityError(f"{owner} is not fresh: it cannot take over a prefix")
        return context

    def _partial(self, context: _Context) -> int | None:
        """Index of the committed page that the next write goes into, if there is one."""
        return context.length // self.page_size if context.length % self.page_size else None

    def _is_shared(self, page: int) -> bool:
        return self._references[page] > 1 or page in self._key_of

    def _cached(self, context: _Context, ids: Sequence[int]) -> list[int]:
        pages: list[int] = []
        for key in page_digests(context.salt, array("q", ids[:-1]), self.page_size):
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def _take_over(self, context: _Context, pages: list[int], ids: array[int], keys: list[bytes]) -> None:
        if len(pages) > context.promise:
            raise IntegrityError(f"{len(pages)} pages to share but only {context.promise} promised")
        for page in pages:
            self._hold(page)
        self._promised -= len(pages)
        context.table, context.length, context.ids, context.keys = list(pages), len(ids), array("q", ids), list(keys)

    def _hold(self, page: int) -> None:
        if self._references[page] == 0:
            self._idle.pop(page, None)
            self._in_use += 1
        self._references[page] += 1

    def _release(self, page: int, writer: bool) -> None:
        """Drop one reference. A *writer* held it as the page that it would write next."""
        self._references[page] -= 1
        left = self._references[page]
        owed = self._owed.get(page, 0)
        if owed:
            # As many copies as there are writers, less one if the last writer may write in place.
            limit = left if page in self._key_of else max(0, left - 1)
            self._set_owed(page, min(owed - writer, limit))
        if left == 0:
            self._in_use -= 1
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.add(range(page, page + 1))

    def _set_owed(self, page: int, copies: int) -> None:
        self._promised += copies - self._owed.pop(page, 0)
        if copies:
            self._owed[page] = copies

    def _copy_on_write(self, context: _Context, index: int) -> tuple[int, int]:
        source = context.table[index]
        if not self._owed.get(source):
            raise IntegrityError(f"page {source} is shared but no copy is owed to its writers")
        (target,) = self._take(context, 1)
        context.table[index] = target
        # The copy that was owed is paid with the page just taken.
        self._release(source, writer=True)
        return source, target

    def _register(self, context: _Context) -> None:
        parent = context.keys[-1] if context.keys else context.salt
        for key in page_digests(parent, context.ids, self.page_size, len(context.keys)):
            page = context.table[len(context.keys)]
            context.keys.append(key)
            if key not in self._page_of:
                self._page_of[key], self._key_of[page] = page, key

    # --- physical pages ---------------------------------------------------------------------------------------------
    def _take(self, context: _Context, count: int) -> list[int]:
        """*count* unused pages for *context*, following on from what it has where possible."""
        taken: list[int] = []
        while len(taken) < count:
            if not context.home:
                after = taken[-1] if taken else context.table[-1] if context.table else None
                context.home = self._claim(context, count - len(taken), len(taken), after)
            run = context.home[: count - len(taken)]
            context.home = context.home[len(run) :]
            taken.extend(run)
        for page in taken:
            self._hold(page)
        return taken

    def _claim(self, context: _Context, now: int, taken: int, after: int | None) -> range:
        """A run of free pages for *context*: *now* pages are needed at once, the rest of its promise later."""
        wanted = max(now, context.promise - len(context.table) - taken)
        run = self._free.claim(wanted, after)
        if not run and self._idle:
            self._evict(max(now, min(wanted, _EVICT_AT_LEAST)))
            run = self._free.claim(wanted, after)
        return run or self._steal(context)

    def _evict(self, count: int) -> None:
        for page in list(self._first_idle(count)):
            del self._idle[page]
            del self._page_of[self._key_of.pop(page)]
            self._free.add(range(page, page + 1))

    def _first_idle(self, count: int) -> Iterable[int]:
        return (page for _, page in zip(range(count), self._idle, strict=False))

    def _steal(self, context: _Context) -> range:
        """The last unused page of the largest run that another context claimed."""
        victim = max(self._contexts.values(), key=lambda other: len(other.home))
        if not victim.home or victim is context:
            raise IntegrityError("no page is left although promises hold: the books are wrong")
        stolen, victim.home = victim.home[-1:], victim.home[:-1]
        return stolen

    # --- books ------------------------------------------------------------------------------------------------------
    def usage(self) -> Usage:
        """Pages in use or promised, in all, and cached ones that nobody holds."""
        return Usage(self._in_use + self._promised, self.pages, len(self._idle))

    def check(self, owners: Sequence[Owner]) -> None:
        """Raise :class:`IntegrityError` unless exactly *owners* hold reservations and every page is accounted for."""
        if set(owners) != set(self._contexts):
            raise IntegrityError(f"pages held by {sorted(self._contexts)} but open owners are {sorted(owners)}")
        references = [0] * self.pages
        for context in self._contexts.values():
            for page in context.table:
                references[page] += 1
        if references != self._references:
            raise IntegrityError("reference counts do not match the owners' tables")
        held = [page for page, count in enumerate(references) if count]
        home = [page for context in self._contexts.values() for page in context.home]
        if sorted([*held, *home, *self._idle, *self._free]) != list(range(self.pages)):
            raise IntegrityError("pages are lost or counted twice")
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            raise IntegrityError("prefix index and page keys disagree")
        promised = sum(c.promise - len(c.table) for c in self._contexts.values()) + sum(self._owed.values())
        if (self._in_use, self._promised) != (len(held), promised) or len(held) + promised > self.pages:
            raise IntegrityError(f"{len(held)} pages in use and {promised} promised of {self.pages} do not add up")

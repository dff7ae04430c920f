"""The page books: a stateful property test against a plain model of who wrote what, and single facts."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Owners
from hypothesis.stateful import RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from mstar.resources.base import IntegrityError, Owner
from mstar.resources.pages import PagePool
from mstar.resources.runs import FreeRuns
from mstar.spec.errors import RequestError

Content = dict[int, list[int]]


class Books(RuleBasedStateMachine):
    """Drives a pool as ``PagedKV`` does, and keeps the contents of every page beside it: what an owner reads through
    its table must always be exactly the ids that it committed."""

    owners = Owners("owners")

    @initialize(pages=st.integers(4, 24), size=st.sampled_from([1, 2, 4]), cache=st.booleans())
    def begin(self, pages: int, size: int, cache: bool) -> None:
        self.pool = PagePool(pages, size, cache)
        self.content: Content = {page: [-1] * size for page in range(pages)}
        self.ids: dict[Owner, list[int]] = {}
        self.promise: dict[Owner, int] = {}
        self.serial = 0

    def write(self, owner: Owner, ids: list[int]) -> None:
        size, start = self.pool.page_size, len(self.ids[owner])
        _, copies = self.pool.grow(owner, len(ids))
        read = [list(self.content[source]) for source, _ in copies]
        for (_, target), ids_read in zip(copies, read, strict=True):
            self.content[target] = ids_read
        table = self.pool.table(owner)
        for i, token in enumerate(ids, start):
            self.content[table[i // size]][i % size] = token

    @rule(target=owners, tokens=st.integers(1, 30), salt=st.sampled_from(["", "x"]))
    def admit(self, tokens: int, salt: str) -> object:
        self.serial += 1
        owner = Owner(f"r{self.serial}")
        pages = self.pool.units(tokens)
        free = self.pool.pages - self.pool.usage().used
        granted = self.pool.reserve(owner, pages)
        assert granted == (pages <= free)
        if not granted:
            return multiple()
        self.pool.open(owner, salt)
        self.ids[owner], self.promise[owner] = [], pages
        return owner

    @rule(owner=owners, ids=st.lists(st.integers(0, 1), min_size=1, max_size=20), data=st.data())
    def append(self, owner: Owner, ids: list[int], data: st.DataObject) -> None:
        room = self.promise[owner] * self.pool.page_size - len(self.ids[owner])
        ids = ids[:room]
        if not ids:
            return
        self.write(owner, ids)
        if data.draw(st.booleans(), "fails"):
            return  # the same step again, or another one
        self.pool.commit(owner, len(ids), ids)
        self.ids[owner].extend(ids)

    @rule(owner=owners, ids=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def reuse(self, owner: Owner, ids: list[int]) -> None:
        ids = ids[: self.promise[owner] * self.pool.page_size]
        if self.ids[owner] or self.pool.table(owner):
            return
        known = self.pool.match(owner, ids)
        assert known < len(ids)
        assert known % self.pool.page_size == 0
        self.pool.attach(owner, ids[:known])
        self.ids[owner] = ids[:known]

    @rule(owner=owners, parent=owners, data=st.data())
    def fork(self, owner: Owner, parent: Owner, data: st.DataObject) -> None:
        most = min(len(self.ids[parent]), self.promise[owner] * self.pool.page_size)
        if self.ids[owner] or self.pool.table(owner) or not most or owner == parent:
            return
        tokens = data.draw(st.integers(1, most), "tokens")
        ids = self.ids[parent][:tokens]
        if self.pool.shares(owner, parent, ids):
            self.pool.fork(owner, parent, tokens)
            self.ids[owner] = ids

    @rule(owner=owners, pages=st.integers(1, 12))
    def enlarge(self, owner: Owner, pages: int) -> None:
        """A session's next request: *pages* beside what the owner holds."""
        total = pages + self.pool.units(self.pool.length(owner))
        if total > self.pool.pages:
            with pytest.raises(RequestError, match="begin a new session"):
                self.pool.reserve(owner, pages)
        elif self.pool.reserve(owner, pages):
            self.promise[owner] = max(total, self.promise[owner])

    @rule(owner=consumes(owners))
    def close(self, owner: Owner) -> None:
        self.pool.close(owner)
        del self.ids[owner], self.promise[owner]

    @invariant()
    def books_balance(self) -> None:
        self.pool.check(list(self.ids))
        size = self.pool.page_size
        for owner, ids in self.ids.items():
            table = self.pool.table(owner)
            assert [self.content[table[i // size]][i % size] for i in range(len(ids))] == ids

    def teardown(self) -> None:
        for owner in list(self.ids):  # every promise can be used up to its last page, in turn
            room = self.promise[owner] * self.pool.page_size - len(self.ids[owner])
            self.write(owner, [5] * room)
            self.pool.commit(owner, room, None)
            self.ids[owner].extend([5] * room)
            self.books_balance()
        for owner in list(self.ids):
            self.pool.close(owner)
        self.pool.check([])
        assert self.pool.usage().used == 0


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def opened(pool: PagePool, name: str, pages: int) -> Owner:
    owner = Owner(name)
    assert pool.reserve(owner, pages)
    pool.open(owner)
    return owner


def test_contexts_that_grow_side_by_side_stay_contiguous() -> None:
    pool = PagePool(64, 4)
    owners = [opened(pool, f"r{i}", 8) for i in range(8)]
    for _ in range(32):
        for owner in owners:
            pool.grow(owner, 1)
            pool.commit(owner, 1, None)
    for owner in owners:
        table = list(pool.table(owner))
        assert table == list(range(table[0], table[0] + 8))


def test_the_end_of_a_prefix_is_evicted_first() -> None:
    pool = PagePool(6, 1)
    a = opened(pool, "a", 4)
    pool.grow(a, 4)
    pool.commit(a, 4, [1, 2, 3, 4])
    pool.close(a)
    b = opened(pool, "b", 4)
    pool.grow(b, 3)  # two pages were free, one must be evicted, and lots are reclaimed together
    c = opened(pool, "c", 2)
    assert pool.match(c, [1, 2, 3, 4, 5]) in (0, 1, 2, 3)
    pool.check([b, c])


def test_a_shared_prefix_makes_room_for_more() -> None:
    pool = PagePool(10, 1)
    a = opened(pool, "a", 6)
    pool.grow(a, 5)
    pool.commit(a, 5, [1, 2, 3, 4, 5])
    assert not pool.reserve(Owner("b"), 6)
    b = opened(pool, "b", 4)
    assert pool.usage().used == 10
    pool.attach(b, [1, 2, 3, 4])
    assert pool.usage().used == 6
    opened(pool, "c", 4)


def test_a_cached_page_is_copied_before_a_sibling_writes_into_it() -> None:
    pool = PagePool(4, 4)
    a, b = opened(pool, "a", 1), opened(pool, "b", 2)
    pool.grow(a, 4)
    pool.commit(a, 4, [1, 2, 3, 4])
    pool.fork(b, a, 2)  # the parent is ahead: its full page is registered
    pool.close(a)
    (cached,) = pool.table(b)
    _, copies = pool.grow(b, 1)
    assert copies == [(cached, pool.table(b)[0])]
    pool.commit(b, 1, [9])
    pool.check([b])
    c = opened(pool, "c", 2)
    assert pool.match(c, [1, 2, 3, 4, 5]) == 4
    pool.attach(c, [1, 2, 3, 4])
    assert pool.table(c) == [cached]


def test_a_copy_is_owed_once() -> None:
    pool = PagePool(4, 4)
    a, b = opened(pool, "a", 1), opened(pool, "b", 1)
    pool.grow(a, 4)
    pool.commit(a, 4, [1, 2, 3, 4])
    pool.fork(b, a, 3)
    assert pool.usage().used == 2
    pool.grow(b, 1)
    assert pool.usage().used == 2  # the page owed is now the page taken


def test_whoever_writes_last_into_a_shared_page_writes_in_place() -> None:
    pool = PagePool(4, 4)
    a, b = opened(pool, "a", 1), opened(pool, "b", 1)
    pool.grow(a, 2)
    pool.commit(a, 2, [1, 2])
    pool.fork(b, a, 2)
    assert pool.usage().used == 2  # one page in use and one owed to a copy
    assert len(pool.grow(a, 1).copies) == 1
    assert pool.grow(b, 1).copies == []
    pool.check([a, b])
    assert pool.usage().used == 2


def test_misuse_is_reported() -> None:
    pool = PagePool(4, 2)
    a = opened(pool, "a", 1)
    with pytest.raises(IntegrityError, match="1 pages were promised"):
        pool.grow(a, 3)
    with pytest.raises(IntegrityError, match="no reservation"):
        pool.close(Owner("b"))
    with pytest.raises(IntegrityError, match="with 1 ids"):
        pool.commit(a, 2, [1])
    with pytest.raises(IntegrityError, match="open owners"):
        pool.check([])


def test_unknown_ids_end_the_chain_but_not_the_context() -> None:
    pool = PagePool(8, 2)
    a = opened(pool, "a", 4)
    pool.grow(a, 6)
    pool.commit(a, 2, [1, 2])
    pool.commit(a, 2, None)
    pool.commit(a, 2, [5, 6])
    pool.close(a)
    b = opened(pool, "b", 4)
    assert pool.match(b, [1, 2, 3, 4, 5]) == 2


def test_free_runs_join_again() -> None:
    runs = FreeRuns(10)
    parts = [runs.claim(3), runs.claim(3), runs.claim(3)]
    assert runs.claim(5) == range(9, 10)
    assert runs.claim(1) == range(0)
    for part in (parts[0], parts[2], parts[1], range(9, 10)):
        runs.add(part)
    assert runs.claim(10) == range(10)


def test_pages_import_no_torch() -> None:
    code = "import sys, mstar.resources.pages, mstar.resources.slots; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ids_that_are_told_late_make_pages_reusable() -> None:
    pool, first, second = PagePool(8, 2), Owner("first"), Owner("second")
    assert pool.reserve(first, 4)
    pool.open(first)
    for count, ids in ((3, (5, 6, 7)), (1, None), (1, None)):
        pool.grow(first, count)
        pool.commit(first, count, ids)
    assert pool.reserve(second, 4)
    pool.open(second)
    assert pool.match(second, (5, 6, 7, 8, 9, 1)) == 2, "the second page's last id is not known yet"
    pool.learn(first, (8,))
    assert pool.match(second, (5, 6, 7, 8, 9, 1)) == 4
    pool.learn(first, (9,))
    with pytest.raises(IntegrityError, match="learns more"):
        pool.learn(first, (1,))
    pool.check([first, second])


def test_a_retracted_token_is_written_again() -> None:
    pool, owner = PagePool(4, 2), Owner("a")
    assert pool.reserve(owner, 2)
    pool.open(owner)
    pool.grow(owner, 2)
    pool.commit(owner, 2, (1, 2))
    pool.grow(owner, 1)
    pool.commit(owner, 1, None)
    pool.retract(owner, 1)
    assert pool.length(owner) == 2
    assert pool.grow(owner, 1).copies == []
    pool.commit(owner, 1, (3,))
    with pytest.raises(IntegrityError, match="cannot retract"):
        pool.retract(owner, 1)
    pool.close(owner)
    pool.check([])


def test_ids_behind_some_that_are_never_told_name_no_page() -> None:
    """A request of a session was cancelled while its last step was under way; the next one goes on behind it."""
    pool = PagePool(8, 2)
    session, other = Owner("session"), Owner("other")
    for owner in (session, other):
        assert pool.reserve(owner, 4)
        pool.open(owner)
    for count, ids in ((1, (5,)), (1, None), (2, (7, 8)), (1, None)):  # the second token's id stays unknown
        pool.grow(session, count)
        pool.commit(session, count, ids)
    pool.learn(session, (9,))
    for ids in ([5, 9, 1], [5, 7, 1], [5, 7, 8, 9, 1]):
        assert pool.match(other, ids) == 0
    pool.check([session, other])

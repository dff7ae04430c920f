"""Books of embeddings by content, whatever requests come and go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.resources.base import IntegrityError
from mstar.resources.media_books import MediaBooks, Piece

LINES = 12
SIZES = (1, 2, 3, 4, 5)


class Books(RuleBasedStateMachine):
    """Requests take up to what is promised to all of them together, and write what they took."""

    def __init__(self) -> None:
        super().__init__()
        self.books = MediaBooks(LINES)
        self.requests: list[list[Piece]] = []
        self.written: dict[int, int] = {}  # line → content

    def held(self) -> int:
        return sum(len(piece.lines) for pieces in self.requests for piece in pieces)

    @rule(contents=strategies.lists(strategies.integers(0, 9), min_size=1, max_size=4))
    def begin(self, contents: list[int]) -> None:
        if self.held() + sum(SIZES[c % 5] for c in contents) > LINES:
            return
        self.requests.append([self.books.take(("", c, c), SIZES[c % 5]) for c in contents])

    @precondition(lambda self: self.requests)
    @rule(data=strategies.data())
    def write(self, data: strategies.DataObject) -> None:
        for piece in data.draw(strategies.sampled_from(self.requests)):
            if piece.ready:
                assert all(self.written[line] == piece.key[1] for line in piece.lines.tolist())
            piece.ready = True
            self.written.update(dict.fromkeys(piece.lines.tolist(), piece.key[1]))

    @precondition(lambda self: self.requests)
    @rule(data=strategies.data())
    def end(self, data: strategies.DataObject) -> None:
        self.books.release(self.requests.pop(data.draw(strategies.integers(0, len(self.requests) - 1))))

    @invariant()
    def balanced(self) -> None:
        self.books.check(self.requests)
        for piece in self.books.pieces.values():
            if piece.ready:
                assert all(self.written[line] == piece.key[1] for line in piece.lines.tolist())


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBooks = Books.TestCase


def test_what_is_known_is_found_until_the_room_is_needed() -> None:
    books = MediaBooks(4)
    first = books.take(("", 1, 1), 2)
    first.ready = True
    books.release([first])
    assert books.take(("", 1, 1), 2) is first
    books.release([first])
    other = books.take(("", 2, 2), 3)
    assert books.take(("", 3, 3), 1) is not other
    assert (books.asked, books.hits, list(books.idle)) == (8, 2, [])


def test_salts_share_nothing() -> None:
    books = MediaBooks(4)
    assert books.take(("a", 1, 1), 1) is not books.take(("b", 1, 1), 1)


def test_more_than_was_promised_is_an_error() -> None:
    books = MediaBooks(2)
    books.take(("", 1, 1), 2)
    with pytest.raises(IntegrityError, match="more is held than was promised"):
        books.take(("", 2, 2), 1)


def test_books_that_do_not_balance_are_noticed() -> None:
    books = MediaBooks(4)
    piece = books.take(("", 1, 1), 2)
    with pytest.raises(IntegrityError, match="held by others"):
        books.check([])
    books.check([[piece]])
    piece.lines = np.array([0, 0])
    with pytest.raises(IntegrityError, match="lost or counted twice"):
        books.check([[piece]])

"""Ready items of one group, and how a step is filled from them. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from mstar.scheduler.base import Batch, Item
from mstar.scheduler.deadlines import Deadlines
from mstar.scheduler.levels import Levels

__all__ = ["GATHER", "PATIENCE", "Group"]

GATHER = 6
"""So many steps of others a group may wait for more items, counted from its own last one or from its first item."""

PATIENCE = 4
"""A line that got nothing worth having in so many steps of its group is served first in the next."""

WORTHWHILE = 8
"""A cut call counts as served when it got at least one part in so many of the step's tokens."""


class Line:
    """Items of one sort: by priority, then first come, first served. :attr:`passed`: how many steps in a row left it
    unserved."""

    __slots__ = ("_levels", "passed")

    def __init__(self) -> None:
        self._levels: Levels[OrderedDict[Item, None]] = Levels(OrderedDict)
        self.passed = 0

    def __bool__(self) -> bool:
        return bool(self._levels)

    def add(self, item: Item, front: bool) -> None:
        level = self._levels.at(item.priority)
        level[item] = None
        if front:
            level.move_to_end(item, last=False)

    def first(self) -> Item:
        return next(iter(self._levels.top))

    def remove(self, item: Item) -> None:
        level = self._levels.at(item.priority)
        del level[item]
        if not level:
            self._levels.drop(item.priority)


class _Step:
    """A step being filled: what is in it and the room that is left."""

    __slots__ = ("cut", "decode_tokens", "decodes", "other_tokens", "others", "rows", "tokens")

    def __init__(self, rows: int, tokens: int):
        self.rows, self.tokens = rows, tokens
        self.decodes: list[Item] = []
        self.decode_tokens: list[int] = []
        self.others: list[Item] = []
        self.other_tokens: list[int] = []
        self.cut: list[Item] = []

    def fit(self, item: Item) -> int:
        """How many of *item*'s tokens this step may run; -1: the item must wait.

        A call that is larger than any step and cannot be cut is let in first, and then nothing else fits.
        """
        if self.rows < item.rows:
            return -1
        if item.tokens <= self.tokens:
            return item.tokens
        if item.chunkable:
            return self.tokens if self.tokens > 0 else -1
        return -1 if self.decodes or self.others else item.tokens

    def take(self, item: Item, tokens: int) -> None:
        self.rows -= item.rows
        self.tokens -= tokens
        if item.decode:
            self.decodes.append(item)
            self.decode_tokens.append(tokens)
        else:
            self.others.append(item)
            self.other_tokens.append(tokens)

    def batch(self, group: tuple[Any, ...]) -> Batch:
        return Batch(group, self.decodes + self.others, self.decode_tokens + self.other_tokens)


class Group:
    """The ready items that may share a step: running loops (*decodes*), calls that may be cut (*chunks*) and other new
    calls (*wholes*), served in this order.

    :param limit: the most rows of one step; ``None`` leaves it to the deployment.
    :param left: called with every item that leaves through :meth:`fill`.
    :param mixed: the most rows of decodes that share a step with other items; ``None``: any number.
    :ivar size: how many rows its items take. :ivar tokens: how many tokens these have. :ivar decoding: how
        many of the rows are decodes'. :ivar cohorts: those of the items that stand for several calls.
    """

    __slots__ = (
        *("_began", "_decode_tokens", "_left", "_patient", "_turn", "chunks", "cohorts", "deadlines", "decodes"),
        *("decoding", "key", "limit", "lines", "mixed", "size", "tokens", "wholes"),
    )

    def __init__(self, key: tuple[Any, ...], limit: int | None, left: Callable[[Item], None], mixed: int | None = None):
        self.key, self.limit, self._left, self.mixed = key, limit, left, mixed
        self.decodes, self.chunks, self.wholes = self.lines = (Line(), Line(), Line())
        self.deadlines: Deadlines[Item] = Deadlines()
        self.cohorts: dict[Item, None] = {}
        self.size = self.tokens = self.decoding = self._decode_tokens = self._patient = self._began = 0
        self._turn = False  # whether decodes go first where they and others have steps of their own

    def __bool__(self) -> bool:
        return self.size > 0

    def begin(self, steps: int) -> None:
        """It has got its first item, or run a step, after *steps* steps of all groups."""
        self._began = steps

    def gathers(self, steps: int, most: int, comfortable: float) -> bool:
        """Whether it may leave its turn to another group: all that it holds may wait and is due after *comfortable*
        (monotonic seconds), and more may come.

        :param steps: of all groups so far. :param most: items that it could hold, if all requests sent theirs.
        """
        if self._patient < self.size or steps - self._began >= GATHER:
            return False
        if self.size >= (most if self.limit is None else min(most, self.limit)):
            return False
        first = self.deadlines.first()
        return first is not None and first.deadline is not None and first.deadline > comfortable

    def add(self, item: Item, front: bool = False) -> None:
        """*front*: before its equals; for a call that was cut, so that prompts end in the order in which they began."""
        rows, tokens, due = item.rows, item.tokens, item.deadline is not None
        if item.decode:
            line = self.decodes
            self.decoding += rows
            self._decode_tokens += tokens
            if item.apart is not None:
                self.cohorts[item] = None
        else:
            line = self.chunks if item.chunkable else self.wholes
        line.add(item, front)
        if due:
            self.deadlines.add(item)
            self._patient += item.patient
        self.size += rows
        self.tokens += tokens

    def remove(self, item: Item) -> None:
        rows, tokens, due = item.rows, item.tokens, item.deadline is not None
        if item.decode:
            line = self.decodes
            self.decoding -= rows
            self._decode_tokens -= tokens
            if item.apart is not None:
                del self.cohorts[item]
        else:
            line = self.chunks if item.chunkable else self.wholes
        line.remove(item)
        if due:
            self.deadlines.discard(item)
            self._patient -= item.patient
        self.size -= rows
        self.tokens -= tokens

    def fits(self, rows: int, tokens: int) -> bool:
        """Whether one step of at most *rows* rows and *tokens* tokens has room for all that it holds, or for all whose
        turn it is."""
        size, total = self.size, self.tokens
        if self.divided:
            decoding = self.decoding, self._decode_tokens
            size, total = decoding if self._turn else (size - decoding[0], total - decoding[1])
        return size <= (rows if self.limit is None else min(rows, self.limit)) and total <= tokens

    def leaves_whole(self, rows: int, tokens: int) -> bool:
        """Whether the next step takes the cohorts that it holds whole, or none of them."""
        return not self.cohorts or (self.divided and not self._turn) or self.fits(rows, tokens)

    @property
    def divided(self) -> bool:
        """Whether decodes and other items have steps of their own."""
        return self.mixed is not None and self.decoding > self.mixed and self.size > self.decoding

    def fill(self, rows: int, tokens: int, urgent: float) -> tuple[Batch, list[Item]]:
        """Take the next step's items out of the group: at most *rows*, of *tokens* in all.

        Decodes and other items take turns where the group is :attr:`divided`, the others first. Lines that have lost
        patience go first, then items due by *urgent* (monotonic seconds) by deadline, then the lines in their order.
        Where all fits into the step the lines keep their order, so that steps that run again and again have the same
        rows in the same places: what was made for them serves the next one. Where it does not, the group must hold no
        cohort (:meth:`leaves_whole`), which would wait as long as any of its calls. The batch is empty only when all
        whose turn it was had been cancelled.

        :returns: the batch, and those of its items that were cut and should go on before their equals. Not among them
            are items that jumped the line because of their deadline: put before the others, they would starve them.
        """
        step = _Step(rows if self.limit is None else min(rows, self.limit), tokens)
        worthwhile = max(1, tokens // WORTHWHILE)
        lines: tuple[Line, ...] = self.lines
        if self.divided:
            lines = (self.decodes,) if self._turn else (self.chunks, self.wholes)
        if self.fits(rows, tokens):
            for line in lines:
                self._serve(line, step, worthwhile)
        else:
            impatient = sorted((x for x in lines if x.passed >= PATIENCE), key=lambda x: -x.passed)
            for line in impatient:
                self._serve(line, step, worthwhile)
            if self.deadlines:
                self._serve_urgent(lines, step, urgent)
            for line in lines:
                if line not in impatient:
                    self._serve(line, step, worthwhile)
        self._turn = not step.decodes
        return step.batch(self.key), step.cut

    def _serve(self, line: Line, step: _Step, worthwhile: int) -> None:
        served = not line
        while line:
            item = line.first()
            if item.cancelled:
                self._take_out(item)
                continue
            tokens = step.fit(item)
            if tokens < 0:
                break
            self._take_out(item)
            step.take(item, tokens)
            if tokens < item.tokens or item.rest:
                step.cut.append(item)
            served = served or tokens == item.tokens or tokens >= worthwhile
        line.passed = 0 if served else line.passed + 1

    def _serve_urgent(self, lines: Sequence[Line], step: _Step, urgent: float) -> None:
        while (item := self.deadlines.first()) is not None and item.deadline is not None and item.deadline <= urgent:
            if item.cancelled:
                self._take_out(item)
                continue
            if self._line(item) not in lines:
                break  # whose turn comes with the next step
            tokens = step.fit(item)
            if tokens < 0:
                break
            self._take_out(item)
            step.take(item, tokens)

    def _take_out(self, item: Item) -> None:
        self.remove(item)
        self._left(item)

    def _line(self, item: Item) -> Line:
        if item.decode:
            return self.decodes
        return self.chunks if item.chunkable else self.wholes

"""Any order of steps, failures, retractions, ends and shared prompts: each context finds its own state.

The state of a context is the list of its tokens, written into the place of the pool where a step says that the next
state goes; so a place that is written while somebody else's state is in it shows at once.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.resources.base import Owner, ResourceContext, Row
from mstar.resources.recurrent import RecurrentStateResource
from mstar.resources.staging import Stage
from mstar.spec.request import EngineRequest
from mstar.spec.resources import RecurrentState

PAGE, LONGEST = 2, 24


class StateMachine(RuleBasedStateMachine):
    """Two tensors: ``seen``, which every step writes, and ``rare``, which some steps do. *kept*: checkpoints."""

    kept: ClassVar[int] = 3

    def __init__(self) -> None:
        super().__init__()
        spec = RecurrentState(
            {"seen": ((LONGEST,), "int64"), "rare": ((1,), "int64")}, layers=2, page=PAGE, checkpoints=self.kept
        )
        context = ResourceContext(torch.device("cpu"), torch.float32, 4, stage=Stage("cpu"))
        self.resource = RecurrentStateResource("state", spec, context)
        self.told: dict[Owner, list[int]] = {}  # tokens whose ids were told
        self.late: dict[Owner, list[int]] = {}  # committed ones behind them
        self.rare: dict[Owner, int] = {}
        # Of a last step that may be retracted: what *rare* was, and its tokens.
        self.before: dict[Owner, tuple[int, int]] = {}
        self.prompts: list[list[int]] = [[1]]
        self.number = 0

    def owners(self, data: st.DataObject, room: int = 1) -> list[Owner]:
        able = [o for o in self.told if len(self.told[o]) + len(self.late[o]) + room <= LONGEST]
        return data.draw(st.lists(st.sampled_from(able), unique=True)) if able else []

    @precondition(lambda self: len(self.told) < 4)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        owner, self.number = Owner(f"r{self.number}"), self.number + 1
        assert self.resource.reserve(owner, 1)
        self.resource.open(owner, EngineRequest(id=owner.key))
        self.told[owner], self.late[owner], self.rare[owner] = [], [], 0
        prompt = data.draw(st.sampled_from(self.prompts))
        found = self.resource.match(owner, prompt)
        assert found is not None
        assert found < len(prompt)
        if found:
            self.resource.skip(owner, prompt[:found])
            self.told[owner] = prompt[:found]
            self.rare[owner] = -1  # whatever it was there: read below
            self.rare[owner] = self.read(owner)[1]

    @rule(data=st.data(), length=st.integers(1, 3), known=st.booleans(), fails=st.booleans(), rare=st.booleans())
    def step(self, data: st.DataObject, length: int, known: bool, fails: bool, rare: bool) -> None:
        owners = self.owners(data, length)
        ids = [data.draw(st.lists(st.integers(1, 2), min_size=length, max_size=length)) for _ in owners]
        rows = [Row(o, length, length == 1, part if known else None) for o, part in zip(owners, ids, strict=True)]
        if not rows:
            return
        view = self.resource.plan(rows)
        for layer in range(2):
            seen = view.read("seen", layer).clone()
            for line, owner, part in zip(seen, owners, ids, strict=True):
                start = len(self.told[owner]) + len(self.late[owner])
                line[start : start + length] = torch.tensor(part)
            if layer or not rare:
                view.write("seen", seen, layer)
            else:
                slots = view.slots("seen", layer)
                assert slots.target is not None
                slots.pool[slots.target] = seen
            if rare:
                view.write("rare", view.read("rare", layer) + 1, layer)
        if fails:
            self.resource.rollback(rows)
            for owner in owners:
                self.before.pop(owner, None)
            return
        self.resource.commit(rows)
        for owner, part in zip(owners, ids, strict=True):
            whole = known and not self.late[owner]
            self.before[owner] = (self.rare[owner], length)
            self.rare[owner] += rare
            if whole:
                self.told[owner] = self.told[owner] + part
                self.before.pop(owner)
            else:
                self.late[owner] = self.late[owner] + part

    @precondition(lambda self: self.before)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.before)))
        self.rare[owner], length = self.before.pop(owner)
        self.resource.retract(Row(owner, length))
        self.late[owner] = self.late[owner][:-length]

    @rule(data=st.data())
    def learn(self, data: st.DataObject) -> None:
        for owner in self.owners(data, 0):
            _, last = self.before.get(owner, (0, 0))  # its ids come when it is certain
            count = data.draw(st.integers(0, len(self.late[owner]) - last))
            self.resource.learn(owner, self.late[owner][:count])
            self.told[owner] = self.told[owner] + self.late[owner][:count]
            self.late[owner] = self.late[owner][count:]

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        for owner in self.owners(data, 0)[:1]:
            self.prompts.append([*self.told[owner], 1])
            self.resource.close(owner)
            for books in (self.told, self.late, self.rare, self.before):
                books.pop(owner, None)

    def read(self, owner: Owner) -> tuple[list[int], int]:
        """What a frozen step reads; it leaves no trace, but for the last step, which cannot be retracted any more."""
        rows = [Row(owner)]
        view = self.resource.plan(rows, frozen=True)
        seen = [view.read("seen", layer)[0].tolist() for layer in range(2)]
        rare = [int(view.read("rare", layer)[0, 0]) for layer in range(2)]
        self.resource.commit(rows, frozen=True)
        assert seen[0] == seen[1]
        assert rare[0] == rare[1]
        return seen[0], rare[0]

    @invariant()
    def everybody_has_their_own(self) -> None:
        self.resource.check(list(self.told))
        assert self.resource.usage().cached <= self.kept
        for owner in self.told:
            if owner in self.before:
                continue  # reading would settle its last step
            tokens = self.told[owner] + self.late[owner]
            assert self.read(owner) == (tokens + [0] * (LONGEST - len(tokens)), self.rare[owner])


class OneCheckpoint(StateMachine):
    kept = 1


TestStates = StateMachine.TestCase
TestOneCheckpoint = OneCheckpoint.TestCase
TestStates.settings = TestOneCheckpoint.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""Sessions are bounded in number and age, and never dropped while in use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mstar.registry import load_object
from mstar.resources.base import Owner
from mstar.spec.errors import RequestError, TooBusy
from mstar.spec.request import Done, Failed
from mstar.testing.drive import Driver
from mstar.testing.miniatures import Example, Miniature, miniature
from mstar.worker.sessions import Session, Sessions

pytestmark = pytest.mark.usefixtures("loop")


class Books:
    """Sessions on a clock of the test's own, and the names of those that were released."""

    def __init__(self, limit: int, ttl_s: float = 10.0):
        self.released: list[str] = []
        self.sessions = Sessions(limit, ttl_s, lambda resource, owner: self.released.append(owner.key))

    def use(self, name: str, now: float) -> Session:
        session = self.sessions.acquire(name, f"request of {name}", now)
        session.owners.add(("kv", Owner(session.key)))
        return session

    def use_and_leave(self, name: str, now: float) -> None:
        self.sessions.give_back(self.use(name, now), now, keep=True)


def test_the_one_unused_longest_goes_first() -> None:
    books = Books(limit=2)
    books.use_and_leave("a", 1.0)
    books.use_and_leave("b", 2.0)
    books.use_and_leave("a", 3.0)
    books.use_and_leave("c", 4.0)
    assert books.released == ["session:b"]


def test_what_is_in_use_is_neither_evicted_nor_expired() -> None:
    books = Books(limit=1, ttl_s=1.0)
    books.use("a", 0.0)
    books.sessions.expire(100.0)
    with pytest.raises(TooBusy):
        books.use("b", 100.0)
    with pytest.raises(RequestError, match="in use"):
        books.use("a", 100.0)
    assert books.released == []


def test_age_counts_from_the_last_use() -> None:
    books = Books(limit=3, ttl_s=10.0)
    books.use_and_leave("a", 0.0)
    books.use_and_leave("b", 5.0)
    books.use_and_leave("a", 6.0)
    assert books.sessions.next_expiry() == 15.0
    books.sessions.expire(15.5)
    assert books.released == ["session:b"]
    assert books.sessions.next_expiry() == 16.0


def test_a_session_that_kept_nothing_is_forgotten() -> None:
    books = Books(limit=1)
    books.sessions.give_back(books.sessions.acquire("a", "r", 0.0), 0.0, keep=True)
    books.sessions.give_back(books.use("b", 0.0), 0.0, keep=False)
    assert len(books.sessions) == 0
    assert books.released == ["session:b"]


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> Miniature:
    """The chat miniature, with sessions that keep the conversation."""
    mini = miniature("mini_chat")
    model = load_object(mini.model)
    plain = model.graph
    monkeypatch.setattr(model, "graph", lambda self: replace(plain(self), sessions=("kv", "positions", "sampler")))
    return mini


def test_a_conversation_goes_on_where_it_stood(remembering: Miniature) -> None:
    driver = Driver(remembering, resources={"kv": {"tokens": 256}})
    pool = driver.worker.resources["kv"].pool  # type: ignore[attr-defined]
    for turn in (1, 2):
        driver.submit(f"turn {turn}", Example("a" * 100, {"max_tokens": 3}), session="s")
        driver.run()
        assert isinstance(driver.ended[f"turn {turn}"], Done), driver.ended
        assert pool.length(Owner("session:s")) == turn * (100 + 3 - 1)  # the last token of a turn is not read any more
    driver.submit("turn 3", Example("a" * 100, {"max_tokens": 3}), session="s")
    driver.run()
    end = driver.ended["turn 3"]
    assert isinstance(end, Failed)
    assert (end.status, end.code, end.param) == (400, "context_length_exceeded", "session")
    assert "holds 204 tokens" in end.message
    assert pool.length(Owner("session:s")) == 204  # a refusal costs the session nothing
    driver.assert_empty()


def test_a_busy_worker_drops_old_sessions_too() -> None:
    driver = Driver(miniature("mini_rollout"), session_ttl_s=1e-6)
    driver.submit("first", Example(knobs={"windows": 1}), session="w")
    driver.submit("long", Example(knobs={"windows": 9}))
    driver.run(until=lambda: "first" in driver.ended)
    driver.worker.step()
    assert "long" not in driver.ended
    assert driver.worker.status()["sessions"] == 0
    driver.run()
    driver.assert_empty()


def test_tenants_share_names_but_no_sessions() -> None:
    books = Books(limit=8)
    pairs = [("", "s"), ("a", "s"), ("b", "s"), ("", "1:a:s"), ("a:s", "t"), ("a", "s:t")]
    held = [books.sessions.acquire(name, "r", 0.0, tenant) for tenant, name in pairs]
    assert len({session.key for session in held}) == len(pairs)
    with pytest.raises(RequestError, match="session 's' is in use"):
        books.sessions.acquire("s", "r", 0.0, "a")

"""Responses that were asked to be kept, in SQLite."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mstar.spec.errors import RequestError, SetupError

__all__ = ["ResponseStore", "Stored"]

T = TypeVar("T")

LONGEST_CHAIN = 1000
"""Responses that one may go on from, one after the other."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL,
    previous TEXT, input TEXT NOT NULL, response TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
CREATE INDEX IF NOT EXISTS by_tenant ON responses (tenant, created);
"""


@dataclass(frozen=True)
class Stored:
    """*input*: the items of this turn alone. *response*: the object as its client got it."""

    id: str
    previous: str | None
    input: list[dict[str, Any]]
    response: dict[str, Any]


class ResponseStore:
    """Keeps at most *most* responses, each for *age_s* seconds; of more, the tenant that has most loses its oldest.
    What one tenant stored no other sees.

    :param file: ``None`` keeps them in memory. All methods take a thread of the loop's executor.
    :raises SetupError: the file cannot be used.
    """

    def __init__(self, file: Path | None, most: int, age_s: float):
        self._most, self._age_s = most, age_s
        self._lock = threading.Lock()
        try:
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(file or ":memory:", check_same_thread=False, isolation_level=None)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=NORMAL")
            self._base.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise SetupError(
                f"responses cannot be stored in {file}: {error}; --state-dir names another folder"
            ) from None

    async def put(self, tenant: str, stored: Stored) -> None:
        row = (
            stored.id, tenant, time.time(), stored.previous, json.dumps(stored.input), json.dumps(stored.response),
        )  # fmt: skip
        await self._run(lambda: self._put(row))

    async def get(self, tenant: str, response_id: str, param: str | None = None) -> Stored:
        """:raises RequestError: 404, for another tenant's too. *param*: the field that named it."""
        row = await self._run(lambda: self._get(tenant, response_id))
        if row is None:
            raise _missing(response_id, param)
        return row

    async def chain(self, tenant: str, response_id: str, param: str) -> list[dict[str, Any]]:
        """All items of the conversation that ended with *response_id*, oldest first."""
        found = await self._run(lambda: self._chain(tenant, response_id))
        if isinstance(found, str):
            raise _missing(found, param)
        return [item for stored in reversed(found) for item in (*stored.input, *stored.response["output"])]

    async def delete(self, tenant: str, response_id: str) -> None:
        if not await self._run(lambda: self._delete(tenant, response_id)):
            raise _missing(response_id, None)

    def close(self) -> None:
        with self._lock:
            self._base.close()

    async def _run(self, work: Callable[[], T]) -> T:
        def locked() -> T:
            with self._lock:
                return work()

        return await asyncio.to_thread(locked)

    def _put(self, row: Sequence[Any]) -> None:
        self._base.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
        self._base.execute("DELETE FROM responses WHERE created < ?", (time.time() - self._age_s,))
        (count,) = self._base.execute("SELECT count(*) FROM responses").fetchone()
        for _ in range(count - self._most):
            self._base.execute(
                "DELETE FROM responses WHERE rowid = (SELECT rowid FROM responses WHERE tenant = "
                "(SELECT tenant FROM responses GROUP BY tenant ORDER BY count(*) DESC, min(created) LIMIT 1) "
                "ORDER BY created LIMIT 1)"
            )

    def _get(self, tenant: str, response_id: str) -> Stored | None:
        row = self._base.execute(
            "SELECT id, previous, input, response FROM responses WHERE id = ? AND tenant = ? AND created >= ?",
            (response_id, tenant, time.time() - self._age_s),
        ).fetchone()
        return row and Stored(row[0], row[1], json.loads(row[2]), json.loads(row[3]))

    def _chain(self, tenant: str, response_id: str) -> list[Stored] | str:
        """Newest first; or the id of the one that is not there any more."""
        found: list[Stored] = []
        at: str | None = response_id
        while at is not None and len(found) < LONGEST_CHAIN:
            stored = self._get(tenant, at)
            if stored is None:
                return at
            found.append(stored)
            at = stored.previous
        return found

    def _delete(self, tenant: str, response_id: str) -> bool:
        done = self._base.execute("DELETE FROM responses WHERE id = ? AND tenant = ?", (response_id, tenant))
        return done.rowcount > 0


def _missing(response_id: str, param: str | None) -> RequestError:
    message = f"there is no stored response {response_id[:80]!r}"
    return RequestError(message, param=param, code="response_not_found", status=404)

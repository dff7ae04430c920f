"""What is known of video jobs, in SQLite, and the files that they made, beside it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from mstar.spec.errors import RequestError, SetupError

__all__ = ["VARIANTS", "Room", "VideoRecord", "VideoStore"]

T = TypeVar("T")

Status = Literal["queued", "in_progress", "completed", "failed"]

VARIANTS = {"video": ("mp4", "video/mp4"), "thumbnail": ("webp", "image/webp"), "spritesheet": ("jpg", "image/jpeg")}
"""What can be had of a video → its file's ending and media type."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS videos (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, status TEXT NOT NULL, model TEXT NOT NULL,
    prompt TEXT NOT NULL, seconds TEXT NOT NULL, size TEXT NOT NULL, completed REAL, error TEXT, bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS by_tenant ON videos (tenant, created);
"""
_COLUMNS = "id, tenant, created, status, model, prompt, seconds, size, completed, error, bytes"


@dataclass(frozen=True)
class VideoRecord:
    """One job. *created* and *completed*: Unix seconds; *completed* is when it ended, well or not.

    :param seconds: and *size*: as asked for; once completed, as they came out. :param error: what is said of a failed
        one. :param bytes: of its files.
    """

    id: str
    tenant: str
    model: str
    prompt: str
    seconds: str
    size: str
    created: float = field(default_factory=time.time)
    status: Status = "queued"
    completed: float | None = None
    error: dict[str, Any] | None = None
    bytes: int = 0


@dataclass(frozen=True)
class Room:
    """How many jobs may be kept, and bytes of their files; ``None``: any number."""

    jobs: int | None = None
    bytes: int | None = None

    def over(self, jobs: int, size: int) -> bool:
        return (self.jobs is not None and jobs > self.jobs) or (self.bytes is not None and size > self.bytes)


class VideoStore:
    """Keeps videos for *age_s* seconds after they ended, of all tenants together at most *room*, of each at most
    *each*. Where there are more, the tenant that has most loses its oldest that has ended: nobody's videos go because
    of another's. What one tenant had made no other sees. Methods take a thread of the loop's executor.

    :param folder: ``None``: a temporary one, gone when closed. Jobs that an earlier server left unfinished are marked
        failed.
    :raises SetupError: the folder cannot be used, or another server uses it.
    """

    def __init__(self, folder: Path | None, room: Room, each: Room, age_s: float):
        self.age_s, self._room, self._each = age_s, room, each
        self._lock = threading.Lock()
        self._temporary = tempfile.TemporaryDirectory(prefix="mstar-videos-") if folder is None else None
        self.folder = folder or Path(self._temporary.name)  # type: ignore[union-attr]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._claim = (self.folder / "lock").open("w")
            self._claim_folder()
            self._base = sqlite3.connect(self.folder / "videos.sqlite", check_same_thread=False, isolation_level=None)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=NORMAL")
            self._base.executescript(_SCHEMA)
            self._recover()
        except (OSError, sqlite3.Error) as error:
            raise SetupError(f"videos cannot be kept in {self.folder}: {error}; --state-dir names another") from None

    def file(self, video_id: str, variant: str) -> Path:
        """Where the *variant* of a video lies, or will. *video_id* is one of ours, never a client's word."""
        return self.folder / f"{video_id}.{VARIANTS[variant][0]}"

    async def add(self, record: VideoRecord) -> None:
        await self._run(lambda: self._add(record))

    async def update(self, record: VideoRecord, **changes: Any) -> VideoRecord:
        """*record* with *changes*, which are written down. A record that has been deleted stays so."""
        changed = replace(record, **changes)
        await self._run(lambda: self._update(changed))
        return changed

    async def get(self, tenant: str, video_id: str) -> VideoRecord:
        """:raises RequestError: 404, for another tenant's and for what is too old, too."""
        record = await self._run(lambda: self._get(tenant, video_id))
        if record is None:
            raise _missing(video_id)
        return record

    async def page(
        self, tenant: str, limit: int, after: str | None, newest_first: bool
    ) -> tuple[list[VideoRecord], bool]:
        """A page of at most *limit* records, and whether there are more. *after*: the last id of the page before."""
        if after is not None and await self._run(lambda: self._get(tenant, after)) is None:
            raise RequestError(f"'after': there is no video {after[:80]!r}", param="after")
        found = await self._run(lambda: self._page(tenant, limit + 1, after, newest_first))
        return found[:limit], len(found) > limit

    async def delete(self, tenant: str, video_id: str) -> None:
        """Forget a video, files and all. :raises RequestError: 404."""
        if not await self._run(lambda: self._delete(tenant, video_id)):
            raise _missing(video_id)

    def close(self) -> None:
        with self._lock:
            self._base.close()
            self._claim.close()
            if self._temporary is not None:
                self._temporary.cleanup()

    async def _run(self, work: Callable[[], T]) -> T:
        def locked() -> T:
            with self._lock:
                return work()

        return await asyncio.to_thread(locked)

    def _claim_folder(self) -> None:
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._claim.close()
            raise OSError("another server uses it") from None

    def _recover(self) -> None:
        error = {"code": "server_restarted", "message": "the server was stopped while it made this video"}
        self._base.execute(
            "UPDATE videos SET status = 'failed', completed = ?, error = ? WHERE status IN ('queued', 'in_progress')",
            (time.time(), json.dumps(error)),
        )
        self._prune()
        whole = {row[0] for row in self._base.execute("SELECT id FROM videos WHERE status = 'completed'")}
        for path in self.folder.glob("video_*"):
            if path.name.partition(".")[0] not in whole:
                path.unlink(missing_ok=True)

    def _add(self, record: VideoRecord) -> None:
        self._base.execute(f"INSERT INTO videos ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", _row(record))
        self._prune()

    def _update(self, record: VideoRecord) -> None:
        done = self._base.execute(
            "UPDATE videos SET status = ?, seconds = ?, size = ?, completed = ?, error = ?, bytes = ? WHERE id = ?",
            (
                record.status, record.seconds, record.size, record.completed, _json(record.error), record.bytes,
                record.id,
            ),
        )  # fmt: skip
        if done.rowcount and record.bytes:
            self._prune()

    def _get(self, tenant: str, video_id: str) -> VideoRecord | None:
        row = self._base.execute(
            f"SELECT {_COLUMNS} FROM videos WHERE id = ? AND tenant = ? AND coalesce(completed, ?) >= ?",
            (video_id, tenant, time.time(), time.time() - self.age_s),
        ).fetchone()
        return row and _record(row)

    def _page(self, tenant: str, limit: int, after: str | None, newest_first: bool) -> list[VideoRecord]:
        order, sign = ("DESC", "<") if newest_first else ("ASC", ">")
        where = "tenant = ? AND coalesce(completed, ?) >= ?"
        values: list[Any] = [tenant, time.time(), time.time() - self.age_s]
        if after is not None:
            where += f" AND (created, id) {sign} (SELECT created, id FROM videos WHERE id = ?)"
            values.append(after)
        rows = self._base.execute(
            f"SELECT {_COLUMNS} FROM videos WHERE {where} ORDER BY created {order}, id {order} LIMIT ?",
            (*values, limit),
        )
        return [_record(row) for row in rows]

    def _delete(self, tenant: str, video_id: str) -> bool:
        done = self._base.execute("DELETE FROM videos WHERE id = ? AND tenant = ?", (video_id, tenant))
        if done.rowcount:
            self._remove_files(video_id)
        return done.rowcount > 0

    def _prune(self) -> None:
        """Forget what is too old, too many or too large. What is still being made stays."""
        too_old = time.time() - self.age_s
        for (video_id,) in self._base.execute("SELECT id FROM videos WHERE completed < ?", (too_old,)).fetchall():
            self._forget(video_id)
        rows = self._base.execute(
            "SELECT tenant, count(*), sum(bytes) FROM videos GROUP BY tenant ORDER BY min(completed)"
        )
        held = {tenant: (jobs, size) for tenant, jobs, size in rows}
        for tenant in held:
            while self._each.over(*held[tenant]) and self._drop_oldest(tenant, held):
                pass
        full = set[str]()  # tenants of whom nothing is left but what is being made
        while True:
            jobs, size = (sum(amounts) for amounts in zip((0, 0), *held.values(), strict=True))
            left = [tenant for tenant in held if tenant not in full]
            if not left or not self._room.over(jobs, size):
                return
            which = 0 if self._room.over(jobs, 0) else 1
            most = max(left, key=lambda tenant: held[tenant][which])
            if not self._drop_oldest(most, held):
                full.add(most)

    def _drop_oldest(self, tenant: str, held: dict[str, tuple[int, int]]) -> bool:
        """Forget *tenant*'s video that ended first, and note it in *held*; whether there was one."""
        row = self._base.execute(
            "SELECT id, bytes FROM videos WHERE tenant = ? AND completed IS NOT NULL ORDER BY completed LIMIT 1",
            (tenant,),
        ).fetchone()
        if row is None:
            return False
        self._forget(row[0])
        jobs, size = held[tenant]
        held[tenant] = jobs - 1, size - row[1]
        return True

    def _forget(self, video_id: str) -> None:
        self._base.execute("DELETE FROM videos WHERE id = ?", (video_id,))
        self._remove_files(video_id)

    def _remove_files(self, video_id: str) -> None:
        for variant in VARIANTS:
            self.file(video_id, variant).unlink(missing_ok=True)


def _row(record: VideoRecord) -> tuple[Any, ...]:
    return (
        record.id, record.tenant, record.created, record.status, record.model, record.prompt, record.seconds,
        record.size, record.completed, _json(record.error), record.bytes,
    )  # fmt: skip


def _record(row: tuple[Any, ...]) -> VideoRecord:
    names = _COLUMNS.split(", ")
    values = dict(zip(names, row, strict=True))
    return VideoRecord(**{**values, "error": values["error"] and json.loads(values["error"])})


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def _missing(video_id: str) -> RequestError:
    return RequestError(f"there is no video {video_id[:80]!r}", code="video_not_found", status=404)

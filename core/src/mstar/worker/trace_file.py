"""The file of a timeline: Chrome's trace format, a JSON array of events, written by a thread of its own.

The format is described in Google's "Trace Event Format"; Perfetto and chrome://tracing open it. It allows the array to
be left open, so that the file of a process that was killed can be read. Times are microseconds of the monotonic clock.

The worker's thread only puts tuples on a queue. Making text of them costs ten times as much and is done here, a few at
a time: what holds the interpreter's lock for long would hold up a step.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

__all__ = ["HOST", "Counters", "Device", "Info", "Note", "Record", "Stages", "TraceFile"]

log = logging.getLogger(__name__)

HOST, DEVICE = 1, 2
"""The numbers of the tracks (threads, in the format's words)."""
_BYTES = 1 << 28
"""A file of this size is put aside as ``NAME.old.SUFFIX`` and begun anew: at most two of them are kept."""
_QUEUE = 1 << 14
"""Records that wait for a slow disk; beyond, steps and counters are dropped. About 1 kB each."""
_EVERY_S = 0.25
_AT_ONCE = 16
_PAUSE_S = 1e-4
_CHUNK = 1 << 16
_LEAST_NS = 2000
"""Stages shorter than this are left out."""


class Info(NamedTuple):
    """A step that was launched. *captured*: by a captured graph. *ahead*: while the step before was in flight."""

    step: int
    node: str
    entry: str
    rows: int
    tokens: int
    captured: bool
    ahead: bool


class Stages(NamedTuple):
    """One pass of the worker's loop: *marks* are the ends of its stages (name, nanoseconds, the step that the stage
    belongs to)."""

    began: int
    marks: Sequence[tuple[str, int, Info | int]]


class Device(NamedTuple):
    """A step on the device, from *began* to *ended* (nanoseconds)."""

    info: Info
    began: int
    ended: int


class Counters(NamedTuple):
    """Name → series → value, at one time (nanoseconds)."""

    at: int
    values: Mapping[str, Mapping[str, float]]


class Note(NamedTuple):
    """Any other event: phase, name and nanoseconds, the id of an asynchronous one, what it says."""

    phase: str
    name: str
    at: int
    id: str | None = None
    args: Mapping[str, Any] | None = None


Record = Stages | Device | Counters | Note


class TraceFile:
    """Takes records from one thread and writes them in another.

    A file that cannot be written costs a warning and is given up; nothing is raised after construction.

    :param path: a file that is there is put aside first. :param names: of the process and of its tracks, by number.
    :raises OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, process: str, tracks: Mapping[int, str], *, most_bytes: int = _BYTES):
        self.path = path
        self.dropped = 0
        self._taking = True
        self._process, self._tracks, self._most = process, tracks, most_bytes
        self._pid = os.getpid()
        self._queue: deque[Record] = deque()
        self._file: BinaryIO | None = None
        self._size = 0
        self._said: tuple[Info | None, str] = (None, "")
        self._open()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mstar-trace", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Write *record* before long."""
        if not self._taking:
            return
        # what begins and ends requests comes last to be dropped: one without the other reads badly
        room = 2 * _QUEUE if type(record) is Note else _QUEUE
        if len(self._queue) < room:
            self._queue.append(record)
        else:
            self.dropped += 1

    def close(self) -> None:
        """Write what is left and end the array. Waits a few seconds at most."""
        self._taking = False
        self._closing.set()
        self._thread.join(5.0)

    # --- the writing thread -------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._closing.wait(_EVERY_S):
                self._drain(_PAUSE_S)
            self._drain(0.0)
            self._finish()
        except OSError as error:
            self._give_up(error)

    def _drain(self, pause: float) -> None:
        queue, texts, size = self._queue, list[str](), 0
        while queue:
            for _ in range(min(_AT_ONCE, len(queue))):
                found = self._texts(queue.popleft())
                texts += found
                size += sum(map(len, found))
            if size >= _CHUNK:
                self._write(texts)
                texts, size = [], 0
            if pause:
                time.sleep(pause)  # let the worker have the interpreter
        dropped, self.dropped = self.dropped, 0
        if dropped:
            note = Note("i", "events dropped: the disk was too slow", time.monotonic_ns(), args={"events": dropped})
            texts += self._texts(note)
        if texts:
            self._write(texts)

    def _open(self) -> None:
        if self.path.is_file() and self.path.stat().st_size:
            os.replace(self.path, self.path.with_name(f"{self.path.stem}.old{self.path.suffix}"))
        self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115 (it stays open)
        self._size = 0
        names = [("process_name", 0, self._process), *(("thread_name", n, name) for n, name in self._tracks.items())]
        head = [
            f'{{"ph":"M","pid":{self._pid},"tid":{tid},"name":"{kind}","args":{{"name":{_quoted(name)}}}}}'
            for kind, tid, name in names
        ]
        try:
            self._append("[\n" + ",\n".join(head))
        except OSError:
            self._file.close()
            self._file = None
            raise

    def _write(self, texts: list[str]) -> None:
        self._append(",\n" + ",\n".join(texts))
        if self._size >= self._most:
            self._finish()
            self._open()

    def _append(self, text: str) -> None:
        assert self._file is not None
        data = memoryview(text.encode())
        written = 0
        while written < len(data):
            written += self._file.write(data[written:]) or 0
        self._size += written

    def _finish(self) -> None:
        self._append("\n]\n")
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        log.warning("the timeline %s cannot be written any more (%s); serving goes on without", self.path, error)
        file, self._file, self._taking = self._file, None, False
        self._queue.clear()
        if file is not None:
            try:
                file.truncate(self._size)  # the last whole event ends the file
            except OSError:
                log.debug("the timeline %s may end within an event", self.path)
            file.close()

    # --- text ---------------------------------------------------------------------------------------------------------
    def _texts(self, record: Record) -> list[str]:
        if type(record) is Stages:
            return self._stages(record)
        if type(record) is Device:
            return [self._span(DEVICE, record.info.node, record.began, record.ended, record.info)]
        if type(record) is Counters:
            return [self._note(Note("C", name, record.at, args=args)) for name, args in record.values.items()]
        assert type(record) is Note
        return [self._note(record)]

    def _stages(self, record: Stages) -> list[str]:
        began = record.began
        texts = [self._span(HOST, "step", began, record.marks[-1][1], 0)]
        for name, ended, info in record.marks:
            if ended - began >= _LEAST_NS:
                texts.append(self._span(HOST, name, began, ended, info))
            began = ended
        return texts

    def _span(self, track: int, name: str, began: int, ended: int, info: Info | int) -> str:
        args = self._args(info) if info else ""
        return (
            f'{{"ph":"X","pid":{self._pid},"tid":{track},"ts":{began / 1000:.3f},"dur":{(ended - began) / 1000:.3f},'
            f'"name":{_quoted(name)}{args}}}'
        )

    def _args(self, info: Info | int) -> str:
        if type(info) is not Info:
            return f',"args":{{"step":{info}}}'
        if self._said[0] is not info:  # said twice: by the host's span and by the device's
            step, node, entry, rows, tokens, captured, ahead = info
            args = (
                f',"args":{{"step":{step},"node":{_quoted(node)},"entry":{_quoted(entry)},"rows":{rows},'
                f'"tokens":{tokens},"captured":{_BOOLS[captured]},"ahead":{_BOOLS[ahead]}}}'
            )
            self._said = (info, args)
        return self._said[1]

    def _note(self, note: Note) -> str:
        more = ""
        if note.id is not None:
            more = f',"cat":"request","id":{_encode(note.id)}'
        elif note.phase == "i":
            more = ',"s":"t"'
        if note.args is not None:
            more += f',"args":{_encode(note.args)}'
        return (
            f'{{"ph":"{note.phase}","pid":{self._pid},"tid":{HOST},"ts":{note.at / 1000:.3f},'
            f'"name":{_quoted(note.name)}{more}}}'
        )


_BOOLS = ("false", "true")


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


_quoted = lru_cache(maxsize=1024)(_encode)

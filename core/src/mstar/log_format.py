"""How log lines look: sentences for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["LOG_FORMATS", "JsonFormatter", "LogFormat", "TextFormatter", "begin_logging", "log_format"]

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")


class TextFormatter(logging.Formatter):
    """Time, level, logger, message; before the message the id of the request that it belongs to, in brackets."""

    def __init__(self, worker: str | None = None, place: Mapping[str, int] | None = None):
        words = [f"worker {worker}", *(f"{name} {number}" for name, number in (place or {}).items())]
        name = "" if worker is None else f"{', '.join(words)}: ".replace("%", "%%")
        super().__init__(f"%(asctime)s %(levelname)s {name}%(name)s: %(named)s%(message)s", defaults={"named": ""})

    def format(self, record: logging.LogRecord) -> str:
        if (request_id := getattr(record, "request_id", None)) is not None:
            record.named = f"[{request_id}] "
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``; ``worker``, the model of a worker process, with
    ``copy`` and ``rank`` where there are several; ``request_id`` where a line belongs to a request; ``exception``, the
    traceback; and what the line's ``extra={"fields": {...}}`` has."""

    def __init__(self, worker: str | None = None, place: Mapping[str, int] | None = None):
        super().__init__()
        self.worker, self.place = worker, place or {}

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self.worker is not None:
            line |= {"worker": self.worker, **self.place}
        if (request_id := getattr(record, "request_id", None)) is not None:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        for name, value in getattr(record, "fields", {}).items():
            line.setdefault(name, value)
        return json.dumps(line, ensure_ascii=False, default=str)


class _Handler(logging.StreamHandler[Any]):
    """The one that :func:`begin_logging` has added."""


def begin_logging(
    level: int | str, form: LogFormat, worker: str | None = None, place: Mapping[str, int] | None = None
) -> None:
    """Log to standard error; called again, in another form. Where a program that M* is a part of logs already, that
    stays as it is.

    :param worker: key of the model whose worker this process is. :param place: which of several it is, as
        :attr:`~mstar.cluster.base.WorkerConfig.place` has it.
    """
    formatter: logging.Formatter
    if form == "json":
        formatter = JsonFormatter(worker, place)
    else:
        formatter = TextFormatter(worker, place)
    ours = [handler for handler in logging.getLogger().handlers if isinstance(handler, _Handler)]
    for handler in ours or [_Handler()]:
        handler.setFormatter(formatter)
        logging.basicConfig(level=level, handlers=[handler])


def log_format() -> LogFormat:
    """What this process's log lines look like."""
    return "json" if any(isinstance(h.formatter, JsonFormatter) for h in logging.getLogger().handlers) else "text"

"""Errors that a person will read.

Every error that M* raises on purpose derives from :class:`MstarError`; what reaches a client derives from
:class:`RequestError`, which knows its HTTP status and the field at fault. Anything else is a bug and is reported as
one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

__all__ = [
    "DeploymentError",
    "FaultFound",
    "GraphError",
    "MstarError",
    "NotReady",
    "PeerLost",
    "PluginError",
    "RequestError",
    "SetupError",
    "TooBusy",
    "WeightsError",
    "counted",
    "innermost",
    "nearest",
    "not_finite",
]


T = TypeVar("T")


class MstarError(Exception):
    """Base of all deliberate errors. ``str(error)`` says what happened and what to do."""


class SetupError(MstarError):
    """The operator must change something (a setting, a file, an install) before the server can start."""


class FaultFound(SetupError):
    """Something is wrong with a model, its deployment or its code, and not with how a command was typed: what
    ``mstar check`` looks for. Commands end with status 1.

    :param advice: what to do to see more, for where the message stands alone: ``str(error)`` ends with it.
    :ivar message: without the advice, for where the traceback stands beside it.
    """

    def __init__(self, message: str, *, advice: str = ""):
        super().__init__(f"{message}; {advice}" if advice else message)
        self.message = message


class GraphError(FaultFound):
    """A model's graph is wrong. Lists every fault found, one a line (promise P2)."""

    def __init__(self, model: str, faults: Iterable[str]):
        self.faults = tuple(faults)
        super().__init__(
            f"the graph of {model!r} has {counted(len(self.faults), 'fault')}:\n  " + "\n  ".join(self.faults)
        )


class DeploymentError(FaultFound):
    """A deployment is wrong. ``faults``: every one found, as (key's path, what is wrong with it); the message has one
    a line. A path is empty when the whole is meant.

    :param places: a key's path → where it stands (``"file.yaml:3"``), as far as that is known.
    """

    def __init__(self, faults: Iterable[tuple[str, str]], places: Mapping[str, str] | None = None):
        self.faults = tuple(faults)
        known = places or {}
        lines = ((innermost(known, key) or "deployment", key, fault) for key, fault in self.faults)
        super().__init__("\n".join(": ".join(filter(None, line)) for line in lines))


class WeightsError(SetupError):
    """Weights are missing, damaged, or do not match the model (promise P11)."""


class PluginError(SetupError):
    """A plugin could not be used. :param remedy: what to do about it, when that is known where the fault is found."""

    def __init__(self, message: str, *, remedy: str = ""):
        super().__init__(message)
        self.remedy = remedy


class PeerLost(MstarError):
    """A process cannot go on because one that it computes with is gone, or does not answer. What happened there is
    known there, and to whoever started both: here it is no fault."""


class RequestError(MstarError):
    """A request cannot be served as asked.

    :param param: the field at fault, as the client spelled it (``"temperature"``, ``"messages[1].content"``).
    :param code: a stable machine-readable word (``"invalid_value"``, ``"context_length_exceeded"``…).
    :param status: HTTP status that an HTTP front end should answer with.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        type: str = "invalid_request_error",  # noqa: A002 - the name of the field in OpenAI's error object
    ):
        super().__init__(message)
        self.message, self.param, self.code, self.status, self.type = message, param, code, status, type


class TooBusy(RequestError):
    """The queue is full. ``retry_after`` is in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message, code="queue_full", status=429, type="rate_limit_error")
        self.retry_after = retry_after


class NotReady(RequestError):
    """The model is loading, draining or has failed."""

    def __init__(self, message: str, *, retry_after: float = 5.0):
        super().__init__(message, code="not_ready", status=503, type="server_error")
        self.retry_after = retry_after


def not_finite() -> RequestError:
    """A model's arithmetic went wrong for one request."""
    return RequestError(
        "the model computed values that are no numbers (NaN or infinity) for this request",
        code="numerical_error",
        status=500,
        type="server_error",
    )


def counted(count: int, noun: str) -> str:
    """``"1 fault"``, ``"2 faults"``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def innermost(known: Mapping[str, T], path: str) -> T | None:
    """What *known* says about the key at *path* (``"scheduler.policy"``), or about the innermost one around it."""
    while path not in known and path:
        path = path.rpartition(".")[0]
    return known.get(path)


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known word nearest to *word*, else a list of the known ones, else ``""``."""
    names = sorted(set(known))
    words = [name for name in names if len(name) > 1]  # one letter is near too much: 'de' is no misspelt 'e'
    lower = {name.lower(): name for name in reversed(names) if len(name) > 1 or name.lower() == word.lower()}
    # comparing takes time with the word's length, and a client may send any
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6) if len(word) <= 256 else []
    if not close and len(word) <= 256:
        close = [lower[name] for name in difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)]
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else ""

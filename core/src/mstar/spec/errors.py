"""Errors that a person will read.

Every error that M* raises on purpose derives from :class:`MstarError`; what reaches a client derives from
:class:`RequestError`, which knows its HTTP status and the field at fault. Anything else is a bug and is reported as
one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

__all__ = [
    "DeploymentError",
    "FamilyError",
    "GraphError",
    "MstarError",
    "NotReady",
    "PluginError",
    "RequestError",
    "SetupError",
    "TooBusy",
    "WeightsError",
    "family_code",
    "nearest",
    "pinpoint",
    "sentence",
]


class MstarError(Exception):
    """Base of all deliberate errors. ``str(error)`` says what happened and what to do."""


class SetupError(MstarError):
    """The operator must change something (a setting, a file, an install) before the server can start."""


class GraphError(SetupError):
    """A model's graph is wrong. Lists every fault found, one a line (promise P2)."""

    def __init__(self, model: str, faults: Iterable[str]):
        self.faults = tuple(faults)
        super().__init__(f"the graph of {model!r} has {len(self.faults)} fault(s):\n  " + "\n  ".join(self.faults))


class DeploymentError(SetupError):
    """A deployment is wrong. ``faults``: every one found, as (key's path, what is wrong with it)."""

    def __init__(self, faults: Iterable[tuple[str, str]]):
        self.faults = tuple(faults)
        super().__init__("deployment: " + "; ".join(f"{key}: {fault}" for key, fault in self.faults))


class WeightsError(SetupError):
    """Weights are missing, damaged, or do not match the model (promise P11)."""


class PluginError(SetupError):
    """A plugin could not be used. :param remedy: what to do about it, when that is known where the fault is found."""

    def __init__(self, message: str, *, remedy: str = ""):
        super().__init__(message)
        self.remedy = remedy


class FamilyError(MstarError):
    """A family's own code raised what it should not: a bug of its authors. The cause is what it raised.

    :param doing: what it was to do (``"prepare a request"``). :param target: the code, as ``"module:Class"``.
    """

    def __init__(self, key: str, doing: str, target: str, error: BaseException):
        super().__init__(f"the code of model {key!r} failed to {doing}: {pinpoint(error, target)}")


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


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known word nearest to *word*, else a list of the known ones, else ``""``."""
    names = sorted(set(known))
    # comparing takes time with the word's length, and a client may send any
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6) if len(word) <= 256 else []
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else ""


@contextmanager
def family_code(key: str, doing: str, target: str) -> Iterator[None]:
    """Around calls of a family's code: what it raises and no :class:`MstarError` is raised as a :class:`FamilyError`,
    whose arguments these are."""
    try:
        yield
    except MstarError:
        raise
    except Exception as error:
        raise FamilyError(key, doing, target, error) from error


def sentence(error: BaseException) -> str:
    """A deliberate error's own words; of any other its type and the first line of its message (``"KeyError: 'x'"``)."""
    if isinstance(error, MstarError):
        return str(error)
    said = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def pinpoint(error: BaseException, target: str = "") -> str:
    """*error* with the place that raised it: ``"KeyError: 'x' (…/owl/model.py:31, in build)"``. For operators, not for
    clients.

    The place is the innermost frame in the package of *target* (``"owl.model:Owl"``, or the name of a module), which is
    where its author has to look; without such a frame, the innermost of all.
    """
    package = _package(target.partition(":")[0])
    traces = list(_traces(error))
    if not traces:
        return sentence(error)
    theirs = [trace for trace in traces if _package(trace.tb_frame.f_globals.get("__name__")) == package]
    innermost = (theirs or traces)[-1]
    code = innermost.tb_frame.f_code
    return f"{sentence(error)} ({code.co_filename}:{innermost.tb_lineno}, in {code.co_name})"


def _traces(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]

"""Calling a family's code while a request runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mstar.spec.errors import MstarError
from mstar.spec.origin import family_fault

__all__ = ["family_code"]


@contextmanager
def family_code(what: str, *targets: str) -> Iterator[None]:
    """Around calls of a family's code: what that raises by mistake becomes a
    :class:`~mstar.spec.errors.FaultFound` that names its file and line. Deliberate errors, and those in which the
    family's code had no part, pass.

    :param what: what could not be done. :param targets: the family's code, as for :func:`~mstar.spec.origin.origin`.
    """
    try:
        yield
    except MstarError:
        raise
    except Exception as error:
        fault = family_fault(what, error, targets)
        if fault is None:
            raise
        raise fault from error

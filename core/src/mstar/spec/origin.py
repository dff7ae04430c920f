"""Where in a family's own code an error was raised: what a sentence for people needs of a traceback."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable

from mstar.spec.errors import FaultFound

__all__ = ["describe", "family_fault", "origin"]

log = logging.getLogger(__name__)


def origin(error: BaseException, targets: Iterable[str]) -> str | None:
    """``"file.py:12"``: the innermost line of a family's own code that *error* passed through.

    :param targets: what the family consists of, as ``"module:Class"`` or ``"module"``; the rest of their packages
        belongs to it too.
    :returns: ``None`` when the family's code had no part in *error*.
    """
    roots = {_root(target.partition(":")[0]) for target in targets}
    frames = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if any(_is_in(frame.f_globals.get("__name__") or "", root) for root in roots)
    ]
    if isinstance(error, SyntaxError) and error.filename and not (frames and frames[-1].startswith(error.filename)):
        return f"{error.filename}:{error.lineno}"  # a file that does not parse never gets a frame
    return frames[-1] if frames else None


def describe(error: BaseException, targets: Iterable[str] = ()) -> str:
    """*error* as part of one sentence: its type, its text, and :func:`origin`."""
    text = _text(error)
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    at = origin(error, targets)
    return said if at is None else f"{said} (at {at})"


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())
    except Exception as fault:  # it is someone's own class
        return f"(its __str__ raises {type(fault).__name__})"


def family_fault(what: str, error: BaseException, targets: Iterable[str]) -> FaultFound | None:
    """What to raise (from *error*) when a family's code raised: one sentence, and what to do.

    :param what: what could not be done. :param targets: as for :func:`origin`.
    :returns: ``None`` when the family's code had no part in *error*, which is a bug of M* then.
    """
    targets = tuple(targets)
    if origin(error, targets) is None:
        return None
    log.debug("%s", what, exc_info=error)
    return FaultFound(
        f"{what}: {describe(error, targets)}. Mend it there, or report it to the plugin's authors",
        advice="MSTAR_LOG_LEVEL=debug shows the traceback",
    )


def _root(module: str) -> str:
    """The package that *module* belongs to. Below ``mstar`` (the toy models for tests) that is the module alone."""
    top = module.partition(".")[0]
    return module if top == "mstar" else top


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")

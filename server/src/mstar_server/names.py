"""Names that clients choose, of voices, files and the like: checked before any of them can become a path."""

from __future__ import annotations

import unicodedata

from mstar.spec.errors import RequestError

__all__ = ["safe_name"]

LONGEST = 128

_RESERVED = frozenset(
    ("con", "prn", "aux", "nul", *(f"{device}{number}" for device in ("com", "lpt") for number in range(1, 10)))
)
"""Devices of Windows, which no file there can be called, whatever its ending."""


def safe_name(value: object, param: str) -> str:
    """*value*, if it is one plain component of a path on every system: letters (of any script), digits, spaces and
    ``_-.()+,@#``, at most 128 characters, no dot or space at either end.

    Refused, then: separators, ``..``, absolute paths, drives, NUL and other control characters, a URL's escapes
    (``%2e%2e``), and what becomes one of those when Unicode is normalised (a full-width slash). Nothing is looked up,
    so that the answer tells nothing of what files there are.

    :param param: the field that it came from.
    :raises RequestError: it is not.
    """
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param!r} must be a name", param=param)
    if len(value) > LONGEST:
        raise RequestError(f"{param!r} is longer than {LONGEST} characters", param=param)
    for form in (value, unicodedata.normalize("NFKC", value)):
        if (fault := _fault(form)) is not None:
            raise RequestError(f"{param!r}: {value[:80]!r} is no valid name: {fault}", param=param)
    return value


def _fault(value: str) -> str | None:
    stray = next((c for c in value if not (c.isalnum() or unicodedata.combining(c) or c in " _-.()+,@#")), None)
    if stray is not None:
        return f"it has {stray!r}"
    if not value or value[0] in " ." or value[-1] in " .":
        return "it begins or ends with a dot or a space"
    if value.partition(".")[0].strip().lower() in _RESERVED:
        return "it is reserved"
    return None

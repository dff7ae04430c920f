"""Files that others read while they are written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, data: bytes, suffix: str = ".partial") -> None:
    """Replace *path* by *data*. Readers see the old file or the new one, also after a crash, and only its owner may
    read it (mode 600). *suffix*: of the draft beside it, which a crash may leave behind.

    :raises OSError: the file cannot be written; it is what it was.
    """
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=suffix)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise

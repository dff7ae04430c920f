"""One folder of several snapshots: a model whose parts are published in repositories of their own (a language model and
somebody else's codec) is read like one that is published whole."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mstar.spec.errors import WeightsError
from mstar.spec.model import WeightsRef

__all__ = ["assembled", "part_refs"]


def part_refs(ref: WeightsRef) -> dict[str, WeightsRef]:
    """Folder → where it comes from, of the option ``parts`` of *ref*: ``{folder: {"id", "revision", "allow",
    "ignore"}}``.

    :raises WeightsError: it is something else.
    """
    found: dict[str, WeightsRef] = {}
    parts: Mapping[str, Mapping[str, Any]] = ref.options.get("parts", {})
    for folder, part in parts.items():
        unknown = part.keys() - {"id", "revision", "allow", "ignore"}
        if unknown or "id" not in part or Path(folder).name != folder:
            raise WeightsError(f"{ref.id}: the model's spec has a part {folder!r} that cannot be read: {dict(part)}")
        options = {name: part[name] for name in ("allow", "ignore") if name in part}
        found[folder] = WeightsRef(ref.source, part["id"], part.get("revision"), options)
    return found


def assembled(cache: Path, main: Path, parts: Mapping[str, Path]) -> Path:
    """A folder with what is in *main* and, under their names, the folders *parts*. It holds links; nothing is copied.
    *main* itself if it has all of them.

    :param cache: where the folder is made.
    """
    parts = {name: folder for name, folder in parts.items() if not (main / name).exists()}
    if not parts:
        return main
    entries = {entry.name: entry for entry in main.iterdir()} | dict(parts)
    spelled = "\0".join(f"{name}\0{entry}" for name, entry in sorted(entries.items()))
    place = cache / "assembled" / f"{main.name}-{hashlib.sha256(spelled.encode()).hexdigest()[:16]}"
    if all((place / name).exists() for name in entries):
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        for name, entry in entries.items():
            (made / name).symlink_to(entry, target_is_directory=entry.is_dir())
        if place.exists():  # of snapshots that have been removed since
            shutil.rmtree(place)
        os.replace(made, place)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        if not all((place / name).exists() for name in entries):  # else another process was faster
            raise WeightsError(f"{place} cannot be made: {error.strerror}") from error
    return place

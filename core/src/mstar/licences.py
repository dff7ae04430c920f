"""Consent to the terms of weights: what the operator has accepted, kept in a file of their own.

Nothing is fetched or served under terms that are not permissive before the operator has accepted them: for good with
``mstar license accept KEY``, which this module records, or for one process with ``--accept-licence`` or
``MSTAR_ACCEPT_LICENCES``. A record holds for the terms that were shown: when a later version of the family names other
terms, they are asked for again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from mstar.files import write_whole
from mstar.spec.errors import SetupError, nearest
from mstar.spec.model import ModelSpec

if TYPE_CHECKING:
    from mstar.settings import Settings

__all__ = ["Acceptance", "accept", "accepted_by", "check_licence", "read_acceptances", "terms_of", "unknown_keys"]

_FILE = "licences.json"


@dataclass(frozen=True)
class Acceptance:
    """One consent. *terms*, *url*: what was accepted; *version*: of the plugin whose spec named them; *accepted_at*:
    ISO 8601, UTC."""

    key: str
    terms: str
    url: str
    plugin: str
    version: str
    accepted_at: str

    def covers(self, spec: ModelSpec) -> bool:
        """Whether these are still the terms of *spec*'s weights."""
        return (self.key, self.terms, self.url) == (spec.key, spec.licence.name, spec.licence.url)


def read_acceptances(settings: Settings) -> dict[str, Acceptance]:
    """What has been recorded, by model key.

    :raises SetupError: the file is there but cannot be read; consent is not guessed.
    """
    path = settings.config / _FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {entry["key"]: Acceptance(**entry) for entry in found["accepted"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SetupError(
            f"the record of accepted licences {path} cannot be read ({type(error).__name__}: {error}); repair it, or "
            "remove it and accept again"
        ) from None


def accept(spec: ModelSpec, plugin: str, version: str, settings: Settings) -> Acceptance:
    """Record that the operator accepts the terms of *spec*'s weights, which *plugin* of *version* names.

    Other processes see the old file or the new one, never half of one, and lose no record to each other.

    :raises SetupError: the file cannot be written.
    """
    from filelock import FileLock  # only when something is recorded

    now = datetime.now(UTC).isoformat(timespec="seconds")
    acceptance = Acceptance(spec.key, spec.licence.name, spec.licence.url, plugin, version, now)
    path = settings.config / _FILE
    try:
        settings.config.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            _write(path, {**read_acceptances(settings), spec.key: acceptance})
    except OSError as error:
        raise SetupError(f"the consent cannot be recorded in {path}: {error}") from error
    return acceptance


def _write(path: Path, acceptances: Mapping[str, Acceptance]) -> None:
    text = json.dumps({"accepted": [asdict(acceptances[key]) for key in sorted(acceptances)]}, indent=2) + "\n"
    write_whole(path, text.encode())


def accepted_by(spec: ModelSpec, settings: Settings) -> str | None:
    """Why *spec*'s weights may be used: ``"permissive"``, ``"settings"`` or ``"record"``; ``None``: they may not."""
    if spec.licence.permissive:
        return "permissive"
    if spec.key in settings.accept_licences:
        return "settings"
    record = read_acceptances(settings).get(spec.key)
    return "record" if record is not None and record.covers(spec) else None


def terms_of(spec: ModelSpec) -> str:
    """The terms in words: their name, their link, and what they forbid."""
    use = "" if spec.licence.commercial else ", which do not allow commercial use"
    return f"{spec.licence.name} ({spec.licence.url or 'no link'}){use}"


def check_licence(spec: ModelSpec, settings: Settings) -> None:
    """Raise :class:`SetupError` unless the weights of *spec* are permissive or their terms have been accepted."""
    if accepted_by(spec, settings) is not None:
        return
    record = read_acceptances(settings).get(spec.key)
    changed = f" They have changed since you accepted {record.terms} ({record.url or 'no link'})." if record else ""
    raise SetupError(
        f"the weights of {spec.key!r} come under the terms of {terms_of(spec)}.{changed} If you accept them, run "
        f"`mstar license accept {spec.key}`; for this run only, pass --accept-licence or set "
        f"MSTAR_ACCEPT_LICENCES={spec.key}"
    )


def unknown_keys(settings: Settings, keys: Iterable[str]) -> Iterator[str]:
    """A sentence for each name in ``MSTAR_ACCEPT_LICENCES`` that is none of the models' *keys*."""
    known = set(keys)
    for name in settings.accept_licences:
        if name not in known:
            yield f"MSTAR_ACCEPT_LICENCES: there is no model {name!r}{nearest(name, known)}"

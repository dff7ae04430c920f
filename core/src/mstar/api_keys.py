"""API keys of a server: a file of hashes, which ``mstar key`` writes and a running server reads anew when it changes.

A key is 256 random bits, so one pass of SHA-256 at rest is enough: there is nothing to guess from a word list. The key
itself is shown once, when it is made, and is nowhere else.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mstar.files import write_whole
from mstar.spec.errors import SetupError

__all__ = ["DEFAULT_FILE", "ApiKey", "add_key", "digest_of", "find_key", "read_keys", "remove_key"]

DEFAULT_FILE = "api_keys.json"
"""Name of the file in the folder of settings that is used when none is named."""

PREFIX = "mstar-"


@dataclass(frozen=True)
class ApiKey:
    """One key as the file has it.

    :param id: names the key where the key itself must not stand (logs), and keeps its requests apart from others'.
    :param name: the operator's word for who has it. :param sha256: of the key, in hexadecimal.
    :param created: ISO 8601, UTC. :param expires: likewise; ``None``: never.
    :param max_requests: requests in flight; ``None``: the server's own limit.
    :param requests_per_minute: requests begun in any minute; ``None``: the server's own limit.
    """

    id: str
    name: str
    sha256: str
    created: str
    expires: str | None = None
    max_requests: int | None = None
    requests_per_minute: int | None = None

    def expired(self, now: datetime | None = None) -> bool:
        """Whether it is past its time."""
        return self.expires is not None and datetime.fromisoformat(self.expires) <= (now or datetime.now(UTC))


def digest_of(secret: str) -> str:
    """What the file holds of key *secret*."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def find_key(keys: Sequence[ApiKey], secret: str) -> ApiKey | None:
    """The key whose secret is *secret*. Looks at all of them, so that the time tells nothing."""
    digest, found = digest_of(secret), None
    for key in keys:
        if hmac.compare_digest(key.sha256, digest):
            found = key
    return found


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys in file *path*.

    :raises SetupError: the file is not there, or not one that :func:`add_key` could have written.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["keys"]
        return tuple(_checked(ApiKey(**entry)) for entry in entries)
    except FileNotFoundError:
        raise SetupError(f"there is no file of API keys {path}; `mstar key add NAME` makes one") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SetupError(f"the file of API keys {path} cannot be read ({type(error).__name__}: {error})") from None


def _checked(key: ApiKey) -> ApiKey:
    """*key*, whose fields may have been written by hand."""
    if not all(isinstance(getattr(key, name), str) and getattr(key, name) for name in ("id", "name", "created")):
        raise ValueError("'id', 'name' and 'created' must be texts")
    if not (isinstance(key.sha256, str) and len(key.sha256) == 64 and set(key.sha256) <= set("0123456789abcdef")):
        raise ValueError(f"'sha256' of key {key.name!r} is no SHA-256 in hexadecimal")
    if key.expires is not None and datetime.fromisoformat(key.expires).tzinfo is None:
        raise ValueError(f"'expires' of key {key.name!r} needs a time zone, as in 2030-01-31T00:00:00+00:00")
    for limit in (key.max_requests, key.requests_per_minute):
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"a limit of key {key.name!r} is {limit!r}: it must be a whole number of at least 1")
    return key


def add_key(
    path: Path,
    name: str,
    *,
    lifetime: timedelta | None = None,
    max_requests: int | None = None,
    requests_per_minute: int | None = None,
) -> tuple[ApiKey, str]:
    """Make a key and write it to file *path*, which is made if need be. Returns its record and the key itself, which is
    stored nowhere.

    :raises SetupError: the name is taken, or the file cannot be read or written.
    """
    secret = PREFIX + secrets.token_urlsafe(32)
    now = datetime.now(UTC)
    expires = None if lifetime is None else (now + lifetime).isoformat(timespec="seconds")
    key = ApiKey(
        id=f"key-{secrets.token_hex(6)}",
        name=name,
        sha256=digest_of(secret),
        created=now.isoformat(timespec="seconds"),
        expires=expires,
        max_requests=max_requests,
        requests_per_minute=requests_per_minute,
    )
    with _changing(path):
        keys = read_keys(path) if path.exists() else ()
        if any(other.name == name for other in keys):
            raise SetupError(f"there is a key {name!r} already; `mstar key remove {name}` removes it")
        _write(path, (*keys, key))
    return key, secret


def remove_key(path: Path, name: str) -> ApiKey:
    """Take the key called *name*, or with that id, out of file *path*.

    :raises SetupError: there is none, or the file cannot be read or written.
    """
    with _changing(path):
        keys = read_keys(path)
        found = next((key for key in keys if name in (key.name, key.id)), None)
        if found is None:
            known = ", ".join(key.name for key in keys)
            raise SetupError(f"there is no key {name!r}" + (f"; known: {known}" if known else ""))
        _write(path, [key for key in keys if key is not found])
    return found


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Nobody else changes *path* meanwhile."""
    from filelock import FileLock  # only when something is written

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock")):
            yield
    except OSError as error:
        raise SetupError(f"the file of API keys {path} cannot be written: {error}") from error


def _write(path: Path, keys: Sequence[ApiKey]) -> None:
    text = json.dumps({"keys": [asdict(key) for key in keys]}, indent=2) + "\n"
    write_whole(path, text.encode())

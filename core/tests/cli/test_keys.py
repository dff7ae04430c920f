"""``mstar key`` and the file that it keeps."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from mstar.api_keys import add_key, digest_of, find_key, read_keys, remove_key
from mstar.spec.errors import SetupError

Run = Callable[..., tuple[int, str, str]]


def test_a_key_is_shown_once_and_kept_as_a_hash(mstar: Run, tmp_path: Path) -> None:
    status, out, err = mstar("key", "add", "alice", "--days", "2", "--max-requests", "3")
    secret = out.strip()
    path = tmp_path / "config" / "api_keys.json"
    assert (status, secret[:6], len(secret)) == (0, "mstar-", 49)
    assert "shown this once" in err
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (key,) = read_keys(path)
    assert (key.name, key.sha256, key.max_requests, key.requests_per_minute) == ("alice", digest_of(secret), 3, None)
    assert find_key([key], secret) is key
    assert find_key([key], secret + "x") is None
    assert not key.expired()
    assert key.expired(datetime.now(UTC) + timedelta(days=3))
    listed = mstar("key", "list")[1]
    assert key.id in listed
    assert secret not in listed
    (fact,) = json.loads(mstar("key", "list", "--json")[1])
    assert (fact["name"], fact["expired"], "sha256" in fact) == ("alice", False, False)
    assert mstar("key", "remove", "alice")[0] == 0
    assert read_keys(path) == ()


def test_two_who_add_keys_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add_key(path, f"k{number}"), range(24)))
    assert {key.name for key in read_keys(path)} == {f"k{number}" for number in range(24)}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("add",), "mstar key add: which name?"),
        (("add", "  "), "mstar key add: which name?"),
        (("add", "a\nb"), "all of them printable"),
        (("list", "x"), "takes no name"),
        (("list", "--days", "3"), "are for `mstar key add`"),
        (("add", "a", "--days", "99999999999"), "--days: at most"),
        (("remove", "nobody"), "there is no file of API keys"),
        (("list", "--file", "/nowhere/k.json"), "there is no file of API keys /nowhere/k.json"),
        (("ad", "x"), "did you mean 'add'?"),
    ],
)
def test_faults(mstar: Run, words: tuple[str, ...], sentence: str) -> None:
    status, out, err = mstar("key", *words)
    assert (status, out) == (2, "")
    assert sentence in err


def test_names_are_unique_and_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key, _ = add_key(path, "a")
    with pytest.raises(SetupError, match="there is a key 'a' already"):
        add_key(path, "a")
    with pytest.raises(SetupError, match="there is no key 'b'; known: a"):
        remove_key(path, "b")
    assert remove_key(path, key.id) == key
    entry = {"id": "i", "name": "n", "sha256": "0" * 64, "created": "2026-01-01T00:00:00+00:00"}
    for change, fault in [
        ({"sha256": "x"}, "no SHA-256"),
        ({"expires": "2026-01-01"}, "time zone"),
        ({"expires": "soon"}, "soon"),
        ({"max_requests": 0}, "at least 1"),
        ({"more": 1}, "more"),
        ({"name": ""}, "must be texts"),
    ]:
        path.write_text(json.dumps({"keys": [entry | change]}))
        with pytest.raises(SetupError, match=fault):
            read_keys(path)

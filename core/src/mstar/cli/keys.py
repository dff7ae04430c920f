"""``mstar key``: make, list and remove the API keys of a server."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path

from mstar.api_keys import DEFAULT_FILE, add_key, read_keys, remove_key
from mstar.cli.commands import Commands, Context, Parser, one_of
from mstar.cli.options import positive, with_json
from mstar.cli.output import note, print_json, table
from mstar.spec.errors import SetupError

__all__ = ["register"]

_ACTIONS = ("add", "list", "remove")
_MOST_DAYS = 36_500


def register(commands: Commands) -> None:
    """Add the command."""
    commands.add("key", _run, help="Make, list and remove the API keys of a server.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    parser.add_argument("action", type=one_of(*_ACTIONS), metavar="add|list|remove", help="what to do")
    parser.add_argument("name", nargs="?", metavar="NAME", help="who has the key, for add and remove")
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help=f"the file of keys (default: {DEFAULT_FILE} in MSTAR_CONFIG)"
    )
    parser.add_argument("--days", type=positive, metavar="N", help="the new key expires after N days (default: never)")
    parser.add_argument("--max-requests", type=positive, metavar="N", help="requests that it may have in flight")
    parser.add_argument("--requests-per-minute", type=positive, metavar="N", help="requests that it may begin a minute")
    with_json(parser)


def _run(arguments: argparse.Namespace, context: Context) -> int:
    path = arguments.file or context.settings.config / DEFAULT_FILE
    _check(arguments)
    match arguments.action:
        case "add":
            return _add(arguments, path)
        case "remove":
            key = remove_key(path, arguments.name)
            if arguments.json:
                print_json({"id": key.id, "name": key.name})
                return 0
            note(f"The key {key.name!r} ({key.id}) is no longer valid.")
            return 0
        case _:
            return _list(arguments, path)


def _check(arguments: argparse.Namespace) -> None:
    action, name = arguments.action, arguments.name
    limits = (arguments.days, arguments.max_requests, arguments.requests_per_minute)
    if action == "list" and name is not None:
        raise SetupError("`mstar key list` takes no name: it lists all")
    if action != "list" and not (name or "").strip():
        raise SetupError(f"mstar key {action}: which name?")
    if name is not None and not (len(name) <= 100 and name.isprintable()):
        raise SetupError("a key's name has at most 100 characters, all of them printable")
    if arguments.days is not None and arguments.days > _MOST_DAYS:
        raise SetupError(f"--days: at most {_MOST_DAYS}")
    if action != "add" and any(limit is not None for limit in limits):
        raise SetupError("--days, --max-requests and --requests-per-minute are for `mstar key add`")


def _add(arguments: argparse.Namespace, path: Path) -> int:
    lifetime = None if arguments.days is None else timedelta(days=arguments.days)
    key, secret = add_key(
        path,
        arguments.name,
        lifetime=lifetime,
        max_requests=arguments.max_requests,
        requests_per_minute=arguments.requests_per_minute,
    )
    if arguments.json:
        print_json({"id": key.id, "name": key.name, "key": secret, "expires": key.expires, "file": str(path)})
        return 0
    note(f"The key of {key.name!r} follows. It is shown this once; {path} has its hash only.")
    print(secret)
    return 0


def _list(arguments: argparse.Namespace, path: Path) -> int:
    keys = read_keys(path) if path.exists() or arguments.file is not None else ()
    if arguments.json:
        names = ("id", "name", "created", "expires", "max_requests", "requests_per_minute")
        print_json([{**{name: getattr(key, name) for name in names}, "expired": key.expired()} for key in keys])
        return 0
    if not keys:
        note(f"there are no keys in {path}; `mstar key add NAME` makes one")
        return 0
    rows = [
        (
            key.id,
            key.name,
            key.created,
            (key.expires or "never") + (" (expired)" if key.expired() else ""),
            str(key.max_requests or "-"),
            str(key.requests_per_minute or "-"),
        )
        for key in keys
    ]
    print(table(("ID", "NAME", "CREATED", "EXPIRES", "IN FLIGHT", "A MINUTE"), rows))
    return 0

"""What is asked of a fleet: requests with their times, read from a file or drawn. No torch."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mstar.spec.errors import SetupError, nearest

__all__ = ["MOST_TOKENS", "Asked", "drawn", "read_load", "write_load"]


MOST_TOKENS = 10_000_000
"""Of a prompt or an answer: each token of an answer is a step to play."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. *at*: when it comes, in seconds from the start. *prompt*, *output*: tokens.

    :param limit: its ``max_tokens``, for which memory is reserved; default: its output.
    :param before: steps before the prompt, as pairs of a group and tokens (``("encoder", 1500)``).
    """

    at: float
    prompt: int
    output: int
    limit: int | None = None
    tenant: str = ""
    priority: int = 0
    before: tuple[tuple[str, int], ...] = ()

    @property
    def reserved(self) -> int:
        """Tokens of context that are set aside for it."""
        return self.prompt + max(self.output, self.limit or 0)


def drawn(rate: float, count: int, prompt: float, output: float, spread: float = 0.0, seed: int = 0) -> list[Asked]:
    """*count* requests that come independently of each other (a Poisson process), *rate* a second.

    :param prompt: tokens in the middle, :param output: likewise. :param spread: standard deviation of their logarithms
        (0: all are the same; 1: the largest of a hundred is ten times the middle one).
    """
    draw = random.Random(seed)
    now = 0.0
    requests = []
    for _ in range(count):
        now += draw.expovariate(rate)
        read, written = [max(1, round(middle * math.exp(draw.gauss(0.0, spread)))) for middle in (prompt, output)]
        requests.append(Asked(now, read, written))
    return requests


def read_load(path: Path) -> list[Asked]:
    """Requests from *path*: a line each, a JSON object with the fields of :class:`Asked`, in any order of time.

    :raises SetupError: what is wrong, with the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SetupError(f"{path} is no UTF-8 text: byte {error.start}") from None
    requests = [_asked(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise SetupError(f"{path}: there is no request in it")
    return sorted(requests, key=lambda request: request.at)


def write_load(requests: Sequence[Asked], path: Path) -> None:
    """Write *requests* as :func:`read_load` reads them."""
    path.write_text("".join(f"{json.dumps(dict(_fields(request)))}\n" for request in requests), encoding="utf-8")


def _fields(request: Asked) -> Iterator[tuple[str, object]]:
    for name in Asked.__slots__:
        value = getattr(request, name)
        if name in _NUMBERS or value != _DEFAULTS[name]:
            yield name, value


_NUMBERS = ("at", "prompt", "output")
_LATEST_S = 1e10
"""Later than Unix time in seconds. A clock of doubles ticks in microseconds there."""
_DEFAULTS = {"limit": None, "tenant": "", "priority": 0, "before": ()}


_EXAMPLE = '{"at": 0.5, "prompt": 300, "output": 100}'


def _asked(line: str, where: str) -> Asked:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SetupError(f"{where}: {error}") from None
    if not isinstance(found, dict):
        raise SetupError(f"{where}: an object is expected, as in {_EXAMPLE}")
    for name in found:
        if name not in Asked.__slots__:
            raise SetupError(f"{where}: a request has no {name!r}{nearest(name, Asked.__slots__)}")
    for name in _NUMBERS:
        if name not in found:
            raise SetupError(f"{where}: {name!r} is missing")
    if not isinstance(found["at"], int | float) or isinstance(found["at"], bool) or not 0 <= found["at"] < _LATEST_S:
        raise SetupError(f"{where}: 'at' must be a number of seconds, from 0 to {_LATEST_S:.0e}, not {found['at']!r}")
    for name in ("prompt", "output", "limit"):
        value = found.get(name, 1)
        if value is None and name == "limit":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SetupError(f"{where}: {name!r} must be a number of tokens, 1 or more, not {value!r}")
    if (limit := found.get("limit")) is not None and limit < found["output"]:
        raise SetupError(
            f"{where}: 'limit' is {limit}, and 'output' {found['output']}: a server would stop at the limit"
        )
    if not isinstance(found.get("tenant", ""), str) or type(found.get("priority", 0)) is not int:
        raise SetupError(f"{where}: 'tenant' is a text and 'priority' a whole number")
    found["before"] = _before(found.get("before", []), where)
    return Asked(**found)


def _before(steps: object, where: str) -> tuple[tuple[str, int], ...]:
    pairs = []
    for step in steps if isinstance(steps, list) else [steps]:
        match step:
            case [str() as group, int() as tokens] if 1 <= tokens <= MOST_TOKENS:
                pairs.append((group, tokens))
            case _:
                raise SetupError(f"{where}: 'before' is a list of pairs such as ['encoder', 1500], not {steps!r}")
    return tuple(pairs)

"""Many replicas behind a router, on virtual time. No torch."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence

from mstar.simulate.load import Asked
from mstar.simulate.outcome import Outcome
from mstar.simulate.profile import Profile
from mstar.simulate.replica import Replica, Request
from mstar.spec.errors import SetupError, nearest

__all__ = ["ROUTERS", "simulate"]


class _InTurn:
    """Each replica after the other."""

    def __init__(self, replicas: int, seed: int):
        del seed
        self._count, self._next = replicas, 0

    def choose(self, loads: Sequence[int]) -> int:
        del loads
        chosen, self._next = self._next, (self._next + 1) % self._count
        return chosen

    def changed(self, replica: int, load: int) -> None: ...


class _Least:
    """The one with the fewest requests, of equals the one that was chosen longest ago."""

    def __init__(self, replicas: int, seed: int):
        del seed
        self._heap = [(0, number, number) for number in range(replicas)]
        self._clock = replicas

    def choose(self, loads: Sequence[int]) -> int:
        while loads[self._heap[0][2]] != self._heap[0][0]:  # an entry from before its load changed
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def changed(self, replica: int, load: int) -> None:
        self._clock += 1
        heapq.heappush(self._heap, (load, self._clock, replica))


class _Random:
    """Any."""

    def __init__(self, replicas: int, seed: int):
        self._count, self._draw = replicas, random.Random(seed)

    def choose(self, loads: Sequence[int]) -> int:
        del loads
        return self._draw.randrange(self._count)

    def changed(self, replica: int, load: int) -> None: ...


class _Two(_Random):
    """Of two drawn at random the one with fewer requests (Mitzenmacher, "The Power of Two Choices", 2001)."""

    def choose(self, loads: Sequence[int]) -> int:
        first, second = self._draw.randrange(self._count), self._draw.randrange(self._count)
        return first if loads[first] <= loads[second] else second


ROUTERS: dict[str, Callable[[int, int], _InTurn | _Least | _Random]] = {
    "least": _Least,
    "two": _Two,
    "in-turn": _InTurn,
    "random": _Random,
}
"""How a router chooses a replica."""


def simulate(
    profile: Profile,
    load: Sequence[Asked],
    replicas: int = 1,
    router: str = "least",
    *,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Play *load*, which is in order of time, to *replicas* of *profile*.

    :param router: a name in ``ROUTERS``. :param progress: told how many requests have ended.
    :raises SetupError: a request could never run.
    """
    if router not in ROUTERS:
        raise SetupError(f"there is no router {router!r}{nearest(router, ROUTERS)}")
    fleet = [Replica(profile) for _ in range(replicas)]
    for asked in load:
        fleet[0].check(asked)
    choice, loads = ROUTERS[router](replicas, seed), [0] * replicas
    outcome, ends = Outcome(profile, replicas), list[tuple[float, int]]()
    coming = ended = 0
    while coming < len(load) or ends:
        now = min(load[coming].at if coming < len(load) else math.inf, ends[0][0] if ends else math.inf)
        touched: dict[int, None] = {}
        while ends and ends[0][0] == now:
            chosen = heapq.heappop(ends)[1]
            touched[chosen] = None
            complete = fleet[chosen].end(now)
            for request in complete:
                outcome.end(request)
            if complete:
                ended += len(complete)
                loads[chosen] -= len(complete)
                choice.changed(chosen, loads[chosen])
                progress(ended)
        while coming < len(load) and load[coming].at == now:
            chosen = choice.choose(loads)
            if fleet[chosen].submit(Request(load[coming], str(coming), now), now):
                touched[chosen] = None
                loads[chosen] += 1
                choice.changed(chosen, loads[chosen])
            else:
                outcome.refuse()
            coming += 1
        for number in touched:
            replica = fleet[number]
            if not replica.running and (end := replica.begin(now)) is not None:
                heapq.heappush(ends, (end, number))
    outcome.close(fleet)
    return outcome

"""Which rank has which value, as rank 0 knows it: what a step's rank lacks, and what rank 0 wants to see."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mstar.graph.values import Ref
from mstar.worker.handles import Handle, unpack
from mstar.worker.messages import Contents, Fetch, Fetched, FromRank, Part
from mstar.worker.rank_links import Away, Link, RankLost

__all__ = ["RankValues"]

_FETCH_S = 60.0


class RankValues:
    """:param links: the ranks that live. :param device: that of rank 0."""

    def __init__(self, links: Mapping[int, Link], device: torch.device):
        self._links, self._device = links, device
        self._sent = itertools.count(1)
        self._stash: list[FromRank] = []

    def given(self, value: Any, rank: int, contents: list[Contents]) -> Any:
        """*value* as an input of a step on *rank*: by its name, if it is a tensor. *contents* grow by what *rank* has
        not."""
        if not isinstance(value, Ref):
            return value
        away = value.away
        if away is None:
            away = value.away = Away(self._fetch)
        link, held = self._links[rank], away.held.get(rank)
        if held is None or not held[0].goes_to(link.dropped):  # what a rank had that has died since, it has no more
            handle = Handle(-next(self._sent), link.dropped)
            contents.append(link.channel.pack(handle.key, value.items()))
            away = value.away = away.copy()  # others that lie in the same tensor are not sent with it
            held = away.held[rank] = (handle, value.start)
        handle, begins = held
        host = value.host if value.row and isinstance(value.host, int) else None
        return Part(handle.key, value.start - begins, value.stop - begins, value.row, host)

    def away(self, key: int, ranks: Sequence[int]) -> Away:
        """Where else a tensor is: on *ranks*, which name it *key*."""
        away = Away(self._fetch)
        for rank in ranks:
            if rank in self._links:
                away.held[rank] = (Handle(key, self._links[rank].dropped), 0)
        return away

    def stashed(self) -> list[FromRank]:
        """What came while something else was waited for."""
        stash, self._stash = self._stash, []
        return stash

    def _fetch(self, rank: int, key: int) -> Tensor:
        """The contents of a value that only *rank* has. Waits for it: routes seldom look at such values."""
        link = self._links.get(rank)
        if link is None:
            raise RankLost(rank, "it had what a route wants to see")
        link.outbox.append(Fetch(key=key))
        link.flush()
        until = time.monotonic() + _FETCH_S
        while (left := until - time.monotonic()) > 0:
            for message in map(link.resolve, link.peer.receive(left)):
                if isinstance(message, Fetched) and message.contents.key == key:
                    return unpack(message.contents, self._device)
                self._stash.append(message)
        raise RankLost(rank, f"it has not sent a value within {_FETCH_S:.0f} s")

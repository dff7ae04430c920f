"""What came of a simulated load: times of requests and use of replicas. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mstar.simulate.profile import Profile
from mstar.simulate.replica import Replica, Request

__all__ = ["Outcome", "Times"]

_FINE = math.log(1.005)


@dataclass
class Times:
    """Many times, of which quantiles are wanted: counted in classes half a per cent wide, so memory stays small."""

    classes: Counter[int] = field(default_factory=Counter)
    count: int = 0
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.classes[round(math.log(max(seconds, 1e-9)) / _FINE)] += 1
        self.count += 1
        self.total += seconds

    def quantile(self, share: float) -> float:
        """Seconds that *share* (0 to 1) of the times do not exceed; NaN without any."""
        left = share * self.count
        for number in sorted(self.classes):
            left -= self.classes[number]
            if left <= 0:
                return math.exp(number * _FINE)
        return math.nan

    def report(self) -> dict[str, float]:
        mean = self.total / self.count if self.count else math.nan
        return {"p50": self.quantile(0.5), "p95": self.quantile(0.95), "p99": self.quantile(0.99), "mean": mean}


class Outcome:
    """Collects, request by request."""

    def __init__(self, profile: Profile, replicas: int):
        self._profile, self._replicas = profile, replicas
        self._extra = profile.request_s
        self.first_token, self.between_tokens, self.queued, self.whole = Times(), Times(), Times(), Times()
        self.completed = self.refused = self.output_tokens = self.prompt_tokens = 0
        self._last = 0.0
        self._began = math.inf
        self._fleet: dict[str, Any] = {}

    def refuse(self) -> None:
        """A request found its replica's queue full."""
        self.refused += 1

    def end(self, request: Request) -> None:
        """*request* is complete."""
        assert request.started is not None
        assert request.first is not None
        assert request.last is not None
        self.completed += 1
        self.output_tokens += request.said
        self.prompt_tokens += request.asked.prompt
        self.queued.add(request.started - request.came)
        self.first_token.add(request.first - request.came + self._extra)
        self.whole.add(request.last - request.came + self._extra)
        for gap in request.gaps:
            self.between_tokens.add(gap)
        self._began, self._last = min(self._began, request.came), max(self._last, request.last)

    def close(self, fleet: Sequence[Replica]) -> None:
        """All requests have ended: read the books of the *fleet*."""
        span = max(self._last - self._began, 1e-9)
        busy = [replica.busy_s / span for replica in fleet]
        pages = [replica.most_pages for replica in fleet]
        room = None if self._profile.kv_tokens is None else self._profile.kv_tokens // self._profile.page
        self._fleet = {
            "busy_share": {"mean": sum(busy) / len(busy), "least": min(busy), "most": max(busy)},
            "kv_pages_most": max(pages),
            "kv_share_most": None if room is None else max(pages) / room,
            "queue_most": max(replica.most_waiting for replica in fleet),
            "steps": sum(replica.steps for replica in fleet),
        }

    def report(self) -> dict[str, Any]:
        """Plain data; seconds unless a name says otherwise."""
        span = max(self._last - self._began, 1e-9) if self.completed else math.nan
        return {
            "model": self._profile.model,
            "replicas": self._replicas,
            "devices": self._replicas * self._profile.ranks,
            "completed": self.completed,
            "refused": self.refused,
            "seconds": span,
            "requests_per_s": self.completed / span,
            "output_tokens_per_s": self.output_tokens / span,
            "prompt_tokens_per_s": self.prompt_tokens / span,
            "first_token": self.first_token.report(),
            "between_tokens": self.between_tokens.report(),
            "queued": self.queued.report(),
            "whole": self.whole.report(),
            **self._fleet,
        }

"""What a step costs, by what is in it, and how that is learned from measurements. No torch.

A step's time is a sum of what grows with it: a part for every step, one more if it has several tokens (products of
matrices take other kernels than those of a matrix and a vector), a part for every row, for every token, for every token
of context that attention reads, and for every pair of tokens that attention of a prompt compares. The part for tokens
is convex: a step of few tokens is bound by the weights that it reads, one of many by its products, so tokens beyond
each of ``KNOTS`` may cost more. No part is negative. Such sums are fitted by non-negative least squares of relative
errors (Lawson and Hanson, "Solving Least Squares Problems", 1974; scipy's implementation).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mstar.spec.errors import SetupError

__all__ = ["KNOTS", "LONGEST_S", "Fit", "Sample", "StepCost", "StepShape", "check_can_learn", "fit"]

KNOTS = (16, 64, 256, 1024)
"""Tokens of a step from which on one more may cost more."""
LONGEST_S = 1e6
"""Of a part of a step, in seconds. Sums of what is endless, or nearly, are no times."""
_PARTS = ("step", "several", "row", "token", *(f"token_over_{knot}" for knot in KNOTS), "context", "pair")


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is in a step.

    :param rows: requests. :param tokens: of all of them. :param context: tokens of context at the end of the step, of
        all rows. :param pairs: for parts of prompts, each token times the context that it attends to.
    """

    rows: int
    tokens: int
    context: int = 0
    pairs: float = 0.0

    @property
    def parts(self) -> tuple[float, ...]:
        """How much there is of each part of the cost."""
        beyond = tuple(float(max(self.tokens - knot, 0)) for knot in KNOTS)
        several = float(self.tokens > 1)
        return (1.0, several, float(self.rows), float(self.tokens), *beyond, float(self.context), self.pairs)


@dataclass(frozen=True)
class StepCost:
    """Seconds of each part (``step``, ``several``, ``row``, ``token``, ``token_over_16`` …, ``context``, ``pair``);
    what is left out is 0.

    :raises SetupError: a part is unknown, negative or beyond :data:`LONGEST_S`.
    """

    parts: Mapping[str, float]
    _vector: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in self.parts.items():
            if name not in _PARTS:
                raise SetupError(f"a step's cost has no part {name!r}; it has {', '.join(_PARTS)}")
            if not 0 <= value <= LONGEST_S:
                raise SetupError(
                    f"{name!r} of a step's cost is {value}: it must be a number of seconds, from 0 to {LONGEST_S:.0e}"
                )
        object.__setattr__(self, "_vector", tuple(self.parts.get(name, 0.0) for name in _PARTS))

    def seconds(self, shape: StepShape) -> float:
        """How long a step of *shape* takes."""
        return sum([part * each for part, each in zip(shape.parts, self._vector, strict=True)])


@dataclass(frozen=True)
class Sample:
    """A measurement: one or more steps took *seconds* together, with what comes on top once for a *request*.

    :param requests: how many times that is in *seconds*: 1 for the time to a first token, 0 for steps.
    """

    seconds: float
    steps: Sequence[StepShape]
    requests: int = 0

    @property
    def parts(self) -> list[float]:
        sums = [sum(each) for each in zip(*(step.parts for step in self.steps), strict=True)]
        return [*sums, float(self.requests)]


@dataclass(frozen=True)
class Fit:
    """What was learned: a step's cost, what comes on top of a request's steps in seconds, and how far off the samples
    that is: relative errors, of the middle one and of the worst."""

    cost: StepCost
    request_s: float
    samples: int
    median_error: float
    largest_error: float


def check_can_learn() -> None:
    """Raise :class:`SetupError` if scipy is missing."""
    if importlib.util.find_spec("scipy") is None:
        raise SetupError("learning costs needs scipy: pip install 'mstar-core[simulate]'")


def fit(samples: Sequence[Sample], known: Mapping[str, float] | None = None) -> Fit:
    """Learn from *samples*.

    :param known: seconds of parts that need not be learned. :raises SetupError: there are none, or scipy is missing.
    """
    if not samples:
        raise SetupError("there is no measurement to learn from")
    check_can_learn()
    import numpy as np
    from scipy.optimize import nnls

    seconds = np.array([sample.seconds for sample in samples])
    parts = np.array([sample.parts for sample in samples])
    given = np.array([(known or {}).get(name, 0.0) for name in (*_PARTS, "request")])
    relative = parts / seconds[:, None]
    open_ = np.where(given > 0, 0.0, relative)
    scale = np.maximum(open_.max(0), 1e-300)  # parts differ by ten orders of magnitude
    found = given + nnls(open_ / scale, 1 - relative @ given)[0] / scale
    errors = np.abs(relative @ found - 1)
    cost = StepCost({name: float(value) for name, value in zip(_PARTS, found[:-1], strict=True) if value})
    return Fit(cost, float(found[-1]), len(samples), float(np.median(errors)), float(errors.max()))

"""How a stream's chunk policy cuts it, counted in units: where the stream itself and who knows its reader agree."""

from __future__ import annotations

from mstar.spec.graph import Fixed, Ramp

__all__ = ["Cut", "cut", "cuts", "wanted"]

Cut = tuple[int, int, int]
"""Units of context, new units and units of look-ahead in a chunk."""


def wanted(chunk: Fixed | Ramp, pulls: int) -> int:
    """New units of the chunk that follows *pulls* others, unless the stream ends."""
    return chunk.size if isinstance(chunk, Fixed) else chunk.sizes[min(pulls, len(chunk.sizes) - 1)]


def cut(chunk: Fixed | Ramp, pulls: int, held: int, ended: bool) -> tuple[int, int] | None:
    """New units and look-ahead of the next chunk of a stream with *held* units that were not delivered; ``None``: it is
    not complete.

    At the end of a stream with look-ahead, chunks get as short as they must for their look-ahead to be whole, in the
    policy's own sizes; what then remains comes in the smallest one. So chunks of an end are cut as others are.
    """
    size = wanted(chunk, pulls)
    if held >= size + chunk.ahead:
        return size, chunk.ahead
    if not ended or not held:
        return None
    if chunk.ahead:
        sizes = (chunk.size,) if isinstance(chunk, Fixed) else chunk.sizes
        size = max((n for n in sizes if n + chunk.ahead <= held), default=min(sizes))
    size = min(size, held)
    return size, min(chunk.ahead, held - size)


def cuts(chunk: Fixed | Ramp, ends: bool = True) -> list[Cut]:
    """What a stream of any length is cut into, each once, in the order in which a long one comes to them.

    :param ends: false: leave out what comes only where a stream ends.
    """
    sizes = (chunk.size,) if isinstance(chunk, Fixed) else chunk.sizes
    ramp = sum(sizes[:-1]) + chunk.left + sizes[-1]  # behind it all is as before
    longest = ramp + 2 * (sizes[-1] + chunk.ahead)
    found: dict[Cut, None] = {}
    for length in range(longest, 0, -1) if ends else (longest,):
        done = pulls = 0
        while done < length and (taken := cut(chunk, pulls, length - done, ends)) is not None:
            new, ahead = taken
            found[min(chunk.left, done), new, ahead] = None
            done, pulls = done + new, pulls + 1
    return list(found)

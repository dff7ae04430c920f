"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["StopStrings", "could_begin"]


def could_begin(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of *text* with which one of *tags* begins."""
    longest = min(max(map(len, tags), default=1) - 1, len(text))
    for length in range(longest, 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0


class StopStrings:
    """Finds the first stop string in a text that comes in pieces, and holds back only what could become one.

    Of several stop strings the one that ends first wins; of those that end together, the longest. The result does not
    depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str] = (), include: bool = False):
        self._stops, self._include = tuple(stops), include
        self._held = ""

    @property
    def none(self) -> bool:
        """Whether there are no stop strings to find."""
        return not self._stops

    def push(self, piece: str) -> tuple[str, bool]:
        """Text to pass on, and whether a stop string was found (then nothing more may be pushed)."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = min(self._ends(text), default=None)
        if found is not None:
            end, begin = found
            self._held = ""
            return text[: end if self._include else begin], True
        keep = could_begin(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _ends(self, text: str) -> Iterable[tuple[int, int]]:
        for stop in self._stops:
            begin = text.find(stop)
            if begin >= 0:
                yield begin + len(stop), begin

    @property
    def held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    def finish(self) -> str:
        """What was held back when the text ended."""
        held, self._held = self._held, ""
        return held

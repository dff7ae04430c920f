"""Names for the beginnings of contexts: digests of their tokens, page by page. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

__all__ = ["PageChain", "page_digests", "salted"]


def salted(salt: str) -> bytes:
    """The digest of no tokens, for contexts that may share with others of *salt*."""
    return blake2b(salt.encode(), digest_size=16).digest()


def page_digests(parent: bytes, ids: Sequence[int], page: int, start: int = 0) -> Iterator[bytes]:
    """A digest for each full page of *page* tokens of *ids* from page *start* on, of all tokens up to its end.

    :param parent: the digest of the page before *start*, or :func:`salted`.
    """
    ids = ids if isinstance(ids, array) else array("q", ids)
    for index in range(start, len(ids) // page):
        chunk = ids[index * page : (index + 1) * page]
        parent = blake2b(parent + chunk.tobytes(), digest_size=16).digest()
        yield parent


class PageChain:
    """The digests of a context whose tokens become known one after the other.

    :ivar known: tokens that were added.
    """

    __slots__ = ("_digest", "_page", "_rest", "known")

    def __init__(self, salt: str, page: int):
        self._digest, self._page, self._rest, self.known = salted(salt), page, array("q"), 0

    def facts(self) -> tuple[bytes, list[int], int]:
        """All that another one needs to go on as this one: see :meth:`restore`."""
        return self._digest, self._rest.tolist(), self.known

    def restore(self, digest: bytes, rest: Iterable[int], known: int) -> None:
        """Go on as the one whose :meth:`facts` these are."""
        self._digest, self._rest, self.known = digest, array("q", rest), known

    def add(self, ids: Iterable[int]) -> list[tuple[int, bytes]]:
        """The next tokens are *ids*. Gives the length and the digest of each beginning that they complete."""
        before = self.known - len(self._rest)
        self._rest.extend(ids)
        self.known = before + len(self._rest)
        if len(self._rest) < self._page:
            return []
        found = []
        for digest in page_digests(self._digest, self._rest, self._page):
            before += self._page
            found.append((before, digest))
            self._digest = digest
        del self._rest[: len(found) * self._page]
        return found

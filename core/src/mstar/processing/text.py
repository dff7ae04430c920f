"""From token ids to text that a client may see: incremental decoding, stop strings, log-probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from mstar.spec.processor import Renderer, TextDelta
from mstar.spec.request import Done, Emit, TokenLogprob

__all__ = ["Detokenizer", "StopStrings", "TextRenderer"]

Decode = Callable[[Sequence[int]], str]
"""All of a sequence of ids to text, special tokens left out."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_PENDING_BYTES = 3
"""An unfinished UTF-8 character is at most this many bytes, hence at most as many replacement characters."""

_WINDOW = 64
"""Tokens after which a window without a clean end (a model that emits broken UTF-8) is cut."""


class Detokenizer:
    """Decodes token by token so that the joined pieces equal the decoded whole.

    A tokenizer's text for a token depends on its neighbours: bytes of one character are spread over tokens,
    SentencePiece drops the space that begins a text. So a window of tokens is decoded, with the last piece as left
    context, and what is new in it is passed on, except for a tail that may be half a character. (The idea is that of
    Hugging Face's text-generation-inference.)

    One kind of text cannot be decoded so: where byte-fallback tokens spell broken UTF-8 after a whole character, the
    whole run turns into replacement characters, and the character has been passed on already.
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self._window: list[int] = []
        self._context = 0  # tokens of the window that are only left context
        self._shown = ""  # the part of the window's text that has been passed on
        self._pending = False

    @property
    def pending(self) -> bool:
        """Whether the last token's text is still incomplete."""
        return self._pending

    def push(self, token: int) -> str:
        """The text that *token* completes; may be empty."""
        self._window.append(token)
        text = self._decode(self._window)
        stable = _without_unfinished(text)
        self._pending = len(stable) < len(text)
        # A tokenizer with byte fallback replaces a whole run of bytes while the run is broken: wait until it is whole.
        if not stable.startswith(self._shown):
            self._pending = True
            return ""
        piece = stable[len(self._shown) :]
        self._shown = stable
        if not self._pending and piece:
            self._restart_window(self._window[self._context :], clean=True)
        elif len(self._window) > _WINDOW:
            self._restart_window(self._window[-8:], clean=False)
        return piece

    def _restart_window(self, tokens: list[int], clean: bool) -> None:
        """Keep only *tokens*. *clean*: their text ends with a whole character, so that they can be left context."""
        text = self._decode(tokens)
        # Tokens without text of their own (special ones, a dropped space) are no left context: keep what is there.
        if text:
            self._window, self._shown = tokens, _without_unfinished(text)
            self._context = len(tokens) if clean else 0

    def finish(self) -> str:
        """What was held back: the replacement characters of a character that never came to its end."""
        text = self._decode(self._window)
        piece = text[len(self._shown) :] if text.startswith(self._shown) else ""
        self._window, self._context, self._shown, self._pending = [], 0, "", False
        return piece


def _without_unfinished(text: str) -> str:
    end = len(text)
    while end > 0 and len(text) - end < _PENDING_BYTES and text[end - 1] == _REPLACEMENT:
        end -= 1
    return text[:end]


class StopStrings:
    """Finds the first stop string in a text that comes in pieces, and holds back only what could become one.

    Of several stop strings the one that ends first wins; of those that end together, the longest. The result does not
    depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str] = (), include: bool = False):
        self._stops, self._include = tuple(stops), include
        self._held = ""

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
        keep = self._could_begin(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _ends(self, text: str) -> Iterable[tuple[int, int]]:
        for stop in self._stops:
            begin = text.find(stop)
            if begin >= 0:
                yield begin + len(stop), begin

    def _could_begin(self, text: str) -> int:
        """Length of the longest end of *text* with which a stop string begins."""
        longest = min(max(map(len, self._stops)) - 1, len(text))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

    def finish(self) -> str:
        """What was held back when the text ended."""
        held, self._held = self._held, ""
        return held


class TextRenderer(Renderer):
    """One stream of token ids to :class:`TextDelta`. Sets ``finished = "stop"`` at a stop string.

    Tokens and their log-probabilities go out with the delta that completes their text; those of a stop string that is
    not shown are dropped with it.

    :param decode: ids to text without special tokens. :param hidden: ids that end the answer and are not part of it.
    :param stream: the stream to render; events of other streams give nothing.
    """

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        hidden: Iterable[int] = (),
        stream: str = "text",
    ):
        self._text = Detokenizer(decode)
        self._stops = StopStrings(stop, include_stop)
        self._hidden, self._stream = frozenset(hidden), stream
        self._decoded = self._released = 0  # characters
        self._unfinished: list[tuple[int, TokenLogprob | None]] = []
        self._waiting: deque[tuple[int, int, TokenLogprob | None]] = deque()  # (where its text begins, token, report)

    def feed(self, event: Emit) -> Iterable[TextDelta]:
        if event.stream != self._stream or self.finished is not None:
            return ()
        reports: Sequence[TokenLogprob | None] = event.logprobs or [None] * len(event.data)
        pieces = []
        for token, report in zip(event.data, reports, strict=True):
            if token in self._hidden:
                continue
            self._unfinished.append((token, report))
            piece = self._text.push(token)
            if not self._text.pending:
                self._place_unfinished()
            pieces.append(self._advance(piece))
            if self.finished is not None:
                break
        return self._delta("".join(pieces))

    def finish(self, done: Done | None) -> Iterable[TextDelta]:
        if self.finished is not None:
            return ()
        self._place_unfinished()
        text = self._advance(self._text.finish())
        if self.finished is None:
            held = self._stops.finish()
            self._released += len(held)
            text += held
        return self._delta(text)

    def _place_unfinished(self) -> None:
        for token, report in self._unfinished:
            self._waiting.append((self._decoded, token, report))
        self._unfinished.clear()

    def _advance(self, piece: str) -> str:
        text, stopped = self._stops.push(piece)
        self._decoded += len(piece)
        self._released += len(text)
        if stopped:
            self.finished = "stop"
        return text

    def _delta(self, text: str) -> Iterable[TextDelta]:
        tokens, reports = [], []
        while self._waiting and self._complete():
            _, token, report = self._waiting.popleft()
            tokens.append(token)
            if report is not None:
                reports.append(report)
        if not text and not tokens:
            return ()
        return (TextDelta(text, tuple(tokens), tuple(reports), self._stream),)

    def _complete(self) -> bool:
        """Whether the first waiting token's text is out: all of it, or at a stop string any of it."""
        begin = self._waiting[0][0]
        if self.finished is not None:
            return begin < self._released
        following = next((b for b, _, _ in self._waiting if b > begin), self._decoded)
        return following <= self._released

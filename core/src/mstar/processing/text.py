"""From token ids to text that a client may see: incremental decoding, stop strings, log-probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from mstar.processing.channels import Channels, Piece
from mstar.processing.stops import StopStrings
from mstar.spec.processor import Delta, ReasoningDelta, Renderer, TextDelta, ToolCallDelta
from mstar.spec.request import Done, Emit, TokenLogprob

__all__ = ["Detokenizer", "TextRenderer"]

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
        text = stable = self._decode(self._window)
        self._pending = False
        if text.endswith(_REPLACEMENT):
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
            self._window = tokens
            self._shown = _without_unfinished(text) if text.endswith(_REPLACEMENT) else text
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


class TextRenderer(Renderer):
    """One stream of token ids to :class:`TextDelta`, and to :class:`ReasoningDelta` and :class:`ToolCallDelta` where
    *channels* tell them apart. Sets ``finished = "stop"`` at a stop string.

    Tokens and their log-probabilities go out with the delta that completes their text; those of a stop string that is
    not shown are dropped with it.

    :param decode: ids to text without special tokens. :param channels: default: all is text.
    :param hidden: ids that end the answer and are not part of it.
    :param stream: the stream to render; events of other streams give nothing.
    """

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        hidden: Iterable[int] = (),
        stream: str = "text",
        channels: Channels | None = None,
    ):
        self._text = Detokenizer(decode)
        self._channels = channels or Channels(StopStrings(stop, include_stop))
        self._free = self._channels.free
        self._hidden, self._stream = frozenset(hidden), stream
        self._decoded = self._released = 0  # characters
        self._unfinished: list[tuple[int, TokenLogprob | None]] = []
        self._waiting: deque[tuple[int, int, TokenLogprob | None]] = deque()  # (where its text begins, token, report)

    def feed(self, event: Emit) -> Iterable[Delta]:
        if event.stream != self._stream or self.finished is not None:
            return ()
        reports: Sequence[TokenLogprob | None] = event.logprobs or [None] * len(event.data)
        if self._free:
            return self._all_of(event.data, reports)
        pieces: list[Piece] = []
        for token, report in zip(event.data, reports, strict=True):
            if token in self._hidden:
                continue
            self._unfinished.append((token, report))
            piece = self._text.push(token)
            if not self._text.pending:
                self._place_unfinished()
            pieces += self._advance(piece)
            if self.finished is not None:
                break
        return self._deltas(pieces)

    def _all_of(self, data: Sequence[int], reports: Sequence[TokenLogprob | None]) -> Sequence[Delta]:
        """What :meth:`feed` gives where no channel holds anything back: most answers, and the most tokens a second."""
        text, unfinished, detokenizer = "", self._unfinished, self._text
        settled: list[tuple[int, TokenLogprob | None]] = []
        for token, report in zip(data, reports, strict=True):
            if token in self._hidden:
                continue
            unfinished.append((token, report))
            text += detokenizer.push(token)
            if not detokenizer.pending:
                settled += unfinished
                unfinished.clear()
        if not (text or settled):
            return ()
        tokens = tuple([token for token, _ in settled])
        return (TextDelta(text, tokens, tuple([r for _, r in settled if r is not None]), self._stream),)

    def finish(self, done: Done | None) -> Iterable[Delta]:
        if self.finished is not None:
            return ()
        self._place_unfinished()
        pieces = self._advance(self._text.finish())
        if self.finished is None:
            pieces += self._channels.finish()
        return self._deltas(pieces)

    def _place_unfinished(self) -> None:
        for token, report in self._unfinished:
            self._waiting.append((self._decoded, token, report))
        self._unfinished.clear()

    def _advance(self, piece: str) -> list[Piece]:
        self._decoded += len(piece)
        pieces = self._channels.push(piece)
        self.finished = self._channels.finished
        return pieces

    def _deltas(self, pieces: Sequence[Piece]) -> list[Delta]:
        """One delta for neighbours of one kind. Tokens go with the piece that settles their text."""
        deltas: list[Delta] = []
        begin = 0
        while begin < len(pieces):
            first, end = pieces[begin], begin + 1
            while end < len(pieces) and pieces[end].kind == first.kind and pieces[end].call == first.call:
                end += 1
            same, begin = pieces[begin:end], end
            self._released = same[-1].end
            tokens, reports = self._settled()
            text = first.text if len(same) == 1 else "".join([piece.text for piece in same])
            if first.kind == "call":
                name = next((piece.name for piece in same if piece.name), "")
                if text or name or tokens:
                    deltas.append(ToolCallDelta(first.call, name, text, tokens, self._stream))
            elif text or tokens:
                kind = TextDelta if first.kind == "text" else ReasoningDelta
                deltas.append(kind(text, tokens, reports, self._stream))
        return deltas

    def _settled(self) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """The waiting tokens whose text is out, and their reports."""
        waiting, taken = self._waiting, []
        if self.finished is None and self._decoded <= self._released:  # nothing is held back
            taken = list(waiting)
            waiting.clear()
        else:
            while waiting and self._complete():
                taken.append(waiting.popleft())
        tokens = tuple([token for _, token, _ in taken])
        return tokens, tuple([report for _, _, report in taken if report is not None])

    def _complete(self) -> bool:
        """Whether the first waiting token's text is out: all of it, or at a stop string any of it."""
        begin = self._waiting[0][0]
        if self.finished is not None:
            return begin < self._released
        following = next((b for b, _, _ in self._waiting if b > begin), self._decoded)
        return following <= self._released

"""A model's text, told apart as it comes: what it thinks, what it says, which tools it calls.

The result does not depend on how the text is cut into pieces, and no more is held back than could still become a tag or
a stop string. Stop strings are looked for in what the model says, nowhere else: a client means the text that it is
shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mstar.processing.stops import StopStrings, could_begin
from mstar.processing.tool_calls import CallParser, ToolFormat

__all__ = ["Channels", "Piece", "ReasoningTags"]

Kind = Literal["text", "reasoning", "call"]


@dataclass(frozen=True)
class ReasoningTags:
    """What stands around a model's thoughts. :meth:`of` finds them in a chat template."""

    begin: str = "<think>"
    end: str = "</think>"

    @classmethod
    def of(cls, template: str) -> ReasoningTags | None:
        tags = cls()
        return tags if tags.end in template else None

    def open_in(self, prompt: str) -> bool:
        """Whether *prompt* leaves the model in the middle of a thought."""
        return prompt.rstrip().endswith(self.begin)


@dataclass(slots=True)
class Piece:
    """Text of one kind; *end*: how many characters of the whole are settled with it, tags included.

    :param call: of a call, which one; then *text* is of its arguments, and *name* comes with its first piece.
    """

    kind: Kind
    text: str
    end: int
    call: int = 0
    name: str = ""


class Channels:
    """Splits one answer.

    :param stops: for the text. :param reasoning: the tags around thoughts, if the model has any.
    :param thinking: the answer begins inside of a thought. :param tools: how calls are written, if there may be any.
    :param single: the answer ends with its first call.
    :ivar finished: the answer is complete before the model knows: a stop string, or the only call.
    """

    def __init__(
        self,
        stops: StopStrings,
        reasoning: ReasoningTags | None = None,
        thinking: bool = False,
        tools: ToolFormat | None = None,
        single: bool = False,
    ):
        self._stops, self._reasoning, self._tools, self._single = stops, reasoning, tools, single
        self._thinking = thinking
        self._parser: CallParser | None = None
        self._calls = 0
        self._buffer, self._at = "", 0  # what is not told apart yet, and where in the whole it begins
        self._raw = ""  # of the call that is being parsed
        self._trim = thinking  # line breaks beside tags are part of the tags
        self._said = False
        self.finished: str | None = None

    @property
    def free(self) -> bool:
        """Whether all is text, and goes out as it comes."""
        return self._reasoning is None and self._tools is None and self._stops.none

    def push(self, piece: str) -> list[Piece]:
        """What *piece* settles."""
        if self._reasoning is None and self._tools is None:
            self._at += len(piece)
            return [self._say(piece)]
        self._buffer += piece
        return list(self._drain(final=False))

    def finish(self) -> list[Piece]:
        """What was held back when the text ended."""
        found = list(self._drain(final=True))
        if self.finished is None:
            held = self._stops.finish()
            found.append(Piece("text", held, self._at))
        return found

    def _drain(self, final: bool) -> Iterator[Piece]:
        while self._buffer and self.finished is None:
            if self._trim and self._parser is None and not self._trimmed():
                return
            before = len(self._buffer)
            if self._parser is not None:
                yield from self._parse()
            elif self._thinking:
                yield from self._think(final)
            else:
                yield from self._speak(final)
            if len(self._buffer) == before:
                break
        if final and self._parser is not None:
            yield from self._give_up()

    def _trimmed(self) -> bool:
        """Take line breaks away; whether anything else has come."""
        rest = self._buffer.lstrip("\n")
        self._take(len(self._buffer) - len(rest))
        self._trim = not rest
        return bool(rest)

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        self._at += count
        return taken

    def _think(self, final: bool) -> Iterator[Piece]:
        assert self._reasoning is not None
        end = self._reasoning.end
        found = self._buffer.find(end)
        if found < 0:
            text = self._take(len(self._buffer) - (0 if final else could_begin(self._buffer, (end,))))
            if text:
                yield Piece("reasoning", text, self._at)
            return
        text = self._take(found)
        self._take(len(end))
        yield Piece("reasoning", text, self._at)
        self._thinking, self._trim = False, True

    def _speak(self, final: bool) -> Iterator[Piece]:
        tags = [self._tools.begin] if self._tools is not None else []
        if self._reasoning is not None and not self._said:
            tags.append(self._reasoning.begin)
        places = [(place, tag) for tag in tags if (place := self._buffer.find(tag)) >= 0]
        if self._reasoning is not None:  # a thought comes before anything is said, else its tag is text
            places = [(p, t) for p, t in places if t != self._reasoning.begin or not self._buffer[:p].strip()]
        if not places:
            held = 0 if final else could_begin(self._buffer, tags)
            if text := self._take(len(self._buffer) - held):
                yield self._say(text)
            return
        place, tag = min(places)
        if text := self._take(place):
            yield self._say(text)
            if self.finished is not None:
                return
        # a stop string cannot go on across a tag
        yield Piece("text", self._stops.finish(), self._at)
        self._take(len(tag))
        if self._reasoning is not None and tag == self._reasoning.begin:
            self._thinking = self._trim = True
            yield Piece("reasoning", "", self._at)
        else:
            assert self._tools is not None
            self._parser, self._raw = self._tools.parser(), tag
            yield Piece("call", "", self._at, self._calls)

    def _say(self, text: str) -> Piece:
        """*text*, which has been taken already, to the client as far as no stop string begins in it."""
        self._said = self._said or bool(text.strip())
        held = self._stops.held
        shown, stopped = self._stops.push(text)
        if stopped:
            self.finished = "stop"
            self._buffer = ""
            return Piece("text", shown, self._at - len(text) - held + len(shown))
        return Piece("text", shown, self._at - self._stops.held)

    def _parse(self) -> Iterator[Piece]:
        assert self._parser is not None
        used, parts = self._parser.push(self._buffer)
        self._raw += self._take(used)
        for name, arguments in parts:
            yield Piece("call", arguments, self._at, self._calls, name)
        if self._parser.done:
            if not self._parser.begun:  # an end without a call that could be read: the client shall see it
                yield self._say(self._raw)
            else:
                yield Piece("call", "", self._at, self._calls)
                self._calls += 1
                if self._single:
                    self.finished, self._buffer = "stop", ""
            self._parser, self._trim = None, True

    def _give_up(self) -> Iterator[Piece]:
        """The text ended in the middle of a call: what of it could be read has gone out."""
        assert self._parser is not None
        rest = self._take(len(self._buffer))
        if not self._parser.begun:
            yield self._say(self._raw + rest)
        self._parser = None

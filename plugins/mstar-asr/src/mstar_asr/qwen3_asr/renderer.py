"""From Qwen3-ASR's tokens to a transcript: of a whole clip as it is written, of a live one as it becomes certain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mstar.processing.text import Detokenizer
from mstar.processing.tokenizer import TextTokenizer
from mstar.spec.processor import Delta, Renderer, SegmentDelta, TextDelta
from mstar.spec.request import Done, Emit, SamplingParams, TokenLogprob
from mstar_asr.qwen3_asr.live import Rounds
from mstar_asr.qwen3_asr.transcript import TranscriptReader

__all__ = ["LiveRenderer", "WholeRenderer"]


class _Renderer(Renderer):
    """:param language: code of the language that the prompt names. :param seconds: of the clip."""

    def __init__(self, tokenizer: TextTokenizer, sampling: SamplingParams, language: str | None, seconds: float):
        self._reader = TranscriptReader(forced=language is not None)
        self._stops, self._most = frozenset(sampling.stop_token_ids), sampling.max_tokens
        self._language, self._seconds = language, seconds
        self._told: list[str] = []

    def _tell(self, text: str) -> str:
        self._told.append(text)
        return text

    def _segment(self, tokens: tuple[int, ...] = (), avg_logprob: float = 0.0) -> Iterable[SegmentDelta]:
        """All that was said, if anything was: the model knows no times."""
        text, language = "".join(self._told), self._language or self._reader.language
        if text:
            yield SegmentDelta(0.0, self._seconds, text, language=language, tokens=tokens, avg_logprob=avg_logprob)


class WholeRenderer(_Renderer):
    """One answer to one clip. Its tokens and their log-probabilities go out with the text that they come before."""

    def __init__(self, tokenizer: TextTokenizer, sampling: SamplingParams, language: str | None, seconds: float):
        super().__init__(tokenizer, sampling, language, seconds)
        self._text = Detokenizer(tokenizer.decode)
        self._tokens: list[int] = []
        self._waiting: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._sum = 0.0

    def feed(self, event: Emit) -> Iterable[Delta]:
        if event.stream != "text":
            return
        said = ""
        reports: Sequence[TokenLogprob | None] = event.logprobs or [None] * len(event.data)
        for token, report in zip(event.data, reports, strict=True):
            if token in self._stops:
                continue
            before = self._reader.in_text
            self._keep(token, report)
            said += self._reader.feed(self._text.push(token))
            if self._reader.in_text and not before:  # up to here it was about the text
                self._forget()
        if said:
            yield self._delta(said)

    def finish(self, done: Done | None) -> Iterable[Delta]:
        said = self._reader.feed(self._text.finish()) + self._reader.finish()
        if said or self._waiting:
            yield self._delta(said)
        mean = self._sum / len(self._tokens) if self._tokens else 0.0
        yield from self._segment(tuple(self._tokens), mean)

    def _keep(self, token: int, report: TokenLogprob | None) -> None:
        self._tokens.append(token)
        self._waiting.append(token)
        if report is not None:
            self._logprobs.append(report)
            self._sum += report.logprob

    def _forget(self) -> None:
        self._tokens, self._waiting, self._logprobs, self._sum = [], [], [], 0.0

    def _delta(self, text: str) -> TextDelta:
        tokens, self._waiting = tuple(self._waiting), []
        logprobs, self._logprobs = tuple(self._logprobs), []
        return TextDelta(self._tell(text), tokens, logprobs)


class LiveRenderer(_Renderer):
    """Many answers to one clip that grows. What all further ones will begin with is told; the rest of the last one when
    there is no more to hear."""

    def __init__(self, tokenizer: TextTokenizer, sampling: SamplingParams, language: str | None, seconds: float):
        super().__init__(tokenizer, sampling, language, seconds)
        self._rounds = Rounds(tokenizer)
        self._round: list[int] = []
        self._count = 0  # tokens of this round, the one that ends it included
        self._read = 0  # characters of the answer
        self._heard: Mapping[str, int] = {}

    def feed(self, event: Emit) -> Iterable[Delta]:
        if event.stream != "text":
            return
        self._heard = event.heard or self._heard
        for token in event.data:
            self._count += 1
            ended = token in self._stops
            if not ended:
                self._round.append(token)
            if ended or self._count >= self._most:
                yield from self._end_round()

    def _end_round(self) -> Iterable[Delta]:
        self._rounds.heard(self._round)
        self._round, self._count = [], 0
        said = self._reader.feed(self._rounds.begins[self._read :])
        self._read = len(self._rounds.begins)
        if said:
            yield TextDelta(self._tell(said))

    def finish(self, done: Done | None) -> Iterable[Delta]:
        said = self._reader.feed(self._rounds.answer[self._read :]) + self._reader.finish()
        if said:
            yield TextDelta(self._tell(said))
        self._seconds = self._heard.get("audio", 0) / 16_000
        yield from self._segment()

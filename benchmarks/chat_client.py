"""The client of the chat benchmark: many streams of one server at once, and what their times say.

It takes the bytes of each answer as they come and looks at the clock once per arrival. Tokens are those of the usage
that the server states, never the number of events: a server may put several tokens into one event, or none.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from common import percentiles

__all__ = ["Answer", "AnswerError", "Events", "Level", "ask", "run_level", "steady_decode", "summary"]

STEADY_STEPS = 8
"""Shortest stretch, in steps, that counts as steady decode: its ends are known to about one step."""


class AnswerError(Exception):
    """A server gave no complete answer; the message says what it gave instead."""


@dataclass(slots=True)
class Answer:
    """One streamed answer. Times are ``time.perf_counter()`` seconds.

    :param arrivals: when text arrived, one time for all events that came together.
    """

    started: float
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""


@dataclass(frozen=True)
class Level:
    """All answers of one level of concurrency.

    :param seconds: from the first request to the last answer's end.
    :param client_cpu: processor seconds that this process took meanwhile.
    """

    streams: int
    answers: Sequence[Answer]
    seconds: float
    client_cpu: float


class Events:
    """Splits a stream of bytes into the data of its server-sent events (WHATWG HTML, "Server-sent events").

    Only ``data`` fields are kept, comments and other fields are skipped; lines end with LF or CRLF.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, block: bytes) -> list[bytes]:
        """The events that *block* completes."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data.clear()
        return found


async def ask(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Answer:
    """Send one chat request and read its stream to the end.

    :raises AnswerError: another status than 200, an error event, no text, or no usage.
    """
    answer = Answer(time.perf_counter())
    events = Events()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise AnswerError(f"status {response.status_code}: {text[:500]}")
        async for block in response.aiter_raw():
            now = time.perf_counter()
            carried_text = [_take(answer, event) for event in events.feed(block)]
            if any(carried_text):
                answer.arrivals.append(now)
    if not answer.completion_tokens:
        raise AnswerError("the stream ended without the number of its tokens (usage)")
    if not answer.arrivals:
        raise AnswerError(f"no text in an answer of {answer.completion_tokens} tokens")
    return answer


def _take(answer: Answer, event: bytes) -> bool:
    """Note what *event* says; whether it carries text."""
    if event == b"[DONE]":
        return False
    try:
        chunk = json.loads(event)
        if "error" not in chunk:
            return _take_chunk(answer, chunk)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise AnswerError(f"not a chunk of a chat completion: {event[:200]!r}") from None
    error = chunk["error"]
    raise AnswerError(str(error.get("message", error) if isinstance(error, dict) else error))


def _take_chunk(answer: Answer, chunk: Mapping[str, Any]) -> bool:
    if usage := chunk.get("usage"):
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    text = False
    for choice in chunk["choices"]:
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        text = text or bool(choice["delta"].get("content"))
    return text


async def run_level(
    url: str,
    bodies: Sequence[Mapping[str, Any]],
    streams: int,
    timeout: float,
    done: Callable[[Answer], None] | None = None,
) -> Level:
    """Send *bodies* in order, *streams* at a time: as one answer ends, its stream sends the next request.

    :param timeout: seconds for all of them. :param done: called with each complete answer.
    :raises AnswerError, TimeoutError, httpx.HTTPError: the first thing that went wrong; the other streams are closed.
    """
    answers: list[Answer] = []
    waiting = iter(bodies)

    async def stream(client: httpx.AsyncClient) -> None:
        for body in waiting:
            answer = await ask(client, body)
            answers.append(answer)
            if done is not None:
                done(answer)

    limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None, trust_env=False) as client:
        began, cpu = time.perf_counter(), time.process_time()
        try:
            async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
                for _ in range(streams):
                    group.create_task(stream(client))
        except TimeoutError:
            raise TimeoutError(f"{len(answers)} of {len(bodies)} answers after {timeout:.0f} s") from None
        except ExceptionGroup as failures:
            raise _first(failures) from None
        return Level(streams, answers, time.perf_counter() - began, time.process_time() - cpu)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def summary(level: Level) -> dict[str, Any]:
    """Figures of a level, times in seconds.

    ``ttft``: from sending a request to its first text. ``inter_token``: between arrivals of text in one answer.
    ``decode_tokens_per_s``: see :func:`steady_decode`; ``None`` where there was no such stretch.
    """
    answers = level.answers
    tokens = sum(answer.completion_tokens for answer in answers)
    gaps = [b - a for answer in answers for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
    decoded, seconds = steady_decode(answers, level.streams)
    return {
        "streams": level.streams,
        "answers": len(answers),
        "seconds": level.seconds,
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "completion_tokens": tokens,
        "finish_reasons": _counts(answer.finish_reason for answer in answers),
        "tokens_per_s": tokens / level.seconds,
        "ttft": percentiles(answer.arrivals[0] - answer.started for answer in answers),
        "inter_token": percentiles(gaps) if gaps else None,
        "tokens_per_arrival": tokens / sum(len(answer.arrivals) for answer in answers),
        "decode_tokens_per_s": decoded / seconds if seconds else None,
        "decode_seconds": seconds,
        "client_cpu_share": level.client_cpu / level.seconds,
    }


def steady_decode(answers: Sequence[Answer], streams: int) -> tuple[float, float]:
    """``(tokens, seconds)`` of the stretches in which all *streams* were in the middle of an answer.

    Then no request waits and no prompt is being read: what arrives is decode at exactly that batch, comparable with a
    floor. Each arrival counts with its answer's tokens per arrival, the first left out.
    """
    edges = sorted([(a.arrivals[0], 1) for a in answers] + [(a.arrivals[-1], -1) for a in answers])
    tokens = seconds = 0.0
    running, opened = 0, 0.0
    for now, change in edges:
        if running == streams:  # a stretch ends here
            found, arrivals = _arrived(answers, opened, now)
            if arrivals >= STEADY_STEPS * streams:
                tokens, seconds = tokens + found, seconds + now - opened
        running, opened = running + change, now
    return tokens, seconds


def _arrived(answers: Sequence[Answer], after: float, until: float) -> tuple[float, int]:
    """Tokens and arrivals in the stretch ``(after, until]``."""
    tokens, arrivals = 0.0, 0
    for answer in answers:
        times = answer.arrivals
        inside = bisect_right(times, until) - bisect_right(times, after)
        if inside:
            tokens += inside * (answer.completion_tokens - 1) / max(1, len(times) - 1)
            arrivals += inside
    return tokens, arrivals


def _counts(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts

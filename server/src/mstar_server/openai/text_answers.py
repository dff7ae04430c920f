"""Running the answers of a request for text, on every route that has some: whole, or as a stream of chunks."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from mstar import __version__
from mstar.spec.errors import RequestError
from mstar.spec.model import ModelSpec
from mstar.spec.processor import AudioDelta, Delta, Processor, TextDelta
from mstar.spec.tasks import Task
from mstar_server.answers import Merged, begin, cancel, start
from mstar_server.errors import as_request_error, error_event
from mstar_server.protocols import Answer, Service
from mstar_server.sse import DONE, EventStream, data_event
from mstar_server.state import ServerState

__all__ = [
    "Chunks",
    "Head",
    "check_room",
    "collect",
    "finish_reason",
    "read",
    "respond",
    "stream",
    "token_bytes_of",
    "usage_object",
]

T = TypeVar("T")

_FINISH = {"stop": "stop", "length": "length", "done": "stop", "end_of_input": "stop"}

Whole = Callable[["Head", Sequence[Answer], Sequence[Sequence[Delta]]], bytes]
"""Encodes a whole answer: (head, answers, the deltas of each)."""


@dataclass(frozen=True)
class Head:
    """What all chunks of an answer, and the answer itself, have in common."""

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def of(cls, service: Service, prefix: str) -> Head:
        """A new one, whose id begins with *prefix*."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), service.spec.key, fingerprint(service.spec))


def fingerprint(spec: ModelSpec) -> str:
    """Changes when what could change an answer changes: the software's version, the model, its weights' revision."""
    facts = (__version__, spec.key, *((ref.id, ref.revision) for ref in spec.weights))
    return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:10]


class Chunks(Protocol):
    """Encodes the chunks of one stream, as server-sent events.

    :ivar heavy: encoding a delta takes long enough to need a thread.
    """

    keepalive: bytes
    heavy: bool

    def begin(self, index: int) -> bytes:
        """What a choice opens with; may be empty."""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Empty for a delta that this route has no words for."""

    def finish(self, index: int, answer: Answer) -> bytes: ...

    def usage(self, answers: Sequence[Answer]) -> bytes:
        """Empty when the client did not ask for usage."""


async def respond(
    request: Request,
    service: Service,
    tasks: Sequence[Task],
    head: Head,
    *,
    samples: int,
    whole: Whole,
    chunks: Chunks | None,
    samples_param: str = "n",
) -> Response:
    """The response to *request*: *tasks* started, and their answers whole or, with *chunks*, as a stream.

    :param samples: so many tasks in a row are samples of one prompt. :param samples_param: the field that asked for so
        many tasks.
    """
    state: ServerState = request.app.state.mstar
    check_room(service, len(tasks), samples_param)
    if chunks is None:
        return await _whole(service, tasks, head, samples, whole)
    merged = await begin(service, tasks, head.id, state.options.keepalive_s, samples)
    return EventStream(stream(merged, chunks, state.options.keepalive_s), "text/event-stream", merged.close)


def check_room(service: Service, answers: int, param: str) -> None:
    """More answers than the model can ever hold at once would be "too busy" for ever."""
    limits = service.limits
    most = limits.get("max_concurrent_requests", answers) + limits.get("max_queue", 0)
    if answers > most:
        raise RequestError(
            f"{param!r} asks for {answers} answers; this server takes at most {most} at once", param=param
        )


async def _whole(service: Service, tasks: Sequence[Task], head: Head, samples: int, whole: Whole) -> Response:
    answers, deltas = await collect(service, tasks, head.id, samples)
    encode = partial(whole, head, answers, deltas)
    heard = any(isinstance(delta, AudioDelta) for said in deltas for delta in said)
    return Response(await asyncio.to_thread(encode) if heard else encode(), media_type="application/json")


async def collect(
    service: Service, tasks: Sequence[Task], request_id: str, samples: int = 1
) -> tuple[list[Answer], list[list[Delta]]]:
    """Run *tasks* to their ends. The first that fails cancels the others and is raised."""
    return await read(service, tasks, request_id, _collect, samples)


async def read(
    service: Service,
    tasks: Sequence[Task],
    request_id: str,
    reader: Callable[[Answer], Coroutine[Any, Any, T]],
    samples: int = 1,
) -> tuple[list[Answer], list[T]]:
    """Likewise, with what *reader* makes of each answer while it comes."""
    answers = await start(service, tasks, request_id, samples)
    try:
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(reader(answer)) for answer in answers]
    except* Exception as errors:
        raise _first(errors) from None
    finally:
        cancel(answers)
    return answers, [reader.result() for reader in readers]


async def _collect(answer: Answer) -> list[Delta]:
    return [delta async for delta in answer]


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def stream(merged: Merged, chunks: Chunks, keepalive_s: float) -> AsyncGenerator[bytes, None]:
    """The events of *merged*; a chunk without content after each silence of *keepalive_s*."""
    try:
        opening = b"".join(chunks.begin(index) for index in range(len(merged.answers)))
        if opening:
            yield opening
        while not merged.done:
            batch = await merged.next_batch(keepalive_s)
            encode = partial(_encode, chunks, batch, merged.answers)
            data = await asyncio.to_thread(encode) if chunks.heavy else encode()
            if merged.done:
                data += chunks.usage(merged.answers) + DONE
            if data:
                yield data
    except Exception as error:  # the status line is out: the error becomes the stream's last event
        yield data_event(error_event(as_request_error(error)))


def _encode(chunks: Chunks, batch: Sequence[tuple[int, Delta | None]], answers: Sequence[Answer]) -> bytes:
    if not batch:
        return chunks.keepalive
    return b"".join([chunks.finish(i, answers[i]) if delta is None else chunks.delta(i, delta) for i, delta in batch])


def finish_reason(reason: str | None) -> str:
    """The engine's finish reason in OpenAI's words; a model's own word is passed on."""
    return "stop" if reason is None else _FINISH.get(reason, reason)


def usage_object(answers: Sequence[Answer], samples: int | None = None, reasoning: int = 0) -> dict[str, Any]:
    """Tokens of all answers, *reasoning* of them thoughts. A prompt that *samples* answers (default: all) share counts
    once."""
    leaders = answers[:: samples or len(answers)]
    prompt = sum(answer.prompt_tokens for answer in leaders)
    completion = sum(answer.completion_tokens for answer in answers)
    cached = sum(answer.usage.cached for answer in leaders if answer.usage is not None)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def token_bytes_of(processor: Processor) -> Callable[[int], bytes]:
    """How *processor* spells a token: processors that report log-probabilities have ``token_bytes(id) -> bytes``."""
    found: Callable[[int], bytes] | None = getattr(processor, "token_bytes", None)
    if found is None:
        message = "'logprobs' is not supported by this model"
        raise RequestError(message, param="logprobs", code="unsupported_parameter")
    return found


def texts(deltas: Sequence[Delta]) -> list[TextDelta]:
    """Those of *deltas* that are text."""
    return [delta for delta in deltas if isinstance(delta, TextDelta)]

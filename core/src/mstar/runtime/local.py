"""The offline API: a model in this process, to call from Python.

::

    with mstar.load("smollm2") as model:
        print(model.chat("What is the capital of France?", max_tokens=20))
        for text in model.chat("Tell me a story.", stream=True):
            print(text, end="")

A background thread runs the event loop, so that the plain methods work anywhere, a notebook included; ``achat`` and
``agenerate`` are their twins for code that has a loop of its own. It is the engine that serves over HTTP, with the same
batching: calls from several threads or tasks share steps.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import inspect
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from mstar.cluster.base import Phase
from mstar.runtime.answer import Answer
from mstar.runtime.result import Result
from mstar.runtime.service import Service, open_service
from mstar.runtime.telling import tell_phases
from mstar.spec.errors import RequestError, nearest
from mstar.spec.knobs import validate_knobs
from mstar.spec.model import ModelSpec
from mstar.spec.processor import Delta, TextDelta
from mstar.spec.tasks import ChatTask, GenerateTask, Message, Part, Task, Text

if TYPE_CHECKING:
    from mstar.registry import Registry
    from mstar.settings import Settings

__all__ = ["Local", "Stream", "load"]

TELL_S = 5.0
"""How often a start says what it waits for."""
_log = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K", bound=Task)

Messages = str | Sequence[Message | Mapping[str, Any]]
"""A user's text, or a conversation: :class:`~mstar.spec.tasks.Message` objects, or mappings with their fields
(``{"role": …, "content": text}``)."""


def load(
    key: str,
    *,
    weights: str | None = None,
    config: str | Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    executor: str | None = None,
    settings: Settings | None = None,
    registry: Registry | None = None,
    **deployment: Any,
) -> Local:
    """Load model *key* and return it when it is ready.

    :param weights: a folder in the published layout, or ``HUB_ID[@REVISION]``. :param config: a deployment file.
    :param device: ``cpu``, ``cuda`` or ``cuda:N``. :param dtype: ``float32``, ``bfloat16`` or ``float16``.
    :param executor: ``inline`` (a thread of this process), ``processes`` or ``ray``. Default: what *config* says, else
        ``inline``, or ``processes`` for a layout of several ranks.
    :param settings: default: from the environment. :param registry: default: of the installed plugins.
    :param deployment: further fields of :class:`~mstar.spec.deployment.Deployment` (``engine={"threads": 2}``).
    :raises SetupError: the model cannot be loaded; the message says what to do.
    """
    from mstar.plugins import load_plugins
    from mstar.registry import Registry
    from mstar.settings import Settings

    settings = settings or Settings.from_env(os.environ)
    registry = registry or Registry(load_plugins(settings))
    flags = {"weights": weights, "device": device, "dtype": dtype, "executor": executor, **deployment}
    return Local(open_service(key, settings, flags, registry, config=config, inline=True))


class Stream:
    """One request's deltas, as they come. Leaving it early, by :meth:`close` or the end of a ``with``, cancels the
    request."""

    def __init__(self, model: Local, answer: Answer):
        self._model, self._answer = model, answer

    def __iter__(self) -> Iterator[Delta]:
        return self._model._read(self._answer)

    def result(self, deltas: Sequence[Delta]) -> Result:
        """The whole of *deltas*, which are all that came; only after the end."""
        return _result(deltas, self._answer)

    def close(self) -> None:
        if not self._model._closed:
            self._model._run(self._answer.aclose())

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Local:
    """A loaded model. Close it (or use it in a ``with``) to free its memory; the interpreter's end closes it too.

    Methods may be called from any thread. Knobs are the model's request parameters (``temperature``, ``max_tokens``…);
    a wrong one raises :class:`~mstar.spec.errors.RequestError`.
    """

    def __init__(self, service: Service):
        self._service = service
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"mstar-{service.spec.key}", daemon=True)
        self._thread.start()
        self._closing = threading.Lock()
        self._closed = False
        _open.add(self)
        try:
            self._run(_started(service))
        except BaseException:
            self.close()
            raise

    @property
    def spec(self) -> ModelSpec:
        return self._service.spec

    @property
    def phase(self) -> Phase:
        return self._service.phase

    def status(self) -> Mapping[str, Any]:
        """The worker's pools, queue and steps, as plain data."""
        return self._run(self._service.status())

    def close(self) -> None:
        """Free everything. Calls that still run raise :class:`~mstar.spec.errors.NotReady`."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._service.join()
            _open.discard(self)

    async def _shut_down(self) -> None:
        await self._service.stop()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:  # calls that have just been failed: let them tell their callers
            await asyncio.wait(others, timeout=1.0)

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- chat --------------------------------------------------------------------------------------------------------

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = False, **knobs: Any) -> str: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **knobs: Any) -> Iterator[str]: ...
    def chat(self, messages: Messages, *, stream: bool = False, **knobs: Any) -> str | Iterator[str]:
        """The model's answer to *messages*: its text, or with *stream* an iterator of pieces of it.

        *knobs* may also name fields of :class:`~mstar.spec.tasks.ChatTask` (``stop``, ``logit_bias``, ``tools``…).
        """
        task = self._chat_task(messages, knobs)
        if stream:
            return _texts(self._stream(task))
        return self._run(self._collect(task)).text

    async def achat(self, messages: Messages, *, stream: bool = False, **knobs: Any) -> str | AsyncIterator[str]:
        """:meth:`chat` for a running event loop; with *stream*, ``async for text in await model.achat(…)``."""
        task = self._chat_task(messages, knobs)
        if stream:
            return _atexts(self._astream(task))
        return (await self._arun(self._collect(task))).text

    def _chat_task(self, messages: Messages, knobs: dict[str, Any]) -> ChatTask:
        if "chat" not in self.spec.abilities:
            able = ", ".join(self.spec.abilities)
            raise RequestError(f"the model {self.spec.key!r} cannot chat; it has {able}", code="unsupported_task")
        turns = [Message("user", (Text(messages),))] if isinstance(messages, str) else [_message(m) for m in messages]
        return self._task(ChatTask, {"messages": tuple(turns)}, knobs)

    # --- everything else ---------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, text: str = "", parts: Sequence[Part] = (), *, stream: Literal[False] = False, **knobs: Any
    ) -> Result: ...
    @overload
    def generate(
        self, text: str = "", parts: Sequence[Part] = (), *, stream: Literal[True], **knobs: Any
    ) -> Iterator[Delta]: ...
    def generate(
        self, text: str = "", parts: Sequence[Part] = (), *, stream: bool = False, **knobs: Any
    ) -> Result | Iterator[Delta]:
        """Run the model's native request on *text* and media *parts*; with *stream* an iterator of deltas.

        *knobs* may also name fields of :class:`~mstar.spec.tasks.GenerateTask` (``want``, ``session``, ``stop``…).
        """
        task = self._generate_task(text, parts, knobs)
        return self._stream(task) if stream else self._run(self._collect(task))

    async def agenerate(
        self, text: str = "", parts: Sequence[Part] = (), *, stream: bool = False, **knobs: Any
    ) -> Result | AsyncIterator[Delta]:
        """:meth:`generate` for a running event loop; with *stream*, ``async for delta in await model.agenerate(…)``."""
        task = self._generate_task(text, parts, knobs)
        return self._astream(task) if stream else await self._arun(self._collect(task))

    def _generate_task(self, text: str, parts: Sequence[Part], knobs: dict[str, Any]) -> GenerateTask:
        return self._task(GenerateTask, {"text": text, "parts": tuple(parts)}, knobs)

    def start(self, task: Task) -> Stream:
        """Run any *task*, whose knobs have been validated; its deltas come from what is returned."""
        return Stream(self, self._run(self._service.generate(task)))

    # --- between the caller's thread and the loop's ------------------------------------------------------------------

    def _task(self, kind: Callable[..., K], content: dict[str, Any], options: dict[str, Any]) -> K:
        """A task of *kind*: options that are its fields go there, the others are knobs."""
        own = set(inspect.signature(kind).parameters) - {"knobs"}
        fields = {name: value for name, value in options.items() if name in own}
        knobs = {name: value for name, value in options.items() if name not in own}
        return kind(**content, **fields, knobs=validate_knobs(self.spec.knobs, knobs))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of *work*, run on the background loop."""
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt in the caller's thread ends the request too
            raise

    async def _arun(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._submit(work))

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise RequestError(f"the model {self.spec.key!r} has been closed", code="closed", status=503)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _collect(self, task: Task) -> Result:
        """On the background loop: one request from start to end."""
        async with await self._service.generate(task) as answer:
            deltas = [delta async for delta in answer]
            return _result(deltas, answer)

    def _stream(self, task: Task) -> Iterator[Delta]:
        answer = self._run(self._service.generate(task))
        return self._read(answer)

    def _read(self, answer: Answer) -> Iterator[Delta]:
        try:
            while deltas := self._run(answer.take()):
                yield from deltas
        finally:
            if not self._closed:
                self._run(answer.aclose())

    async def _astream(self, task: Task) -> AsyncIterator[Delta]:
        answer = await self._arun(self._service.generate(task))
        try:
            while deltas := await self._arun(answer.take()):
                for delta in deltas:
                    yield delta
        finally:
            if not self._closed:
                await self._arun(answer.aclose())


async def _started(service: Service) -> None:
    telling = asyncio.create_task(tell_phases({service.spec.key: service}, _log, TELL_S))
    try:
        await service.start()
    finally:
        telling.cancel()


def _result(deltas: Sequence[Delta], answer: Answer) -> Result:
    assert answer.finish_reason is not None  # it has ended well
    assert answer.usage is not None
    return Result.of(deltas, answer.finish_reason, answer.usage)


def _message(message: Message | Mapping[str, Any]) -> Message:
    if isinstance(message, Message):
        return message
    known = [f.name for f in dataclasses.fields(Message)]
    for key in message:
        if key not in known:
            raise RequestError(f"a message has no {key!r}{nearest(key, known)}", param="messages")
    if "role" not in message:
        raise RequestError("a message lacks its 'role'", param="messages")
    content = message.get("content") or ()
    parts = (Text(content),) if isinstance(content, str) else tuple(content)
    for part in parts:
        if not isinstance(part, Part):
            raise RequestError(f"content: a text or parts (mstar.spec.tasks), not {part!r:.80}", param="messages")
    return Message(**{**message, "content": parts})


def _texts(deltas: Iterator[Delta]) -> Iterator[str]:
    return (delta.text for delta in deltas if isinstance(delta, TextDelta) and delta.text)


async def _atexts(deltas: AsyncIterator[Delta]) -> AsyncIterator[str]:
    async for delta in deltas:
        if isinstance(delta, TextDelta) and delta.text:
            yield delta.text


_open: set[Local] = set()


@atexit.register
def _close_all() -> None:
    """Worker threads must not outlive the interpreter, nor worker processes their parent."""
    for model in list(_open):
        model.close()

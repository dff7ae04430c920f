"""A service without an engine: it says what a script tells it to, and remembers what was asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pluggy
import pytest
from pydantic import Field

import mstar.hookspecs
import mstar_server.plugin
from mstar.api_keys import add_key
from mstar.cluster.base import Phase
from mstar.spec.canvas import Canvas
from mstar.spec.errors import NotReady
from mstar.spec.knobs import SamplingKnobs
from mstar.spec.model import Licence, ModelSpec
from mstar.spec.processor import ArrayDelta, Delta, TextDelta, Voice
from mstar.spec.request import Usage
from mstar.spec.tasks import SpeechTask, Task, TranscriptionTask
from mstar_server.app import create_app
from mstar_server.options import ServerOptions
from mstar_server.run import bind, serve_async


class TinyKnobs(SamplingKnobs):
    steps: int = Field(4, ge=1, le=50, strict=True, description="A knob of this family only.")


def make_spec(**changes: Any) -> ModelSpec:
    facts: dict[str, Any] = {
        "key": "tiny",
        "family": "tests",
        "summary": "Says what it is told.",
        "weights": (),
        "licence": Licence("Apache-2.0"),
        "model": "nowhere:Model",
        "processor": "nowhere:Processor",
        "knobs": TinyKnobs,
        "abilities": ("chat", "generate"),
        "inputs": ("text", "image", "audio"),
        "outputs": ("text", "audio", "image", "video", "action"),
    }
    return ModelSpec(**(facts | changes))


class Tokens:
    """The part of a processor that the server uses: how a token is spelled, which voices there are, what a long text or
    a long clip is cut into."""

    def voices(self) -> Sequence[Voice]:
        return (Voice("ann"), Voice("bob", "Bob", "en", "male"))

    def knows_voice(self, voice: str) -> bool:
        return voice in ("ann", "bob")

    def pieces(self, task: SpeechTask) -> Sequence[SpeechTask]:
        return [dataclasses.replace(task, text=text) for text in task.text.split("|")]

    def token_bytes(self, token: int) -> bytes:
        return {1: b"Hel", 2: b"lo", 3: "é".encode()[:1]}.get(token, b"?")

    def windows(self, task: TranscriptionTask) -> Sequence[TranscriptionTask]:
        return (task,)


class ScriptedAnswer:
    """Runs a script: deltas are said, errors raised, events waited for, a task follows; ``"echo"`` says every push
    doubled."""

    def __init__(self, answer_id: str, script: Sequence[Any]):
        self.id, self.prompt_tokens, self.completion_tokens = answer_id, 5, 0
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.follow: Task | None = None
        self.cancelled = asyncio.Event()
        self.reason: str | None = None
        self.said, self.failed = 0, False
        self._script = script
        self._pushes: asyncio.Queue[tuple[str, Any, bool]] = asyncio.Queue()
        self._sent: dict[str, int] = {}
        self.heard: dict[str, int] = {}

    def cancel(self, reason: str = "cancelled") -> None:
        self.reason = reason
        self.cancelled.set()

    def close(self) -> None:
        if self.finish_reason is None:
            self.cancel()

    async def push(self, stream: str, part: Any, end: bool = False) -> range:
        await self._pushes.put((stream, part, end))
        first = self._sent.get(stream, 0)
        self._sent[stream] = first + (len(part) if isinstance(part, np.ndarray) else int(part is not None))
        return range(first, self._sent[stream])

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for item in self._script:
            if isinstance(item, Exception):
                self.failed = True
                raise item
            if isinstance(item, asyncio.Event):
                await self._or_cancelled(item.wait())
            elif item == "echo":
                async for delta in self._echo():
                    yield delta
            elif isinstance(item, Task):
                self.follow = item
            else:
                self.completion_tokens += len(getattr(item, "tokens", ()))
                self.said += 1
                yield item
            if self.cancelled.is_set():
                break
        self.usage = Usage(input={"text": 5}, output={"text": self.completion_tokens}, cached=2)
        self.finish_reason = self.reason or "stop"

    async def _echo(self) -> AsyncIterator[Delta]:
        while not self.cancelled.is_set():
            pushed = await self._or_cancelled(self._pushes.get())
            if pushed is None or pushed[2]:
                return
            data = pushed[1] * 2 if isinstance(pushed[1], np.ndarray) else np.asarray([len(pushed[1].text)])
            items = len(pushed[1]) if isinstance(pushed[1], np.ndarray) else 1
            self.heard = {**self.heard, pushed[0]: self.heard.get(pushed[0], 0) + items}
            yield ArrayDelta(data, stream=pushed[0])

    async def _or_cancelled(self, wait: Any) -> Any:
        tasks = [asyncio.ensure_future(wait), asyncio.ensure_future(self.cancelled.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class ScriptedHold:
    def __init__(self, service: ScriptedService):
        self.service = service

    async def generate(
        self, task: Task, request_id: str | None = None, sibling_of: str | None = None
    ) -> ScriptedAnswer:
        if self in self.service.holds and self.service.phase.name == "draining":
            return self.service.answer(task, request_id, sibling_of)
        return await self.service.generate(task, request_id, sibling_of)

    def close(self) -> None:
        if self in self.service.holds:
            self.service.holds.remove(self)


class ScriptedService:
    """A service whose every request follows *script* (an exception is raised by ``generate`` if *refuse* is set)."""

    def __init__(self, script: Sequence[Any] = (), **spec: Any):
        self.spec, self.processor = make_spec(**spec), Tokens()
        self.phase, self.limits = Phase(name="ready"), {"context": 64}
        self.watcher: Any = None
        self.script: Sequence[Any] | Callable[[int], Sequence[Any]] = script
        self.refuse: Exception | None = None
        self.start_error: Exception | None = None
        self.started = asyncio.Event()
        self.tasks: list[Any] = []
        self.ids: list[tuple[str | None, str | None]] = []
        self.answers: list[ScriptedAnswer] = []
        self.stopped, self.sessions = False, 0
        self.holds: list[ScriptedHold] = []

    @property
    def canvas(self) -> Canvas | None:
        return self.spec.canvas

    @property
    def open_requests(self) -> int:
        return sum(answer.finish_reason is None and not answer.failed for answer in self.answers)

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        if self.phase.name != "ready":
            await self.started.wait()
            self.phase = Phase(name="ready")

    async def stop(self) -> None:
        self.stopped = True
        self.phase = Phase(name="stopped")
        for answer in self.answers:
            answer.cancel()

    async def drain(self, seconds: float) -> bool:
        self.phase = Phase(name="draining")
        try:
            async with asyncio.timeout(seconds):
                while self.holds or any(answer.finish_reason is None for answer in self.answers):
                    await asyncio.sleep(0.005)
        except TimeoutError:
            return False
        return True

    async def status(self) -> dict[str, Any]:
        return {"waiting": 0, "sessions": self.sessions, "pools": {"kv": [0, 8]}}

    async def generate(
        self, task: Task, request_id: str | None = None, sibling_of: str | None = None
    ) -> ScriptedAnswer:
        if self.phase.name != "ready":
            raise NotReady(self.phase.name)
        return self.answer(task, request_id, sibling_of)

    def hold(self) -> ScriptedHold:
        if self.phase.name != "ready":
            raise NotReady(self.phase.name)
        self.holds.append(ScriptedHold(self))
        return self.holds[-1]

    def answer(self, task: Task, request_id: str | None, sibling_of: str | None) -> ScriptedAnswer:
        if self.refuse is not None:
            raise self.refuse
        script = self.script(len(self.answers)) if callable(self.script) else self.script
        answer = ScriptedAnswer(request_id or "none", script)
        self.tasks.append(task)
        self.ids.append((request_id, sibling_of))
        self.answers.append(answer)
        return answer


HELLO = (TextDelta("Hel", (1,)), TextDelta("lo ", (2,)), TextDelta("", (3,)), TextDelta("🙂", (4, 5)))


class Plugins:
    """Real hooks, with the server's own plugin among them, called plugin by plugin as the core's are."""

    def __init__(self, *plugins: Any):
        self.loaded = [SimpleNamespace(name="server", object=mstar_server.plugin)]
        self.loaded += [SimpleNamespace(name=f"plugin{i}", object=plugin) for i, plugin in enumerate(plugins)]
        self.rejected: list[tuple[str, str]] = []
        self._manager = pluggy.PluginManager("mstar")
        self._manager.add_hookspecs(mstar.hookspecs)
        for plugin in self.loaded:
            self._manager.register(plugin.object)
        self._manager.check_pending()

    def call_each(self, hook: str, **arguments: Any) -> list[tuple[Any, Any]]:
        pairs = []
        for plugin in self.loaded:
            others = [other.object for other in self.loaded if other is not plugin]
            pairs += [(plugin, r) for r in self._manager.subset_hook_caller(hook, others)(**arguments)]
        return pairs

    def reject(self, plugin: Any, error: Exception) -> None:
        self.rejected.append((plugin.name, str(error)))
        self.loaded.remove(plugin)


class Hooks:
    """A registry as far as the server needs one."""

    def __init__(self, *plugins: Any):
        self.plugins = Plugins(*plugins)


class Application(httpx.ASGITransport):
    """An application in this process; what its state holds ends with the client."""

    async def aclose(self) -> None:
        await self.app.state.mstar.close()


class Kit:
    """What tests build servers with."""

    Service, Hooks, HELLO, make_spec = ScriptedService, Hooks, HELLO, staticmethod(make_spec)

    def client(
        self, *services: Any, hooks: Hooks | None = None, headers: Any = None, **options: Any
    ) -> httpx.AsyncClient:
        """A client of an in-process application with *services*."""
        app = create_app({s.spec.key: s for s in services}, hooks or Hooks(), ServerOptions(**options))
        return httpx.AsyncClient(transport=Application(app), base_url="http://server", headers=headers)

    @staticmethod
    async def leave(writer: asyncio.StreamWriter) -> None:
        """Close a client's connection for good: one that outlives its loop is some later test's garbage."""
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    @contextlib.asynccontextmanager
    async def server(self, *services: ScriptedService, **options: Any) -> AsyncIterator[str]:
        """A listening server; gives its ``host:port`` and stops it by cancelling."""
        settings = ServerOptions(port=0, **({"drain_s": 0.0} | options))
        listener = bind(settings)
        host, port = listener.getsockname()
        running = asyncio.create_task(serve_async({s.spec.key: s for s in services}, Hooks(), settings, listener))
        try:
            yield f"{host}:{port}"
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def keys(tmp_path: Path) -> Callable[..., tuple[Path, list[str]]]:
    """Makes a file of keys with *names*; *limits* are those of the first."""

    def make(*names: str, **limits: int) -> tuple[Path, list[str]]:
        path = tmp_path / "api_keys.json"
        return path, [add_key(path, name, **(limits if name == names[0] else {}))[1] for name in names]

    return make


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture
def chat() -> Callable[..., dict[str, Any]]:
    """A chat body with changes."""

    def body(**changes: Any) -> dict[str, Any]:
        return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **changes}

    return body

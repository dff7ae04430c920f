"""The client for asynchronous programs: :mod:`mstar.client.sync` with ``await``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import httpx
import numpy as np

from mstar.client.aio_streams import AsyncLive, AsyncStream
from mstar.client.answers import error_of, only, result_of, sound_of, sse_text
from mstar.client.asks import (
    FileLike,
    chat_content,
    generate_content,
    json_content,
    speech_content,
    tts_ask,
    voice_content,
    voice_path,
)
from mstar.client.base import Base
from mstar.client.live import Conversation, Observation
from mstar.runtime.result import Result
from mstar.spec.errors import RequestError
from mstar.spec.processor import AudioDelta, FramesDelta

__all__ = ["AsyncClient"]

T = TypeVar("T")


class AsyncClient(Base):
    """Asks a server; close it, or use it in a ``async with``. Its parameters are those of
    :class:`~mstar.client.base.Base`.

    Every method raises :class:`~mstar.spec.errors.RequestError`, with the server's message, ``status``, ``param`` and
    ``code``, and ``retry_after`` (seconds) where the server gives one.
    """

    def _begin(self) -> None:
        self._http = httpx.AsyncClient(base_url=self.url, headers=self._headers, timeout=self._timeout)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # --- anything ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        text: str = "",
        files: Sequence[FileLike] = (),
        *,
        model: str | None = None,
        want: Sequence[str] = (),
        session: str | None = None,
        stop: Sequence[str] = (),
        **knobs: Any,
    ) -> Result:
        """The whole answer of *model* to *text* and *files*.

        :param files: paths, bytes, pictures (uint8 ``[H, W, 3]``), :class:`~mstar.spec.tasks.Audio`…, in their order.
        :param model: may be left out where the server has one. :param want: output modalities; default: the model's.
        :param session: keep state under this name. :param stop: strings that end a text.
        :param knobs: the model's request parameters (``temperature``, ``max_tokens``…).
        """
        asked = generate_content(model or self.model, text, files, want, session, stop, knobs, streaming=False)
        return result_of(await self._post("/generate", asked))

    async def stream(
        self,
        text: str = "",
        files: Sequence[FileLike] = (),
        *,
        model: str | None = None,
        want: Sequence[str] = (),
        session: str | None = None,
        stop: Sequence[str] = (),
        **knobs: Any,
    ) -> AsyncStream:
        """:meth:`generate` with the answer's deltas as they are made."""
        asked = generate_content(model or self.model, text, files, want, session, stop, knobs, streaming=True)
        return AsyncStream(self.url, await self._open("/generate", asked), self._fault)

    async def open(
        self,
        live: Sequence[str],
        text: str = "",
        files: Sequence[FileLike] = (),
        *,
        model: str | None = None,
        want: Sequence[str] = (),
        session: str | None = None,
        stop: Sequence[str] = (),
        max_in_flight: int | None = None,
        **knobs: Any,
    ) -> AsyncLive:
        """A live request, on a socket of its own, that keeps its input streams *live* open; see :class:`AsyncLive`.

        :param max_in_flight: pushes without an answer at which :meth:`AsyncLive.push` waits, where each has one.
        """
        talk = Conversation(live)
        opening = talk.opening(model or self.model, text, files, want, session, stop, knobs)
        return await self._again(lambda: AsyncLive._connect(self, talk, opening, max_in_flight))

    # --- one kind of answer ------------------------------------------------------------------------------------------

    @overload
    async def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        model: str | None = None,
        stream: Literal[False] = False,
        **knobs: Any,
    ) -> str: ...
    @overload
    async def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        model: str | None = None,
        stream: Literal[True],
        **knobs: Any,
    ) -> AsyncIterator[str]: ...
    async def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        model: str | None = None,
        stream: bool = False,
        **knobs: Any,
    ) -> str | AsyncIterator[str]:
        """The text that a model answers to a user's text or to OpenAI's *messages*; with *stream* in pieces."""
        asked = chat_content(model or self.model or await self._only_model(), messages, stream, knobs)
        if stream:
            return self._chat_pieces(await self._open("/v1/chat/completions", asked))
        answer = await self._post("/v1/chat/completions", asked)
        return str(answer["choices"][0]["message"]["content"] or "")

    async def tts(
        self,
        text: str,
        *,
        voice: str | None = None,
        reference_audio: FileLike | None = None,
        ref_text: str | None = None,
        model: str | None = None,
        **knobs: Any,
    ) -> AudioDelta:
        """*text*, spoken.

        :param voice: one of :meth:`voices`, by id or name, uploaded ones too; needs a model with the ability `speech`.
        :param reference_audio: a clip whose voice is to be used, where the model can. :param ref_text: what is said in
            it, or in an uploaded *voice*.
        """
        if voice is not None:
            speaking = model or self.model or await self._only_model()
            asked = speech_content(speaking, text, voice, reference_audio, ref_text, knobs)
            return sound_of(await self._sound("/v1/audio/speech", asked))
        files, named = tts_ask(reference_audio, ref_text, knobs)
        return only((await self.generate(text, files, model=model, **named)).audio, "audio")

    async def transcribe(self, audio: FileLike, *, model: str | None = None, **knobs: Any) -> str:
        """What is said in *audio*."""
        return (await self.generate("", [audio], model=model, want=["text"], **knobs)).text

    async def image(
        self, prompt: str, images: Sequence[FileLike] = (), *, model: str | None = None, **knobs: Any
    ) -> FramesDelta:
        """A picture of *prompt*, or *images* changed as it says."""
        result = await self.generate(prompt, images, model=model, want=["image"], **knobs)
        return FramesDelta(np.stack(only(result.images or None, "an image")[:1]))

    async def video(
        self, prompt: str, files: Sequence[FileLike] = (), *, model: str | None = None, **knobs: Any
    ) -> FramesDelta:
        """A video of *prompt*, from pictures or a video if given."""
        return only((await self.generate(prompt, files, model=model, want=["video"], **knobs)).video, "a video")

    async def act(
        self,
        observation: Observation,
        text: str = "",
        files: Sequence[FileLike] = (),
        *,
        model: str | None = None,
        **knobs: Any,
    ) -> np.ndarray[Any, Any]:
        """The actions for one *observation* (live stream → items). For a control loop :meth:`open` a live request."""
        async with await self.open(list(observation), text, files, model=model, **knobs) as live:
            await live.push(observation)
            await live.end()
            return np.concatenate(only((await live.result()).arrays or None, "actions"))

    # --- about the server --------------------------------------------------------------------------------------------

    async def models(self) -> list[dict[str, Any]]:
        """The models that the server has: ``id``, ``abilities``, ``modalities``, ``knobs``…"""
        answer = await self._again(lambda: self._exchange("GET", "/v1/models", {}))
        found: list[dict[str, Any]] = answer["data"]
        return found

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        model: str | None = None,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
    ) -> list[int]:
        """The tokens of *prompt* or of a chat."""
        asked: dict[str, Any] = {"model": model or self.model, "prompt": prompt, "messages": messages}
        asked |= {"add_special_tokens": add_special_tokens, "add_generation_prompt": add_generation_prompt}
        answer = await self._post("/tokenize", json_content(asked))
        tokens: list[int] = answer["tokens"]
        return tokens

    async def detokenize(self, tokens: Sequence[int], *, model: str | None = None) -> str:
        """The text of *tokens*, special ones included."""
        asked = {"model": model or self.model, "tokens": list(tokens)}
        return str((await self._post("/detokenize", json_content(asked)))["prompt"])

    async def voices(self, *, model: str | None = None) -> list[dict[str, Any]]:
        """The voices that *model*, or any of the server's, can speak with, those uploaded with this key among them:
        ``id``, ``name``, ``language``, ``uploaded``, ``models``…"""
        asked = {"params": {} if model is None else {"model": model}}
        answer = await self._again(lambda: self._exchange("GET", "/v1/audio/voices", asked))
        found: list[dict[str, Any]] = answer["data"]
        return found

    async def add_voice(
        self, name: str, audio: FileLike, *, text: str | None = None, language: str | None = None
    ) -> dict[str, Any]:
        """Upload *audio*, a clip of somebody who speaks, as a voice for :meth:`tts`.

        :param text: what is said in it. :param language: its code. Returns the voice as :meth:`voices` lists it.
        """
        made: dict[str, Any] = await self._post("/v1/audio/voices", voice_content(name, audio, text, language))
        return made

    async def delete_voice(self, voice: str) -> None:
        """Have the server forget the uploaded voice of this id or name."""
        await self._again(lambda: self._exchange("DELETE", voice_path(voice), {}))

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _only_model(self) -> str:
        names = [model["id"] for model in await self.models()]
        if len(names) != 1:
            message = f"'model' is required: the server has {', '.join(names) or 'no model'}"
            raise RequestError(message, param="model", code="missing_required_parameter")
        return str(names[0])

    async def _post(self, path: str, content: dict[str, Any]) -> Any:
        return await self._again(lambda: self._exchange("POST", path, content))

    async def _exchange(self, method: str, path: str, content: dict[str, Any]) -> Any:
        return self._read(await self._http.request(method, path, **content))

    async def _sound(self, path: str, content: dict[str, Any]) -> bytes:
        async def attempt() -> bytes:
            return self._body(await self._http.post(path, **content))

        return await self._again(attempt)

    async def _open(self, path: str, content: dict[str, Any]) -> httpx.Response:
        """A response whose body has not been read."""

        async def attempt() -> httpx.Response:
            response = await self._http.send(self._http.build_request("POST", path, **content), stream=True)
            if response.status_code >= 400:
                try:
                    await response.aread()
                    self._read(response)
                finally:
                    await response.aclose()
            return response

        return await self._again(attempt)

    def _read(self, response: httpx.Response) -> Any:
        return json.loads(self._body(response))

    def _body(self, response: httpx.Response) -> bytes:
        if response.status_code >= 400:
            raise error_of(response.status_code, response.headers, response.content)
        return response.content

    async def _again(self, attempt: Callable[[], Awaitable[T]]) -> T:
        number = 0
        while True:
            try:
                return await attempt()
            except (RequestError, httpx.TransportError) as raised:
                error = raised if isinstance(raised, RequestError) else self._fault(raised)
            wait = self._wait(error, number)
            if wait is None:
                raise error from None
            await asyncio.sleep(wait)
            number += 1

    async def _chat_pieces(self, response: httpx.Response) -> AsyncIterator[str]:
        try:
            async with contextlib.aclosing(response):
                async for line in response.aiter_lines():
                    if piece := sse_text(line):
                        yield piece
        except httpx.TransportError as error:
            raise self._fault(error) from None

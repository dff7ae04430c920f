"""The client for programs without an event loop. Its methods may be called from several threads."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import httpx
import numpy as np

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
from mstar.client.streams import Live, Stream
from mstar.runtime.result import Result
from mstar.spec.errors import RequestError
from mstar.spec.processor import AudioDelta, FramesDelta

__all__ = ["Client"]

T = TypeVar("T")


class Client(Base):
    """Asks a server; close it, or use it in a ``with``. Its parameters are those of
    :class:`~mstar.client.base.Base`.

    Every method raises :class:`~mstar.spec.errors.RequestError`, with the server's message, ``status``, ``param`` and
    ``code``, and ``retry_after`` (seconds) where the server gives one.
    """

    def _begin(self) -> None:
        self._http = httpx.Client(base_url=self.url, headers=self._headers, timeout=self._timeout)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- anything ----------------------------------------------------------------------------------------------------

    def generate(
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
        return result_of(self._post("/generate", asked))

    def stream(
        self,
        text: str = "",
        files: Sequence[FileLike] = (),
        *,
        model: str | None = None,
        want: Sequence[str] = (),
        session: str | None = None,
        stop: Sequence[str] = (),
        **knobs: Any,
    ) -> Stream:
        """:meth:`generate` with the answer's deltas as they are made."""
        asked = generate_content(model or self.model, text, files, want, session, stop, knobs, streaming=True)
        return Stream(self.url, self._open("/generate", asked), self._fault)

    def open(
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
    ) -> Live:
        """A live request, on a socket of its own, that keeps its input streams *live* open; see :class:`Live`.

        :param max_in_flight: pushes without an answer at which :meth:`Live.push` waits, where each has one.
        """
        talk = Conversation(live)
        opening = talk.opening(model or self.model, text, files, want, session, stop, knobs)
        return self._again(lambda: Live(self, talk, opening, max_in_flight))

    # --- one kind of answer ------------------------------------------------------------------------------------------

    @overload
    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        model: str | None = None,
        stream: Literal[False] = False,
        **knobs: Any,
    ) -> str: ...
    @overload
    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        model: str | None = None,
        stream: Literal[True],
        **knobs: Any,
    ) -> Iterator[str]: ...
    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        model: str | None = None,
        stream: bool = False,
        **knobs: Any,
    ) -> str | Iterator[str]:
        """The text that a model answers to a user's text or to OpenAI's *messages*; with *stream* in pieces."""
        asked = chat_content(model or self.model or self._only_model(), messages, stream, knobs)
        if stream:
            return self._chat_pieces(self._open("/v1/chat/completions", asked))
        answer = self._post("/v1/chat/completions", asked)
        return str(answer["choices"][0]["message"]["content"] or "")

    def tts(
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
            speaking = model or self.model or self._only_model()
            asked = speech_content(speaking, text, voice, reference_audio, ref_text, knobs)
            return sound_of(self._sound("/v1/audio/speech", asked))
        files, named = tts_ask(reference_audio, ref_text, knobs)
        return only(self.generate(text, files, model=model, **named).audio, "audio")

    def transcribe(self, audio: FileLike, *, model: str | None = None, **knobs: Any) -> str:
        """What is said in *audio*."""
        return self.generate("", [audio], model=model, want=["text"], **knobs).text

    def image(
        self, prompt: str, images: Sequence[FileLike] = (), *, model: str | None = None, **knobs: Any
    ) -> FramesDelta:
        """A picture of *prompt*, or *images* changed as it says."""
        result = self.generate(prompt, images, model=model, want=["image"], **knobs)
        return FramesDelta(np.stack(only(result.images or None, "an image")[:1]))

    def video(
        self, prompt: str, files: Sequence[FileLike] = (), *, model: str | None = None, **knobs: Any
    ) -> FramesDelta:
        """A video of *prompt*, from pictures or a video if given."""
        return only(self.generate(prompt, files, model=model, want=["video"], **knobs).video, "a video")

    def act(
        self,
        observation: Observation,
        text: str = "",
        files: Sequence[FileLike] = (),
        *,
        model: str | None = None,
        **knobs: Any,
    ) -> np.ndarray[Any, Any]:
        """The actions for one *observation* (live stream → items). For a control loop :meth:`open` a live request."""
        with self.open(list(observation), text, files, model=model, **knobs) as live:
            live.push(observation)
            live.end()
            return np.concatenate(only(live.result().arrays or None, "actions"))

    # --- about the server --------------------------------------------------------------------------------------------

    def models(self) -> list[dict[str, Any]]:
        """The models that the server has: ``id``, ``abilities``, ``modalities``, ``knobs``…"""
        found: list[dict[str, Any]] = self._again(lambda: self._read(self._http.get("/v1/models")))["data"]
        return found

    def tokenize(
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
        tokens: list[int] = self._post("/tokenize", json_content(asked))["tokens"]
        return tokens

    def detokenize(self, tokens: Sequence[int], *, model: str | None = None) -> str:
        """The text of *tokens*, special ones included."""
        asked = {"model": model or self.model, "tokens": list(tokens)}
        return str(self._post("/detokenize", json_content(asked))["prompt"])

    def voices(self, *, model: str | None = None) -> list[dict[str, Any]]:
        """The voices that *model*, or any of the server's, can speak with, those uploaded with this key among them:
        ``id``, ``name``, ``language``, ``uploaded``, ``models``…"""
        asked = {} if model is None else {"model": model}
        answer = self._again(lambda: self._read(self._http.get("/v1/audio/voices", params=asked)))
        found: list[dict[str, Any]] = answer["data"]
        return found

    def add_voice(
        self, name: str, audio: FileLike, *, text: str | None = None, language: str | None = None
    ) -> dict[str, Any]:
        """Upload *audio*, a clip of somebody who speaks, as a voice for :meth:`tts`.

        :param text: what is said in it. :param language: its code. Returns the voice as :meth:`voices` lists it.
        """
        made: dict[str, Any] = self._post("/v1/audio/voices", voice_content(name, audio, text, language))
        return made

    def delete_voice(self, voice: str) -> None:
        """Have the server forget the uploaded voice of this id or name."""
        self._again(lambda: self._read(self._http.delete(voice_path(voice))))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _only_model(self) -> str:
        names = [model["id"] for model in self.models()]
        if len(names) != 1:
            message = f"'model' is required: the server has {', '.join(names) or 'no model'}"
            raise RequestError(message, param="model", code="missing_required_parameter")
        return str(names[0])

    def _post(self, path: str, content: dict[str, Any]) -> Any:
        return self._again(lambda: self._read(self._http.post(path, **content)))

    def _sound(self, path: str, content: dict[str, Any]) -> bytes:
        return self._again(lambda: self._body(self._http.post(path, **content)))

    def _open(self, path: str, content: dict[str, Any]) -> httpx.Response:
        """A response whose body has not been read."""

        def attempt() -> httpx.Response:
            response = self._http.send(self._http.build_request("POST", path, **content), stream=True)
            if response.status_code >= 400:
                try:
                    response.read()
                    self._read(response)
                finally:
                    response.close()
            return response

        return self._again(attempt)

    def _read(self, response: httpx.Response) -> Any:
        return json.loads(self._body(response))

    def _body(self, response: httpx.Response) -> bytes:
        if response.status_code >= 400:
            raise error_of(response.status_code, response.headers, response.content)
        return response.content

    def _again(self, attempt: Callable[[], T]) -> T:
        number = 0
        while True:
            try:
                return attempt()
            except (RequestError, httpx.TransportError) as raised:
                error = raised if isinstance(raised, RequestError) else self._fault(raised)
            wait = self._wait(error, number)
            if wait is None:
                raise error from None
            time.sleep(wait)
            number += 1

    def _chat_pieces(self, response: httpx.Response) -> Iterator[str]:
        try:
            with contextlib.closing(response):
                for line in response.iter_lines():
                    if piece := sse_text(line):
                        yield piece
        except httpx.TransportError as error:
            raise self._fault(error) from None

"""Pictures as OpenAI's clients expect them: whole, or as events of a stream with looks at them in between.

A picture's file takes milliseconds to seconds. Each is made in a thread, and its text with it, from when the picture is
there, beside the others' and while the worker goes on. An answer stays in the parts that its files were made in: for
megabytes in one place each answer would be given new memory, which takes as long as the file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from mstar.spec.processor import Delta, FramesDelta, ProgressDelta
from mstar_server.errors import request_cancelled
from mstar_server.media.encode.images import image_text
from mstar_server.openai.image_request import ImageRequest
from mstar_server.protocols import Answer
from mstar_server.sse import named_event

__all__ = ["ImageEvents", "ImageFile", "ImageFiles", "images_response"]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class _Form:
    """How pictures are encoded, and what an answer says about it."""

    format: str
    quality: int

    @classmethod
    def of(cls, body: ImageRequest) -> _Form:
        quality = body.output_compression
        return cls(body.output_format or "png", 100 if quality is None else quality)

    def encode(self, pixels: Any) -> list[bytes]:
        """The file as base64, in parts."""
        return image_text(pixels, self.format, self.quality)


@dataclass(frozen=True)
class ImageFile:
    """A picture of an answer: its file as base64, in parts, and its size as ``WIDTHxHEIGHT``."""

    text: list[bytes]
    size: str


class ImageFiles:
    """Makes the files of an answer's pictures. A model may give several for one task."""

    def __init__(self, body: ImageRequest):
        self._form = _Form.of(body)

    async def read(self, answer: Answer) -> list[ImageFile]:
        async with asyncio.TaskGroup() as group:
            begun = [
                group.create_task(asyncio.to_thread(self._file, pixels))
                async for delta in answer
                if isinstance(delta, FramesDelta)
                for pixels in delta.frames
            ]
        return [file.result() for file in begun]

    def _file(self, pixels: Any) -> ImageFile:
        return ImageFile(self._form.encode(pixels), _size(pixels))


def images_response(body: ImageRequest, answers: Sequence[Answer], files: Sequence[Sequence[ImageFile]]) -> list[bytes]:
    """The whole answer, in parts: the pictures of all *answers*, in their order.

    :raises RequestError: 499: the request was cancelled before any of them was made.
    """
    made = [file for mine in files for file in mine]
    if not made:
        raise _none(answers)
    after = {
        "background": "opaque",
        "output_format": _Form.of(body).format,
        "quality": body.quality if body.quality in ("low", "medium", "high") else "medium",
        "size": made[-1].size,
        "usage": _usage(answers),
    }
    parts = [b'{"created":%d,"data":' % int(time.time())]
    for number, file in enumerate(made):
        parts += [b"," if number else b"[", b'{"b64_json":"', *file.text, b'"}']
    return [*parts, b"],", _encode(after)[1:]]


class ImageEvents:
    """The events of one stream. What takes long is left to its caller, as a function that may be called in any thread.

    :param kind: ``image_generation`` or ``image_edit``: the first word of the events' types.
    """

    def __init__(self, kind: str, body: ImageRequest):
        self._kind, self._body, self._form = kind, body, _Form.of(body)
        self._made: dict[int, Any] = {}
        self._looks: dict[int, int] = {}
        self._told = {"step": 0, "total": 0}

    def delta(self, which: int, delta: Delta) -> Callable[[], bytes] | None:
        """What *delta* of picture *which* is worth: a look at it when it is time for one, else nothing."""
        if isinstance(delta, FramesDelta):
            for pixels in delta.frames:
                if which in self._made:  # the model gives more than one
                    raise RuntimeError("a task for one picture gave several")
                self._made[which] = pixels
        elif isinstance(delta, ProgressDelta):
            self._told = {"step": delta.step, "total": delta.total}
            if delta.preview is not None and self._is_time(which, delta):
                return self._look(which, delta.preview)
        return None

    def finish(self, which: int, answer: Answer) -> Callable[[], bytes]:
        """The picture *which*, of *answer*, which has ended. Called, it may raise :class:`RequestError`: 499, it was
        cancelled before."""
        return partial(self._completed, which, self._made.pop(which, None), answer)

    def _completed(self, which: int, pixels: Any, answer: Answer) -> bytes:
        if pixels is None:
            raise _none([answer])
        return self._event("completed", pixels, {"usage": _usage([answer]), "image_index": which})

    def keepalive(self) -> bytes:
        """After a silence: how far it is."""
        kind = f"{self._kind}.in_progress"
        return named_event({"type": kind, **self._told})

    def _is_time(self, which: int, delta: ProgressDelta) -> bool:
        """Whether the next look is due: they are spread evenly over the steps, and the last step is the picture."""
        looks, wanted = self._looks.get(which, 0), self._body.partial_images or 0
        if looks >= wanted or not delta.total or delta.step >= delta.total:
            return False
        return delta.step * (wanted + 1) >= delta.total * (looks + 1)

    def _look(self, which: int, pixels: Any) -> Callable[[], bytes]:
        number = self._looks.get(which, 0)
        self._looks[which] = number + 1
        return partial(self._event, "partial_image", pixels, {"partial_image_index": number, "image_index": which})

    def _event(self, what: str, pixels: Any, more: dict[str, Any]) -> bytes:
        kind = f"{self._kind}.{what}"
        event = {
            "type": kind,
            "b64_json": msgspec.Raw(b"".join((b'"', *self._form.encode(pixels), b'"'))),
            "created_at": int(time.time()),
            "size": _size(pixels),
            "quality": self._body.quality or "auto",
            "background": self._body.background or "opaque",
            "output_format": self._form.format,
            **more,
        }
        return named_event(event)


def _none(answers: Sequence[Answer]) -> Exception:
    """Why there is no picture."""
    if any(answer.finish_reason == "cancelled" for answer in answers):
        return request_cancelled()
    return RuntimeError("a task for a picture gave none")


def _size(pixels: Any) -> str:
    return f"{pixels.shape[1]}x{pixels.shape[0]}"


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of the prompts; pictures are counted as such, and cost no tokens."""
    prompt = sum(answer.prompt_tokens for answer in answers)
    made = sum(answer.usage.output.get("images", 0) for answer in answers if answer.usage is not None)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"text_tokens": prompt, "image_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"text_tokens": 0, "image_tokens": 0},
        "total_tokens": prompt,
        "images": made,
    }

"""``POST /v1/videos`` and ``POST /v1/videos/generations``: the bodies, and the task that they ask for.

Reference: OpenAI's API reference of videos and the request types of its Python client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mstar.spec.errors import RequestError
from mstar.spec.model import ModelSpec
from mstar.spec.tasks import Image, Part, VideoTask
from mstar_server.media.decoder import Item
from mstar_server.openai.forms import Uploads, check_prompt
from mstar_server.openai.image_request import ImageReference, picture_size, reference_item
from mstar_server.openai.knobs import knobs_of
from mstar_server.openai.text_request import Number, Whole
from mstar_server.options import ServerOptions

__all__ = ["VideoAdapter", "VideoAnswerRequest", "VideoRequest", "video_items"]

REFERENCE = "input_reference"


class VideoRequest(BaseModel):
    """A video from words, or from words and its first picture. A model's knobs are fields of the same object."""

    model_config = ConfigDict(extra="allow", frozen=True)

    prompt: str
    model: str | None = Field(None, description="May be left out when the server has one model.")
    seconds: str | Number | None = Field(None, description='Length: `"4"` or 4. Default: the model\'s choice.')
    size: str | None = Field(None, description="`WIDTHxHEIGHT` in pixels, or `auto`: the model's choice.")
    input_reference: ImageReference | str | list[ImageReference | str] | None = Field(
        None,
        description="The first picture; a file of a form, in JSON a URL. More than one where the model takes them.",
    )
    n: Whole | None = Field(None, ge=1, le=1, description="Must be 1.")
    user: Any = Field(None, description="Accepted and ignored.")
    safety_identifier: Any = Field(None, description="Accepted and ignored.")


class VideoAnswerRequest(VideoRequest):
    """A video that is waited for."""

    response_format: Literal["b64_json", "mp4", "url"] | None = Field(
        None, description="`b64_json` (default): inside JSON; `mp4`: the file itself. `url` is not supported."
    )


class VideoAdapter:
    """Builds the task of one request for a video."""

    def __init__(self, spec: ModelSpec, options: ServerOptions):
        self.spec, self.options = spec, options

    def check(self, body: VideoRequest) -> None:
        """Raise for what is wrong with *body* beside its pictures."""
        self._task(body, {})

    def task(self, body: VideoRequest, media: Mapping[str, Part]) -> VideoTask:
        """:param media: the decoded pictures by the name of their field."""
        return self._task(body, media)

    def _task(self, body: VideoRequest, media: Mapping[str, Part]) -> VideoTask:
        check_prompt(body.prompt, self.options)
        if isinstance(body, VideoAnswerRequest) and body.response_format == "url":
            message = (
                "'response_format': this server hosts no files; ask for 'b64_json' or 'mp4', or make a job: /v1/videos"
            )
            raise RequestError(message, param="response_format", code="unsupported_parameter")
        task = VideoTask(
            prompt=body.prompt,
            images=tuple(part for part in media.values() if isinstance(part, Image)),
            size=picture_size(body.size, self.spec.canvas, self.options),
            seconds=_seconds(body.seconds),
            knobs=knobs_of(body, self.spec.knobs),
            want=tuple(word for word in ("video", "audio", "progress") if word in self.spec.outputs),
        )
        if self.spec.canvas is not None:
            self.spec.canvas.check(task)
        return task


def video_items(body: VideoRequest, uploads: Uploads, spec: ModelSpec) -> dict[str, Item]:
    """The pictures of a request by the names that :class:`VideoAdapter` knows them by."""
    given = body.input_reference
    listed = given if isinstance(given, list) else [] if given is None else [given]
    found: list[Any] = [*uploads.get(REFERENCE, ()), *listed]
    if found and "image" not in spec.inputs:
        message = f"'{REFERENCE}': the model {spec.key!r} does not take images; it takes {', '.join(spec.inputs)}"
        raise RequestError(message, param=REFERENCE, code="unsupported_modality")
    if spec.canvas is not None:
        spec.canvas.check_references(len(found), REFERENCE)
    names = [REFERENCE] if len(found) == 1 else [f"{REFERENCE}[{number}]" for number in range(len(found))]
    return {name: reference_item(value, name) for name, value in zip(names, found, strict=True)}


def _seconds(value: str | float | None) -> float | None:
    if value is None or value == "" or value == "auto":
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds <= 0:
        message = f"'seconds' must be a number of seconds above 0, got {str(value)[:40]!r}"
        raise RequestError(message, param="seconds")
    return seconds

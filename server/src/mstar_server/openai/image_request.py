"""``POST /v1/images/generations`` and ``/v1/images/edits``: the bodies as OpenAI's clients send them, and the tasks
that they ask for.

Reference: OpenAI's API reference of images and the request types of its Python client.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from mstar.spec.canvas import Canvas, Sizes
from mstar.spec.errors import RequestError
from mstar.spec.model import ModelSpec
from mstar.spec.tasks import Image, ImageTask, Part
from mstar_server.media.decoder import Item
from mstar_server.openai.forms import Uploads, check_prompt
from mstar_server.openai.knobs import knobs_of
from mstar_server.openai.text_request import Closed, Whole, samples
from mstar_server.options import ServerOptions

__all__ = [
    "ImageAdapter",
    "ImageEditRequest",
    "ImageReference",
    "ImageRequest",
    "as_sent",
    "image_items",
    "picture_size",
    "reference_item",
    "refuse_unsupported",
]

MOST_PARTIAL_IMAGES = 3
_SIZE = re.compile(r"([0-9]{1,9})[xX×]([0-9]{1,9})")


class ImageReference(Closed):
    """An image inside JSON."""

    image_url: str | None = Field(None, description="A data URL, or a remote one where the server fetches such.")
    file_id: str | None = Field(None, description="Not supported: this server stores no files.")


class ImageRequest(BaseModel):
    """A picture from words. A model's knobs (`seed`, `steps`…) are fields of the same object."""

    model_config = ConfigDict(extra="allow", frozen=True)

    prompt: str
    model: str | None = Field(None, description="May be left out when the server has one model.")
    n: Whole | None = Field(None, description="How many pictures. With a `seed` the next ones have seed + 1, + 2…")
    size: str | None = Field(None, description="`WIDTHxHEIGHT` in pixels, or `auto`: the model's choice.")
    response_format: Literal["b64_json", "url"] | None = Field(None, description="`url` is not supported.")
    output_format: Literal["png", "webp", "jpeg"] | None = Field(None, description="Default: png.")
    output_compression: Whole | None = Field(
        None, ge=0, le=100, description="Quality of webp and jpeg, in percent. Default: 100."
    )
    stream: StrictBool | None = None
    partial_images: Whole | None = Field(
        None, ge=0, le=MOST_PARTIAL_IMAGES, description="With `stream`: so many looks at the picture while it is made."
    )
    quality: str | None = Field(None, description="A knob where the model has it; else auto, standard or medium.")
    style: str | None = Field(None, description="A knob where the model has it; else not supported.")
    background: str | None = Field(None, description="A knob where the model has it; else auto or opaque.")
    moderation: str | None = Field(None, description="Accepted and ignored.")
    user: Any = Field(None, description="Accepted and ignored.")
    safety_identifier: Any = Field(None, description="Accepted and ignored.")
    complexity: Any = Field(None, description="Not supported.")
    frame_count: Any = Field(None, description="Not supported.")
    frame_duration_ms: Any = Field(None, description="Not supported.")
    svg: Any = Field(None, description="Not supported.")


class ImageEditRequest(ImageRequest):
    """A picture from words and pictures. In a form `image` (or `image[]`) and `mask` are files."""

    images: list[ImageReference | str] | None = Field(None, description="In JSON: the pictures.")
    image: str | list[str] | None = Field(None, description="In JSON: likewise, as URLs.")
    mask: ImageReference | str | None = Field(
        None, description="Of the first picture's size: it is edited where the mask is transparent."
    )
    input_fidelity: str | None = Field(None, description="A knob where the model has it; else low.")
    markup: Any = Field(None, description="Not supported.")


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "quality": ("auto", "standard", "medium"),
    "background": ("auto", "opaque"),
    "input_fidelity": ("low",),
    "style": (),
    "complexity": (),
    "frame_count": (),
    "frame_duration_ms": (),
    "svg": (),
    "markup": (),
}
"""Fields of OpenAI's that only a model with such a knob can honour, and the values that ask for nothing."""


class ImageAdapter:
    """Builds the tasks of one request for pictures: one per picture."""

    def __init__(self, spec: ModelSpec, options: ServerOptions):
        self.spec, self.options = spec, options

    def check(self, body: ImageRequest) -> None:
        """Raise for what is wrong with *body* beside its files."""
        self._task(body, {})
        _pictures(body.n, self.options)

    def tasks(self, body: ImageRequest, media: Mapping[str, Part]) -> Sequence[ImageTask]:
        """:param media: the decoded files by name: ``image[0]``, ``image[1]``…, ``mask``."""
        return samples(self._task(body, media), _pictures(body.n, self.options))

    def _task(self, body: ImageRequest, media: Mapping[str, Part]) -> ImageTask:
        check_prompt(body.prompt, self.options)
        refuse_unsupported(body, self.spec)
        _check_answer(body, self.spec)
        images = tuple(part for name, part in media.items() if name != "mask" and isinstance(part, Image))
        mask = media.get("mask")
        task = ImageTask(
            prompt=body.prompt,
            images=images,
            mask=mask.pixels if isinstance(mask, Image) else None,
            size=picture_size(body.size, self.spec.canvas, self.options),
            knobs=knobs_of(body, self.spec.knobs, fields=[name for name in NEUTRAL if name in type(body).model_fields]),
            want=self._want(body),
        )
        if self.spec.canvas is not None:
            self.spec.canvas.check(task)
        return task

    def _want(self, body: ImageRequest) -> tuple[str, ...]:
        told = ("progress", *(("preview",) if body.partial_images else ())) if body.stream else ()
        return ("image", *(word for word in told if word in self.spec.outputs))


def image_items(body: ImageRequest, uploads: Uploads, spec: ModelSpec) -> dict[str, Item]:
    """The files of a request by the names that :class:`ImageAdapter` knows them by. Raises before anything is decoded
    when there is none, or one too many."""
    if not isinstance(body, ImageEditRequest):
        return {}
    sent = uploads.get("image", [])
    found: list[tuple[str, Any]] = [(f"image[{i}]" if len(sent) > 1 else "image", s) for i, s in enumerate(sent)]
    for field in ("images", "image"):
        given = getattr(body, field)
        for i, reference in enumerate([given] if isinstance(given, str) else given or ()):
            found.append((f"{field}[{i}]" if isinstance(given, list) else field, reference))
    if not found:
        raise RequestError("'image' is required: a file of the form, or 'images' in JSON", param="image")
    if spec.canvas is not None:
        spec.canvas.check_references(len(found))
    items = {f"image[{number}]": reference_item(value, param) for number, (param, value) in enumerate(found)}
    masks = [*uploads.get("mask", ()), *([] if body.mask is None else [body.mask])]
    if len(masks) > 1:
        raise RequestError("'mask' was sent more than once", param="mask")
    if masks and spec.canvas is not None:
        spec.canvas.check_masks()
    if masks:
        items["mask"] = reference_item(masks[0], "mask", "mask")
    return items


@contextlib.contextmanager
def as_sent(items: Mapping[str, Item]) -> Iterator[None]:
    """A processor calls the pictures of a task ``image``, or ``image[0]``, ``image[1]``…; errors name the fields that
    *items*, of :func:`image_items`, came in."""
    try:
        yield
    except RequestError as error:
        named = "image[0]" if error.param == "image" else error.param or ""
        if named in items and (param := items[named].param) != error.param:
            error.message = error.message.replace(repr(error.param), repr(param), 1)
            error.param = param
        raise


def reference_item(value: Any, param: str, kind: Literal["image", "mask"] = "image") -> Item:
    """An upload, a URL or an :class:`ImageReference` as something to decode."""
    if isinstance(value, ImageReference):
        field = f"{param}.image_url"
        if value.file_id is not None:
            message = f"'{param}.file_id': this server stores no files; send the image as 'image_url', a data URL"
            raise RequestError(message, param=f"{param}.file_id", code="unsupported_parameter")
        if value.image_url is None:
            raise RequestError(f"{field!r} is required", param=field, code="missing_required_parameter")
        return Item(kind, value.image_url, field)
    return Item(kind, value, param)


def picture_size(text: str | None, canvas: Canvas | None, options: ServerOptions) -> tuple[int, int] | None:
    """The size that ``size`` asks for; ``None`` for ``auto``. Raises :class:`RequestError` that names a valid one."""
    if text is None or text == "auto":
        return None
    sizes = Sizes() if canvas is None else canvas.sizes
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        width, height = (sizes.within(options.max_pixels) or sizes).nearest((1024, 1024))
        message = f"'size' must be WIDTHxHEIGHT or auto, got {text[:40]!r}; a valid value is {width}x{height}"
        raise RequestError(message, param="size")
    width, height = int(match[1]), int(match[2])
    if canvas is not None and not sizes.has((width, height)):
        replace(canvas, sizes=sizes.within(options.max_pixels) or sizes).check_size((width, height))
    elif width < 1 or height < 1:
        raise RequestError(f"'size': {width}x{height} has no pixels; the nearest valid value is 1x1", param="size")
    if width * height > options.max_pixels:
        message = f"'size': {width}x{height} is larger than the server's limit of {options.max_pixels} pixels"
        if near := sizes.within(options.max_pixels):
            width, height = near.nearest((width, height))
            message += f"; the nearest valid value is {width}x{height}"
        raise RequestError(message, param="size")
    return width, height


def refuse_unsupported(body: BaseModel, spec: ModelSpec) -> None:
    """Raise for a field that asks for what neither the server nor a knob of *spec*'s model can do."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, None)
        sent = name in type(body).model_fields  # else it is an unknown field of this route
        if sent and value is not None and value not in neutral and name not in spec.knobs.model_fields:
            near = f"; what it takes: {', '.join(map(repr, neutral))}" if neutral else ""
            message = f"{name!r}: {str(value)[:40]!r} is not supported by {spec.key!r}{near}"
            raise RequestError(message, param=name, code="unsupported_parameter")


def _check_answer(body: ImageRequest, spec: ModelSpec) -> None:
    if body.response_format == "url":
        message = "'response_format': this server hosts no files; ask for 'b64_json'"
        raise RequestError(message, param="response_format", code="unsupported_parameter")
    if body.output_compression not in (None, 100) and body.output_format in (None, "png"):
        message = "'output_compression' is for webp and jpeg; png loses nothing: leave it out or send 100"
        raise RequestError(message, param="output_compression")
    if body.partial_images and not body.stream:
        raise RequestError("'partial_images' needs 'stream': true", param="partial_images")
    if body.partial_images and "preview" not in spec.outputs:
        message = f"'partial_images': the model {spec.key!r} gives no previews; send 0 or leave it out"
        raise RequestError(message, param="partial_images", code="unsupported_parameter")


def _pictures(n: int | None, options: ServerOptions) -> int:
    limit = options.max_images
    if n is not None and not 1 <= n <= limit:
        near = min(max(n, 1), limit)
        raise RequestError(f"'n' must be 1…{limit}, got {n}; the nearest valid value is {near}", param="n")
    return n or 1

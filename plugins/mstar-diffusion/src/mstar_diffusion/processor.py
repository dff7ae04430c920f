"""The API side that models of pictures share: words, sizes, noise and references in; pictures out."""

from __future__ import annotations

import abc
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mstar.processing.progress import ProgressReport
from mstar.processing.tokenizer import TextTokenizer
from mstar.spec.canvas import Canvas
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.processor import Delta, FramesDelta, Prepared, Processor, ProcessorContext, Renderer
from mstar.spec.request import Emit, EngineRequest
from mstar.spec.tasks import GenerateTask, Image, ImageTask, Task
from mstar_diffusion.knobs import SIZES, TEXT_TOKENS, ImageOptions
from mstar_diffusion.layout import folder_of, part_config
from mstar_diffusion.schedules import FlowSchedule, padded
from mstar_diffusion.vae.config import VaeConfig

__all__ = ["ImageProcessor", "PictureRenderer"]

_SIDE = 1024


class ImageProcessor(Processor, abc.ABC):
    """A family says how prompts are padded, which noise a size starts from, and what its schedule depends on.

    :cvar thinking: of the text encoder's chat template. :cvar patch: latent points along a side of a token.
    """

    thinking: ClassVar[bool]
    patch: ClassVar[int] = 2

    def __init__(self, context: ProcessorContext):
        super().__init__(context)
        weights = folder_of(context.weights, context.spec.key)
        self.options: ImageOptions = context.options
        self.tokenizer = TextTokenizer(weights / "tokenizer")
        self.schedule = FlowSchedule.read(part_config(weights, "scheduler", "scheduler_config.json"))
        self.vae = VaeConfig.read(part_config(weights, "vae"))
        pad = self.tokenizer.special_tokens.get("pad_token", "")
        found = self.tokenizer.id_of(pad)
        if found is None:
            raise SetupError(f"{weights / 'tokenizer'}: the tokenizer has no padding token (pad_token is {pad!r})")
        self.pad = found

    @property
    def canvas(self) -> Canvas | None:
        canvas = self.context.spec.canvas
        if canvas is None or (sizes := canvas.sizes.within(self.options.max_image_area)) is None:
            return canvas
        return replace(canvas, sizes=sizes)

    # --- a family's own -----------------------------------------------------------------------------------------------
    @abc.abstractmethod
    def padded_length(self, length: int) -> int:
        """To how many tokens a prompt of *length* is padded."""

    @abc.abstractmethod
    def noise(self, height: int, width: int, seed: int) -> NDArray[np.float32]:
        """What a picture of *height* x *width* tokens begins with: float32 ``[height, width, C]``."""

    def mu(self, tokens: int, steps: int) -> float:
        """What a dynamic schedule is moved by, for a picture of *tokens* tokens."""
        return 0.0

    def negative(self, task: ImageTask) -> str | None:
        """What the picture shall not show; ``None``: there is no guidance."""
        return None

    def references(self, task: ImageTask, names: Sequence[str]) -> list[NDArray[np.uint8]]:
        """The pictures that the request refers to, as the encoder takes them: uint8 ``[H, W, 3]``.

        :param names: what the request calls each of them.
        """
        return []

    # --- requests -----------------------------------------------------------------------------------------------------
    def prepare(self, task: Task, request_id: str) -> Prepared:
        field, sent = ("text", "parts") if isinstance(task, GenerateTask) else ("prompt", "image")
        task = self._picture_task(task)
        knobs = task.knobs
        numbered = sent == "parts" or len(task.images) > 1
        seen = self.references(task, [f"{sent}[{i}]" if numbered else sent for i in range(len(task.images))])
        width, height = self._size(task, seen)
        token = self.vae.factor * self.patch
        rows, columns = height // token, width // token
        steps = knobs.num_inference_steps
        ids, inputs = self._prompt(task.prompt, field, "")
        seed = secrets.randbelow(1 << 32) if knobs.seed is None else knobs.seed
        inputs |= {
            "latent": self.noise(rows, columns, seed),
            "sigmas": padded(self.schedule.sigmas(steps, self.mu(rows * columns, steps))),
        }
        inputs |= {f"reference_{number}": pixels for number, pixels in enumerate(seen)}
        negative = self.negative(task)
        if negative is not None:
            inputs |= self._prompt(negative, "negative_prompt", "negative_")[1]
        request = EngineRequest(
            id=request_id, inputs=inputs, params=knobs.model_dump(), want=task.want, tenant=task.tenant
        )
        return Prepared(request, prompt_tokens=len(ids))

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return PictureRenderer()

    def _picture_task(self, task: Task) -> ImageTask:
        if isinstance(task, GenerateTask):
            if not task.text.strip():
                raise RequestError("'text' is empty: it says what the picture shows", param="text")
            for number, part in enumerate(task.parts):
                if not isinstance(part, Image):
                    where = f"parts[{number}]"
                    raise RequestError(f"{where}: this model takes pictures, not {type(part).__name__}", param=where)
            images = tuple(part for part in task.parts if isinstance(part, Image))
            if self.context.spec.canvas is not None:
                self.context.spec.canvas.check_references(len(images), "parts")
            return ImageTask(prompt=task.text, images=images, knobs=task.knobs, want=task.want, tenant=task.tenant)
        if not isinstance(task, ImageTask):
            raise RequestError(f"this model does not serve {type(task).__name__}", code="unsupported_task")
        return task

    def _prompt(self, text: str, param: str, prefix: str) -> tuple[list[int], dict[str, Any]]:
        messages = [{"role": "user", "content": text}]
        ids = self.tokenizer.encode_chat(messages, enable_thinking=self.thinking)
        if len(ids) > TEXT_TOKENS:
            raise RequestError(
                f"{param!r} has {len(ids)} tokens, its template included; this model reads {TEXT_TOKENS}: shorten it "
                f"by {len(ids) - TEXT_TOKENS} or more",
                param=param,
                code="context_length_exceeded",
            )
        filled = np.full(self.padded_length(len(ids)), self.pad, np.int64)
        filled[: len(ids)] = ids
        return ids, {f"{prefix}ids": filled, f"{prefix}length": np.array(len(ids))}

    def _size(self, task: ImageTask, seen: Sequence[NDArray[np.uint8]]) -> tuple[int, int]:
        """Width and height: the task's, else the knobs', else the first reference's, else 1024 x 1024. What nobody
        asked for is reduced to what this server makes."""
        first = seen[0].shape[1::-1] if seen else (_SIDE, _SIDE)
        asked = (task.knobs.width, task.knobs.height)
        if task.size is not None:
            for name, knob, side in zip(("width", "height"), asked, task.size, strict=True):
                if knob not in (None, side):
                    message = f"{name!r} is {knob}, but 'size' says {side}; send one of them"
                    raise RequestError(message, param=name)
            asked = task.size
        width, height = (side or default for side, default in zip(asked, first, strict=True))
        most = self.options.max_image_area
        if width * height > most:
            near = replace(SIZES, max_pixels=most).nearest((width, height))
            if asked == (None, None):
                return near
            knob = "width" if asked[0] is not None else "height"
            raise RequestError(
                f"{knob!r}: a picture of {width}x{height} is {width * height} pixels, and this server makes {most} at "
                f"most; the nearest valid one has 'width' {near[0]} and 'height' {near[1]}",
                param=knob,
            )
        return width, height


class PictureRenderer(Renderer):
    """A picture, and how far it is."""

    def __init__(self) -> None:
        self._progress = ProgressReport()

    def feed(self, event: Emit) -> Iterable[Delta]:
        if self._progress.hears(event):
            yield from self._progress.feed(event)
            return
        for picture in event.data:
            yield FramesDelta(picture[None], None, event.stream)

"""Qwen3.5's API side: prompts in which pictures and videos stand among the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mstar.nn.config import read_config
from mstar.processing.mrope import Grid, rope_positions
from mstar.processing.once import OncePer
from mstar.processing.pictures import BadShape, Patcher, content_words, frame_indices
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.processor import Prepared, ProcessorContext
from mstar.spec.tasks import ChatTask, Image, Part, Task, Text, Video
from mstar_qwen3.chat import Qwen35TextProcessor
from mstar_qwen3.config import Qwen35Config
from mstar_qwen3.preprocessing import read_patchers
from mstar_qwen3.vision_config import VisionConfig

__all__ = ["Qwen35Processor", "places_of"]


def places_of(frames: int, height: int, width: int, merge: int) -> npt.NDArray[np.int32]:
    """Row and column of each patch in its picture, and the picture's rows and columns; int32 ``[P, 4]``, in the order
    of :class:`~mstar.processing.pictures.Patches`."""
    rows, columns = np.indices((height, width), dtype=np.int32)
    where = np.stack((rows, columns, np.full_like(rows, height), np.full_like(rows, width)), -1)
    blocks = where.reshape(height // merge, merge, width // merge, merge, 4).transpose(0, 2, 1, 3, 4)
    return np.tile(blocks.reshape(-1, 4), (frames, 1))


@dataclass(frozen=True)
class _Medium:
    """One picture or video of a request.

    :param where: its place in the request. :param grids: of its embeddings: one, or one for each group of frames.
    :param chosen: of a video: which of its frames are looked at. :param times: seconds of each group.
    """

    where: str
    part: Image | Video
    grids: tuple[Grid, ...]
    chosen: Sequence[int] = ()
    times: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(rows * columns for rows, columns in self.grids)


@dataclass(frozen=True)
class _Shown:
    """What the model gets to see of a picture or video: its share of the request's inputs."""

    patches: npt.NDArray[np.uint8]
    places: npt.NDArray[np.int32]
    pieces: npt.NDArray[np.int64]


class Qwen35Processor(Qwen35TextProcessor):
    """Puts placeholders into the prompt as the template and transformers' ``Qwen3VLProcessor`` do: for a picture as
    many as it has embeddings; for a video ``<t seconds>`` before each group of frames, which has vision tokens of its
    own around it, inside the template's.

    A request with media also has ``patches`` and ``places`` (:class:`mstar_qwen3.vision.VisionEncoder`), ``pieces``
    (:class:`mstar.spec.resources.MediaEmbeddings`) and ``positions``. The ids of placeholders are negative then, made
    from what the picture shows.
    """

    def __init__(self, context: ProcessorContext):
        super().__init__(context)
        assert context.weights is not None
        self.sizes = Qwen35Config.from_hf(read_config(context.weights))
        self._shown: OncePer[Image | Video, _Shown] = OncePer(self._show)  # samples of one prompt share their pictures
        self.vision: VisionConfig | None = None
        if self.sizes.vision is None or context.options.text_only:
            return
        self.vision = VisionConfig.from_hf(self.sizes.vision, self.sizes.text.hidden)
        pictures, videos = read_patchers(context.weights, self.vision)
        self.pictures = _within(pictures, context.options.image_pixels, "image_pixels")
        self.videos = _within(videos, context.options.video_pixels, "video_pixels")
        self.frames = self.videos
        if self.tokenizer.chat_template is not None and "<|image_pad|>" not in self.tokenizer.chat_template.text:
            raise SetupError(f"{context.weights}: the chat template has no place for pictures; set text_only: true")

    # --- prompts ------------------------------------------------------------------------------------------------------
    def template_content(self, parts: Sequence[Part], where: str) -> str | list[dict[str, Any]]:
        if self.vision is None or all(isinstance(part, Text) for part in parts):
            return super().template_content(parts, where)
        content: list[dict[str, Any]] = []
        for i, part in enumerate(parts):
            if isinstance(part, Text):
                content.append({"type": "text", "text": part.text})
                continue
            kind = type(part).__name__.lower()
            if not isinstance(part, Image | Video) or kind not in self.context.spec.inputs:
                takes = ", ".join(self.context.spec.inputs)
                message = f"{where}[{i}]: this model does not take {kind}; it takes {takes}"
                raise RequestError(message, param=f"{where}[{i}]", code="unsupported_modality")
            content.append({"type": kind})
        return content

    def prompt_ids(self, task: Task) -> tuple[list[int], str]:
        ids, param = super().prompt_ids(task)
        media = self._media(task)
        return (self._with_placeholders(ids, media, param) if media else ids), param

    def _media(self, task: Task) -> list[_Medium]:
        """The pictures and videos of *task*, in the order of the prompt."""
        if self.vision is None:
            return []
        if isinstance(task, ChatTask):
            parts = [
                (f"messages[{i}].content[{j}]", part)
                for i, message in enumerate(task.messages)
                for j, part in enumerate(message.content)
            ]
        else:
            parts = [(f"parts[{i}]", part) for i, part in enumerate(task.media)]
        return [self._medium(part, where) for where, part in parts if isinstance(part, Image | Video)]

    def _medium(self, part: Image | Video, where: str) -> _Medium:
        try:
            if isinstance(part, Image):
                size = self.pictures.picture_size(*part.pixels.shape[:2])
                return _Medium(where, part, (_grid(self.pictures, size),))
            patcher, chosen = self.videos, self._chosen(part)
            size = part.frames.shape[1:3] if part.resized else patcher.video_size(len(chosen), *part.frames.shape[1:3])
        except BadShape as error:
            kind = type(part).__name__.lower()
            raise RequestError(f"{where!r}: {error}", param=where, code=f"invalid_{kind}") from None
        times = part.times or tuple(i / part.fps for i in chosen)
        groups = [(i, min(i + patcher.pair, len(chosen)) - 1) for i in range(0, len(chosen), patcher.pair)]
        middles = tuple((times[first] + times[last]) / 2 for first, last in groups)
        return _Medium(where, part, (_grid(patcher, size),) * len(groups), chosen, middles)

    def _chosen(self, video: Video) -> Sequence[int]:
        """Which of its frames are looked at: all, if they were chosen for it already."""
        if video.times:
            return range(len(video.frames))
        patcher, frames = self.videos, len(video.frames)
        chosen = frame_indices(frames, video.fps, patcher.fps, patcher.least_frames, patcher.most_frames)
        return [int(index) for index in chosen]

    def _with_placeholders(self, ids: Sequence[int], media: Sequence[_Medium], param: str) -> list[int]:
        """*ids* with as many placeholders for each of *media* as it has embeddings; the template wrote one."""
        sizes, laid, left = self.sizes, list[int](), list(reversed(media))
        kinds = {sizes.image_token: Image, sizes.video_token: Video}
        for token in ids:
            kind = kinds.get(token)
            if kind is None:
                laid.append(token)
                continue
            medium = left.pop() if left else None
            if medium is None or not isinstance(medium.part, kind):
                raise _misplaced(param)
            laid += [token] * medium.tokens if kind is Image else self._groups(medium, token)
        if left:
            raise _misplaced(param)
        return laid

    def _groups(self, video: _Medium, token: int) -> Iterator[int]:
        start, end = self.sizes.vision_start, self.sizes.vision_end
        assert start is not None
        assert end is not None
        for (rows, columns), time in zip(video.grids, video.times, strict=True):
            yield from self.tokenizer.encode(f"<{time:.1f} seconds>", special=False)
            yield from (start, *[token] * (rows * columns), end)

    # --- requests -----------------------------------------------------------------------------------------------------
    def prepare(self, task: Task, request_id: str) -> Prepared:
        prepared = super().prepare(task, request_id)
        media = self._media(task)
        if not media:
            return prepared
        request = prepared.request
        request.inputs.update(self._seen(media, request.inputs["prompt"]))
        return replace(prepared, request=request)

    def _seen(self, media: Sequence[_Medium], prompt: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Inputs of a request with *media*, whose placeholders are in *prompt*."""
        shown = [self._shown(medium.part) for medium in media]
        table = np.concatenate([one.pieces for one in shown])
        where = np.flatnonzero(np.isin(prompt, [self.sizes.image_token or 0, self.sizes.video_token or 0]))
        keyed = prompt.copy()
        keyed[where] = np.concatenate([np.resize(-1 - row[2:], row[1]) for row in table])
        grids = [grid for medium in media for grid in medium.grids]
        return {
            "prompt": keyed,
            "patches": shown[0].patches if len(shown) == 1 else np.concatenate([one.patches for one in shown]),
            "places": np.concatenate([one.places for one in shown]),
            "pieces": table,
            "positions": rope_positions(_runs(len(prompt), where, grids)),
        }

    def _show(self, part: Image | Video) -> _Shown:
        assert self.vision is not None
        if isinstance(part, Image):
            made = self.pictures.picture(part.pixels)
        else:
            frames = [part.frames[i] for i in self._chosen(part)]
            made = self.videos.cut(np.stack(frames)) if part.resized else self.videos.video(frames)
        count = made.height * made.width
        pieces = [
            (count, count // self.vision.block, *content_words(group, made.height, made.width))
            for group in made.data.reshape(made.frames, count, -1)
        ]
        places = places_of(made.frames, made.height, made.width, self.vision.merge)
        return _Shown(made.data, places, np.array(pieces, np.int64))


def _within(patcher: Patcher, most: int | None, name: str) -> Patcher:
    """*patcher* with the operator's limit of pixels, from option *name*."""
    if most is None:
        return patcher
    if most < patcher.least:
        raise SetupError(
            f"model_kwargs.{name} is {most}, but the checkpoint's preprocessor makes nothing smaller than "
            f"{patcher.least} pixels: set at least that"
        )
    return replace(patcher, most=min(most, patcher.most))


def _grid(patcher: Patcher, size: tuple[int, int]) -> Grid:
    return size[0] // patcher.factor, size[1] // patcher.factor


def _runs(tokens: int, where: npt.NDArray[np.int64], grids: Sequence[Grid]) -> list[int | Grid]:
    """The parts of a prompt of so many *tokens*, whose media are at *where*: text between them, and their *grids*."""
    runs, at, done = list[int | Grid](), 0, 0
    for rows, columns in grids:
        begin = int(where[done])
        runs += [begin - at, (rows, columns)]
        at, done = begin + rows * columns, done + rows * columns
    return [*runs, tokens - at]


def _misplaced(param: str) -> RequestError:
    return RequestError(
        "the chat template does not show all pictures and videos, or not in their order: put them into messages of "
        "the user",
        param=param,
    )

"""Which pictures and videos a model makes: sizes, lengths, references. Known without its weights; no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mstar.spec.errors import RequestError
from mstar.spec.tasks import ImageTask, Task, VideoTask

__all__ = ["Canvas", "Lengths", "Sizes"]

Size = tuple[int, int]


@dataclass(frozen=True)
class Sizes:
    """Widths and heights in pixels.

    :param multiple: both are multiples of it. :param min_side: and *max_side*: of the shorter and the longer side.
    :param max_pixels: most of width × height. :param choices: the only sizes, if there are just a few; then the other
        limits count for nothing.
    """

    multiple: int = 1
    min_side: int = 1
    max_side: int = 16_384
    max_pixels: int | None = None
    choices: tuple[Size, ...] = ()

    def has(self, size: Size) -> bool:
        if self.choices:
            return size in self.choices
        return (
            all(self.min_side <= side <= self.max_side and side % self.multiple == 0 for side in size)
            and size[0] * size[1] <= self._most
        )

    def nearest(self, size: Size) -> Size:
        """The size that :meth:`has` allows nearest to *size*, of about its shape."""
        width, height = max(1, size[0]), max(1, size[1])
        if self.choices:
            return min(
                self.choices, key=lambda c: (_ratio(c[0] * height, c[1] * width), _ratio(c[0] * c[1], width * height))
            )
        scale = min(1.0, self.max_side / max(width, height), math.sqrt(self._most / (width * height)))
        for rounded in (round, math.floor):
            fits = self._on_grid(width * scale, height * scale, rounded)
            if self.has(fits):
                return fits
        most = self._most // min(fits)  # the shorter side is at its least: the longer one gives way
        width, height = (min(side, self._multiple_below(most)) for side in fits)
        return width, height

    def within(self, pixels: int) -> Sizes | None:
        """These sizes as far as they have at most so many *pixels*; ``None`` if there are none."""
        choices = tuple(size for size in self.choices if size[0] * size[1] <= pixels)
        least = self._side(0, round) ** 2
        if not choices and (self.choices or least > pixels):
            return None
        return replace(self, max_pixels=min(pixels, self._most), choices=choices)

    def describe(self) -> str:
        if self.choices:
            return ", ".join(f"{width}x{height}" for width, height in self.choices)
        limits = [f"sides of {self.min_side} to {self.max_side}"]
        if self.multiple > 1:
            limits.append(f"multiples of {self.multiple}")
        if self.max_pixels is not None:
            limits.append(f"{self.max_pixels} pixels at most")
        return ", ".join(limits)

    @property
    def _most(self) -> int:
        return self.max_side**2 if self.max_pixels is None else self.max_pixels

    def _on_grid(self, width: float, height: float, rounded: Callable[[float], int]) -> Size:
        return self._side(width, rounded), self._side(height, rounded)

    def _side(self, value: float, rounded: Callable[[float], int]) -> int:
        low = -(-self.min_side // self.multiple) * self.multiple
        return max(low, min(self._multiple_below(self.max_side), rounded(value / self.multiple) * self.multiple))

    def _multiple_below(self, value: int) -> int:
        return value // self.multiple * self.multiple


def _ratio(one: int, other: int) -> float:
    """How far apart two numbers are, by their ratio; 0: not at all."""
    return abs(math.log(one / other))


@dataclass(frozen=True)
class Lengths:
    """How long videos are: *first*, *first* + *step*, *first* + 2 *step*… up to *max_frames* frames.

    :param fps: frames a second, unless the model's knob ``fps`` says otherwise.
    """

    fps: float
    max_frames: int
    first: int = 1
    step: int = 1

    def frames(self, seconds: float, fps: float | None = None) -> int:
        """How many frames last *seconds*, to one frame. Raises :class:`RequestError` that names the neighbours."""
        rate = fps or self.fps
        wanted = seconds * rate
        count = max(0, round((wanted - self.first) / self.step)) if math.isfinite(wanted) else 0
        nearest = min(self.first + count * self.step, self._longest)
        if not (abs(nearest - wanted) <= 1.0 + 1e-6 and seconds > 0):  # so that no number at all fits neither
            below = max((n for n in (nearest, nearest - self.step) if self.first <= n <= wanted), default=None)
            above = min((n for n in (nearest, nearest + self.step) if wanted <= n <= self._longest), default=None)
            near = " and ".join(f"{n / rate:.10g}" for n in (below, above) if n is not None)
            raise RequestError(
                f"'seconds': this model makes no video of {seconds:.10g} s at {rate:.10g} frames a second; the nearest "
                f"{'lengths are' if ' and ' in near else 'length is'} {near}",
                param="seconds",
            )
        return nearest

    @property
    def _longest(self) -> int:
        return self.first + (self.max_frames - self.first) // self.step * self.step


@dataclass(frozen=True)
class Canvas:
    """What a model of pictures or videos takes and makes.

    :param references: most images that one request may bring; 0: none. :param masks: whether a mask may say which part
        of the first is to be edited.
    """

    sizes: Sizes = Sizes()
    lengths: Lengths | None = None
    references: int = 0
    masks: bool = False

    def check(self, task: Task) -> None:
        """Raise :class:`RequestError` (400) if *task*, of pictures or a video, asks for what this model cannot do."""
        if not isinstance(task, ImageTask | VideoTask):
            return
        if task.size is not None:
            self.check_size(task.size)
        self.check_references(len(task.images))
        if isinstance(task, ImageTask) and task.mask is not None:
            self._check_mask(task)
        if isinstance(task, VideoTask) and task.seconds is not None and self.lengths is not None:
            self.lengths.frames(task.seconds, getattr(task.knobs, "fps", None))

    def check_size(self, size: Size) -> None:
        if not self.sizes.has(size):
            width, height = self.sizes.nearest(size)
            raise RequestError(
                f"'size': this model makes no {size[0]}x{size[1]} ({self.sizes.describe()}); the nearest valid value "
                f"is {width}x{height}",
                param="size",
            )

    def check_references(self, count: int, param: str = "image") -> None:
        if count > self.references:
            most = f"at most {self.references}" if self.references else "no"
            raise RequestError(
                f"{param!r}: {count} images are too many; this model takes {most} images in one request",
                param=param,
                code="too_many_files",
            )

    def check_masks(self) -> None:
        if not self.masks:
            raise RequestError("'mask' is not supported by this model", param="mask", code="unsupported_parameter")

    def _check_mask(self, task: ImageTask) -> None:
        self.check_masks()
        if not task.images:
            raise RequestError("'mask' needs an image to lie on", param="mask")
        mask, image = task.mask.shape[:2], task.images[0].pixels.shape[:2]
        if mask != image:
            raise RequestError(
                f"'mask' is {mask[1]}x{mask[0]}, the first image {image[1]}x{image[0]}: they must be of one size",
                param="mask",
            )

    def faults(self) -> Iterator[str]:
        """What is wrong with this description itself."""
        sizes, lengths = self.sizes, self.lengths
        if not sizes.choices and not sizes.has(sizes.nearest((sizes.min_side, sizes.min_side))):
            yield f"sizes: no size at all has {sizes.describe()}"
        if lengths is not None and (min(lengths.fps, lengths.step) <= 0 or not 0 < lengths.first <= lengths.max_frames):
            yield f"lengths: {lengths} has no length"
        if self.references < 0 or (self.masks and not self.references):
            yield "references: a mask needs an image that it lies on" if self.masks else "references: must be 0 or more"

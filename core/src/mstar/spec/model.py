"""The registry entry of a model: everything that can be known without torch, weights or a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mstar.spec.canvas import Canvas
from mstar.spec.errors import RequestError, nearest
from mstar.spec.knobs import Knobs

__all__ = ["Ability", "Frames", "Licence", "LiveInput", "ModelSpec", "WeightsRef", "check_wanted"]

Ability = Literal[
    "chat", "completion", "embedding", "speech", "transcription", "translation", "image", "image_edit", "video",
    "realtime", "generate",
]  # fmt: skip


@dataclass(frozen=True)
class Licence:
    """The terms of the weights. :param gated: the source wants an account that accepted them."""

    name: str
    url: str = ""
    commercial: bool = True
    gated: bool = False
    permissive: bool = True


@dataclass(frozen=True)
class WeightsRef:
    """One place where weights may come from; a spec lists them in the order to try.

    :param source: name of a weight source registered through ``mstar_weight_sources`` (``hub``, ``package``, ``path``).
    :param id: what the source understands: a Hub id, a distribution's name, a folder.
    :param revision: pinned revision or version.
    :param options: further facts that the source needs (member files, sha256, converter ``"module:function"``).
    """

    source: str
    id: str
    revision: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveInput:
    """A stream that clients may feed during a request, described for whoever writes one: listings and the playground.

    :param name: the graph's stream from the client. :param modality: what it carries (``audio``, ``text``, ``state``,
        ``action``…). :param shape: of one item; empty for single numbers, as samples are. :param rate: items a second:
        of sound its sampling rate, of controls what the model expects; ``None``: as fast as the client likes.
    :param labels: names of an item's numbers (``("forward", "turn")``).
    """

    name: str
    modality: str
    shape: tuple[int, ...] = ()
    rate: float | None = None
    labels: tuple[str, ...] = ()
    description: str = ""


@dataclass(frozen=True)
class Frames:
    """Which frames of a video a model looks at: evenly from the first to the last, *fps* a second, no fewer than
    *least* and no more than *most*, as far as there are so many."""

    fps: float = 2.0
    least: int = 4
    most: int = 768


@dataclass(frozen=True)
class ModelSpec:
    """One key that ``mstar serve KEY`` understands.

    :param model: ``"module:Class"`` of the :class:`mstar.nn.model.Model`; imported by a worker only.
    :param processor: ``"module:Class"`` of the :class:`mstar.spec.processor.Processor`; imported by the API side.
    :param knobs: the model's request parameters.
    :param options: what the deployment's ``model_kwargs`` may hold, in the same form; default: nothing. Model and
        processor find an instance of it in ``context.options``, checked, with defaults. Models of
        :class:`~mstar.processing.chat.TextProcessor` have :class:`~mstar.spec.knobs.TextOptions`.
    :param inputs: modalities that a request may bring. :param outputs: those that it may ask for.
    :param live: what a request may be fed with while it runs.
    :param abilities: OpenAI surfaces (and ``generate``) that the processor can prepare.
    :param deployment: defaults of the deployment file, as a mapping (or ``"package:file.yaml"``).
    :param layouts: other ways to place the model that ship with the package: name → ``"package:file.yaml"``, what it
        changes in the deployment. An operator chooses one by name (``mstar serve KEY --layout NAME``).
    :param size: weights' size in bytes as published, for listings.
    :param tiny: ``"module:function"`` that writes a small random checkpoint in the published layout, tokenizer and all,
        into an empty folder: ``function(folder: Path) -> None``, without network. Tests serve it.
    :param examples: ``"module:function"`` that draws a sample request for tests:
        ``function(key: str, rng: random.Random) -> mstar.testing.Example``. Default: short texts.
    :param frames: which frames of a video it looks at; ``None``: those shown at regular times from the start.
    :param canvas: the sizes, lengths and references of a model of pictures or videos. What does not fit is refused
        before the processor sees it; ``None``: the processor judges.
    """

    key: str
    family: str
    summary: str
    weights: tuple[WeightsRef, ...]
    licence: Licence
    model: str
    processor: str
    knobs: type[Knobs]
    abilities: tuple[Ability, ...] = ("generate",)
    inputs: tuple[str, ...] = ("text",)
    outputs: tuple[str, ...] = ("text",)
    deployment: Mapping[str, Any] | str = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    size: int | None = None
    options: type[Knobs] = Knobs
    tiny: str | None = None
    examples: str | None = None
    canvas: Canvas | None = None
    live: tuple[LiveInput, ...] = ()
    frames: Frames | None = None


def check_wanted(spec: ModelSpec, wanted: Iterable[str], param: str = "want") -> None:
    """Check the modalities that a request asks for against those that *spec*'s model makes.

    :param param: the field's name in errors.
    :raises RequestError: the model does not make one of them; names the nearest, or all that it makes.
    """
    for word in (wanted,) if isinstance(wanted, str) else wanted:
        if word not in spec.outputs:
            message = f"the model {spec.key!r} does not make {word!r}{nearest(word, spec.outputs)}"
            raise RequestError(message, param=param, code="unsupported_modality")

"""The registry entry of a model: everything that can be known without torch, weights or a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mstar.spec.errors import RequestError, nearest
from mstar.spec.knobs import Knobs

__all__ = ["Ability", "Licence", "ModelSpec", "WeightsRef", "check_wanted"]

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
class ModelSpec:
    """One key that ``mstar serve KEY`` understands.

    :param model: ``"module:Class"`` of the :class:`mstar.nn.model.Model`; imported by a worker only.
    :param processor: ``"module:Class"`` of the :class:`mstar.spec.processor.Processor`; imported by the API side.
    :param knobs: the model's request parameters.
    :param options: what the deployment's ``model_kwargs`` may hold, in the same form; default: nothing. Model and
        processor find an instance of it in ``context.options``, checked, with defaults. Models of
        :class:`~mstar.processing.chat.TextProcessor` have :class:`~mstar.spec.knobs.TextOptions`.
    :param inputs: modalities that a request may bring. :param outputs: those that it may ask for.
    :param abilities: OpenAI surfaces (and ``generate``) that the processor can prepare.
    :param deployment: defaults of the deployment file, as a mapping (or ``"package:file.yaml"``).
    :param size: weights' size in bytes as published, for listings.
    :param tiny: ``"module:function"`` that writes a small random checkpoint in the published layout, tokenizer and all,
        into an empty folder: ``function(folder: Path) -> None``, without network. Tests serve it.
    :param examples: ``"module:function"`` that draws a sample request for tests:
        ``function(key: str, rng: random.Random) -> mstar.testing.Example``. Default: short texts.
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
    size: int | None = None
    options: type[Knobs] = Knobs
    tiny: str | None = None
    examples: str | None = None


def check_wanted(spec: ModelSpec, wanted: Iterable[str], param: str = "want") -> None:
    """Check the modalities that a request asks for against those that *spec*'s model makes.

    :param param: the field's name in errors.
    :raises RequestError: the model does not make one of them; names the nearest, or all that it makes.
    """
    for word in (wanted,) if isinstance(wanted, str) else wanted:
        if word not in spec.outputs:
            message = f"the model {spec.key!r} does not make {word!r}{nearest(word, spec.outputs)}"
            raise RequestError(message, param=param, code="unsupported_modality")

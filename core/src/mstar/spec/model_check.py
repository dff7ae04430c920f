"""Whether a :class:`~mstar.spec.model.ModelSpec` holds what its types promise.

A wrong field would otherwise show in whichever command or request comes upon it first, far from the plugin at fault.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from mstar.spec.canvas import Canvas
from mstar.spec.errors import nearest
from mstar.spec.knobs import Knobs
from mstar.spec.model import Ability, Licence, LiveInput, ModelSpec, WeightsRef

__all__ = ["shown", "spec_faults"]


def spec_faults(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Every wrong field of *spec*: (its name, what is wrong with it)."""
    yield from _texts(spec, "key", "family", "summary")
    if isinstance(spec.key, str) and spec.key.startswith("-"):
        yield "key", f"{spec.key!r} begins with -, as an option of a command does"
    yield from _objects(spec, "model", "processor")
    yield from _objects(spec, "tiny", "examples", optional=True)
    for name in ("knobs", "options"):
        value = getattr(spec, name)
        if not (isinstance(value, type) and issubclass(value, Knobs)):
            yield name, f"must be a subclass of mstar.spec.knobs.Knobs, not {shown(value)}"
    for name in ("abilities", "inputs", "outputs"):
        yield from _words(name, getattr(spec, name))
    if not (isinstance(spec.deployment, Mapping) or (isinstance(spec.deployment, str) and ":" in spec.deployment)):
        yield "deployment", f"must be a mapping or 'package:file.yaml', not {shown(spec.deployment)}"
    if spec.size is not None and (type(spec.size) is not int or spec.size < 0):
        yield "size", f"must be a number of bytes or None, not {shown(spec.size)}"
    if isinstance(spec.canvas, Canvas):
        yield from (("canvas", fault) for fault in spec.canvas.faults())
    elif spec.canvas is not None:
        yield "canvas", f"must be a Canvas or None, not {shown(spec.canvas)}"
    yield from _live(spec.live)
    yield from _licence(spec.licence)
    yield from _weights(spec.weights)


def _texts(owner: Any, *names: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name in names:
        value = getattr(owner, name)
        if not (isinstance(value, str) and value.strip()):
            yield prefix + name, f"must be a text, not {shown(value)}"
        elif value != value.strip() or any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
            yield prefix + name, f"{value!r} has space around it or characters that cannot be printed"


def _objects(spec: ModelSpec, *names: str, optional: bool = False) -> Iterator[tuple[str, str]]:
    for name in names:
        value = getattr(spec, name)
        if not ((isinstance(value, str) and ":" in value) or (optional and value is None)):
            yield name, f"must be 'module:name'{' or None' if optional else ''}, not {shown(value)}"


def _words(name: str, words: Any) -> Iterator[tuple[str, str]]:
    if not (isinstance(words, tuple) and all(isinstance(word, str) and word for word in words)):
        yield name, f"must be a tuple of words, not {shown(words)}"
    elif name == "abilities":
        for word in words:
            if word not in get_args(Ability):
                yield name, f"{word!r} is none{nearest(word, get_args(Ability))}"


def _live(live: Any) -> Iterator[tuple[str, str]]:
    if not (isinstance(live, tuple) and all(isinstance(item, LiveInput) for item in live)):
        yield "live", f"must be a tuple of LiveInput, not {shown(live)}"
        return
    for index, item in enumerate(live):
        prefix = f"live[{index}]."
        yield from _texts(item, "name", "modality", prefix=prefix)
        if not (isinstance(item.shape, tuple) and all(type(size) is int and size > 0 for size in item.shape)):
            yield f"{prefix}shape", f"must be a tuple of sizes, not {shown(item.shape)}"
        if item.rate is not None and not (type(item.rate) in (int, float) and 0 < item.rate < float("inf")):
            yield f"{prefix}rate", f"must be items a second or None, not {shown(item.rate)}"
        yield from _words(f"{prefix}labels", item.labels)


def _licence(licence: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(licence, Licence):
        yield "licence", f"must be a Licence, not {shown(licence)}"
        return
    for name in ("name", "url"):
        if getattr(licence, name) != "":  # the conformance suite asks for more, a model in the making need not have it
            yield from _texts(licence, name, prefix="licence.")
    for name in ("commercial", "gated", "permissive"):
        if not isinstance(getattr(licence, name), bool):
            yield f"licence.{name}", f"must be True or False, not {shown(getattr(licence, name))}"


def _weights(weights: Any) -> Iterator[tuple[str, str]]:
    if not (isinstance(weights, tuple) and all(isinstance(ref, WeightsRef) for ref in weights)):
        yield "weights", f"must be a tuple of WeightsRef, not {shown(weights)}"
        return
    for index, ref in enumerate(weights):
        prefix = f"weights[{index}]."
        yield from _texts(ref, "source", "id", prefix=prefix)
        if ref.revision is not None:
            yield from _texts(ref, "revision", prefix=prefix)
        if not isinstance(ref.options, Mapping):
            yield f"{prefix}options", f"must be a mapping, not {shown(ref.options)}"


def shown(value: Any) -> str:
    """*value* in a message: its type and a short form of it."""
    try:
        text = repr(value)
    except Exception as error:  # it is someone's own class
        return f"{type(value).__name__} (its __repr__ raises {type(error).__name__})"
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"

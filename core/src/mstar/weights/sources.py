"""Where weights come from: from a spec's references, or an operator's ``--weights``, to a local folder.

A source is a small class that knows one kind of place (a folder, the Hub, a package index). Plugins add theirs through
``mstar_weight_sources``. Every source ends in a folder in the model's *published layout*, so that loaders see no
difference between them.
"""

from __future__ import annotations

import abc
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mstar.spec.errors import SetupError, WeightsError
from mstar.spec.model import Licence, ModelSpec, WeightsRef

if TYPE_CHECKING:
    from mstar.settings import Settings

__all__ = [
    "HUB_ID",
    "PathSource",
    "Progress",
    "SourceContext",
    "WeightSource",
    "check_checkpoint",
    "check_override",
    "expanded",
    "parse_override",
    "present_weights",
    "resolve_weights",
]

Progress = Callable[[str, int, int], None]
"""``(what, done, total)``, both in bytes; *total* 0 means unknown. Called from one thread at a time."""


def _say_nothing(sentence: str) -> None:
    del sentence


def _show_nothing(what: str, done: int, total: int) -> None:
    del what, done, total


@dataclass(frozen=True, kw_only=True)
class SourceContext:
    """What a source may know of its surroundings. Built once from the settings.

    :param cache: folder for what a source makes itself (converted packages); created on demand.
    :param offline: reach for nothing that is not on this machine.
    :param endpoint: base address of the Hub; ``None`` for the library's own default.
    :param token: access token for the Hub; ``None`` for the one that the library finds.
    :param hub_cache: folder of Hub snapshots; ``None`` for the library's own default, shared with other programs.
    :param licence: terms of the weights, for messages; filled in by :func:`resolve_weights`.
    :param gated: the place wants a token of an account that accepted the terms; filled in likewise.
    :param say: takes a sentence for the operator. :param progress: see :data:`Progress`.
    """

    cache: Path
    offline: bool = False
    endpoint: str | None = None
    token: str | None = None
    hub_cache: Path | None = None
    licence: Licence | None = None
    gated: bool = False
    say: Callable[[str], None] = _say_nothing
    progress: Progress = _show_nothing

    @classmethod
    def of(
        cls, settings: Settings, *, say: Callable[[str], None] = _say_nothing, progress: Progress = _show_nothing
    ) -> SourceContext:
        """The context that *settings* describe."""
        return cls(
            cache=settings.cache,
            offline=settings.offline,
            endpoint=settings.hub_endpoint,
            token=settings.hub_token,
            hub_cache=settings.hub_cache,
            say=say,
            progress=progress,
        )


class WeightSource(abc.ABC):
    """One kind of place that weights come from. Stateless; constructed without arguments."""

    @abc.abstractmethod
    def resolve(self, ref: WeightsRef, context: SourceContext) -> Path:
        """The local folder, in the published layout, that *ref* stands for; fetched or converted if need be.

        :raises WeightsError: when this source cannot give it; the message says why and what would help.
        """

    def present(self, ref: WeightsRef, context: SourceContext) -> Path | None:
        """The folder that :meth:`resolve` would return without fetching or converting anything, ``None`` when there is
        none yet. Quick and without imports that take time: listings ask it of every model. The default knows nothing.
        """
        del ref, context
        return None


class PathSource(WeightSource):
    """``path``: a folder that is there already."""

    def resolve(self, ref: WeightsRef, context: SourceContext) -> Path:
        folder = _find_folder(ref.id)
        check_checkpoint(folder)
        return folder.resolve()

    def present(self, ref: WeightsRef, context: SourceContext) -> Path | None:
        try:
            return self.resolve(ref, context)
        except WeightsError:
            return None


def expanded(name: str) -> Path:
    """*name* with a home folder in place of ``~``; as it is where there is no such home."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _find_folder(name: str) -> Path:
    """The folder *name*. Raises :class:`WeightsError` if there is none."""
    folder = expanded(name)
    try:
        found = folder.exists()
    except OSError as error:  # a name that is too long, a folder that one may not look into
        raise WeightsError(f"the folder {name[:80]!r} cannot be looked at: {error.strerror}") from None
    if not found:
        raise WeightsError(f"there is no folder {name!r}")
    if not folder.is_dir():
        raise WeightsError(f"{name!r} is a file; name the folder that holds the checkpoint")
    return folder


_WEIGHT_FILES = ("*.safetensors", "*.pt", "*.pth", "*.nemo", "*.bin", "*.ckpt")


def check_checkpoint(folder: Path) -> None:
    """Raise :class:`WeightsError` unless *folder* holds a weight file, itself or in a folder one level down.

    Whether the file fits the model is the loader's business; this only catches a wrong folder early.
    """
    if any(next(folder.glob(depth + pattern), None) for pattern in _WEIGHT_FILES for depth in ("", "*/")):
        return
    found = sorted(entry.name for entry in folder.iterdir())
    if any(name.endswith(".gguf") for name in found):
        raise WeightsError(f"{folder} holds a GGUF file; the model's published files (safetensors) are needed")
    listing = ", ".join(found[:8]) + (", …" if len(found) > 8 else "") if found else "nothing"
    raise WeightsError(
        f"{folder} does not look like a checkpoint: no weight file ({', '.join(_WEIGHT_FILES)}) in it, found {listing}"
    )


HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


def parse_override(text: str) -> WeightsRef:
    """What ``--weights`` and a deployment's ``weights`` mean: a folder, or ``HUB_ID[@REVISION]``.

    A folder that exists wins over a Hub id of the same spelling; ``./name`` always means a folder.
    """
    if text.startswith((".", "/", "~")) or (text and os.path.exists(text)):  # Path.exists() raises for some names
        return WeightsRef("path", text)
    match = HUB_ID.fullmatch(text)
    if match is None:
        raise WeightsError(f"there is no folder {text!r}, and it is no Hub id (OWNER/NAME[@REVISION])")
    return WeightsRef("hub", match["id"], match["revision"])


def _override_of(spec: ModelSpec, text: str) -> WeightsRef:
    """What an operator's word for *spec*'s weights means: of a Hub id, its parts are those of the published one."""
    ref = parse_override(text)
    parts = next((r.options["parts"] for r in spec.weights if r.source == ref.source and "parts" in r.options), None)
    return ref if parts is None else replace(ref, options={"parts": parts})


def check_override(text: str) -> None:
    """Raise :class:`WeightsError` when *text*, an operator's word for the weights, is neither a folder that is there
    nor a Hub id."""
    ref = parse_override(text)
    if ref.source == "path":
        _find_folder(ref.id)


def resolve_weights(
    spec: ModelSpec,
    override: str | None,
    sources: Callable[[str], type[WeightSource]],
    context: SourceContext,
) -> Path | None:
    """The local folder with *spec*'s weights; ``None`` for a model that has none.

    The spec's references are tried in order. An *override* (``DIR`` or ``HUB_ID[@REVISION]``) is tried alone: an
    operator who named a place does not want another one.

    :param sources: from a source's name to its class (``Registry.weight_source``).
    :raises WeightsError: when nothing worked; it lists what was tried, why each failed, and what to do.
    """
    # Another copy of gated weights, which the operator names, may be open.
    context = replace(context, licence=spec.licence, gated=spec.licence.gated and override is None)
    refs = (_override_of(spec, override),) if override is not None else spec.weights
    if not refs:
        return None
    failures = []
    for ref in refs:
        try:
            return sources(ref.source)().resolve(ref, context)
        except SetupError as error:  # an unknown source too: its plugin may be missing while the next one is there
            failures.append(f"{_spell(ref)}: {error}")
            if ref is not refs[-1]:
                context.say(f"{_spell(ref)} did not work, trying the next place.")
    raise WeightsError(
        f"no weights for {spec.key!r}. Tried:\n"
        + "\n".join("  - " + failure.replace("\n", "\n    ") for failure in failures)
        + "\nIf you have the files, point at their folder with --weights DIR; for another copy on the Hub: "
        + "--weights OWNER/NAME[@REVISION]."
    )


def present_weights(
    spec: ModelSpec,
    override: str | None,
    sources: Callable[[str], type[WeightSource]],
    context: SourceContext,
) -> Path | None:
    """The folder with *spec*'s weights if one of its places has them on this machine. Arguments as for
    :func:`resolve_weights`; fetches nothing. A source that cannot be asked counts as having none."""
    for ref in (_override_of(spec, override),) if override is not None else spec.weights:
        try:
            folder = sources(ref.source)().present(ref, context)
        except SetupError:
            continue  # its plugin is missing or broken; another place may have them
        if folder is not None:
            return folder
    return None


def _spell(ref: WeightsRef) -> str:
    return f"{ref.source} {ref.id}" + (f" @ {ref.revision}" if ref.revision else "")

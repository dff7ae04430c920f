"""What distributions require of each other: the core by a plugin, plugins by a deployment.

pip checks this too, but only when it installs: ``--no-deps``, a downgrade of the core or a checkout go past it.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mstar.spec.errors import FaultFound, PluginError

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

    from mstar.plugins import Plugins

__all__ = ["CORE", "GROUP", "canonical", "check_core", "require_plugins", "satisfies"]

CORE = "mstar-core"
"""The core's distribution."""

GROUP = "mstar.plugins"
"""The entry-point group of plugins."""


def canonical(name: str) -> str:
    """The form in which the packaging standards compare names (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def satisfies(version: str, specifier: SpecifierSet) -> bool:
    """Whether *version* is one that *specifier* allows.

    A pre-release also counts as the release that it leads to: who tries 0.3rc1 wants the plugins made for 0.3. It never
    counts as an earlier one: ``<0.3`` excludes 0.3rc1 (PEP 440).
    """
    from packaging.version import Version

    found = Version(version)
    if specifier.contains(found, prereleases=True):
        return True
    return found.is_prerelease and specifier.contains(found.base_version)


def check_core(distribution: str, requires: Iterable[str], core: str) -> None:
    """Check that a plugin's *distribution* works with version *core* of the core.

    :param requires: its requirements (``Requires-Dist``); those of extras do not count.
    :raises PluginError: it asks for another version of the core, or its metadata do not parse.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    for line in requires:
        if canonical(re.split(r"[^\w.-]", line, maxsplit=1)[0]) != CORE:
            continue
        try:
            wanted = Requirement(line)
        except InvalidRequirement as error:
            raise PluginError(
                f"its metadata say that it requires {line!r}, which does not parse: {error}",
                remedy=f"install another version of {distribution}",
            ) from error
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        if not satisfies(core, wanted.specifier):
            raise PluginError(
                f"it requires {CORE} {wanted.specifier}, and this is {CORE} {core}",
                remedy=f"run `pip install --upgrade {CORE} {distribution}`, or a {distribution} made for {core}",
            )


def require_plugins(required: Iterable[str], plugins: Plugins) -> None:
    """Check that every plugin that a deployment requires is there and works.

    :param required: requirements as pip has them (``"mstar-tts>=0.2"``), each naming a plugin's distribution.
    :raises FaultFound: one is missing, too old or not used. Names all of them, and what to type.
    """
    faults, install = [], []
    for line in required:
        fault, can_install = _fault(line, plugins)
        if fault:
            faults.append(f"\n  {line}: {fault}")
        if can_install:
            install.append(f"'{line}'")
    if faults:
        hint = f"\nRun `pip install {' '.join(install)}`." if install else ""
        raise FaultFound(f"the deployment requires plugins that are not there:{''.join(faults)}{hint}")


def _fault(line: str, plugins: Plugins) -> tuple[str, bool]:
    """What is wrong with one required plugin (empty: nothing), and whether installing it helps."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(line)
    except InvalidRequirement:
        return "this is not a requirement such as 'mstar-tts>=0.2'", False
    try:
        found = importlib.metadata.distribution(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return "it is not installed", True
    if not satisfies(found.version, wanted.specifier):
        return f"version {found.version} is installed", True
    if any(canonical(plugin.distribution or "") == canonical(wanted.name) for plugin in plugins.loaded):
        return "", False
    for broken in plugins.broken:
        if canonical(broken.distribution or "") == canonical(wanted.name):
            return str(broken), False
    if not found.entry_points.select(group=GROUP):
        return "it is installed but is no plugin of M*", False
    return "it is installed, but MSTAR_PLUGINS or MSTAR_BLOCK_PLUGINS leaves it out", False

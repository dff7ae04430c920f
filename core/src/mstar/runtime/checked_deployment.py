"""The deployment that a check goes on with: keys at fault are left out, and each fault knows where its key stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.runtime.checked import Checked, Fault
from mstar.runtime.deployment_files import (
    Written,
    file_deployment,
    key_paths,
    packaged_deployment,
    packaged_layout,
    packaged_name,
)
from mstar.spec.deployment import Deployment, merge_deployment
from mstar.spec.errors import DeploymentError, FaultFound, innermost

__all__ = ["Where", "read_deployment", "usable"]


@dataclass(frozen=True)
class Where:
    """Where the deployment's keys stand: in what ships with the package (*packaged*, or a layout beside it; in which of
    them each of *packaged_keys* is), or in a *file*, with *lines*."""

    packaged: str
    packaged_keys: Mapping[str, str]
    file: str | None
    lines: Mapping[str, int]

    def file_of(self, key: str) -> str:
        """Where the key at path *key* got its value, or the innermost key around it; else where one would write it."""
        packaged = innermost(self.packaged_keys, key)
        if self.file is None:
            return packaged or self.packaged
        return packaged if packaged and innermost(self.lines, key) is None else self.file


def read_deployment(checked: Checked, config: Path | None, layout: str | None = None) -> tuple[Deployment, Where]:
    """The deployment; keys at fault are left out, so that the check can go on. *layout*: goes before what *config*
    says of it."""
    spec, package = checked.spec, packaged_name(checked.spec)
    packaged: dict[str, Any] = {}
    placed: dict[str, Any] = {}
    with checked.stage(package):
        packaged = packaged_deployment(spec)
    try:
        written = file_deployment(spec, config)
    except DeploymentError as error:
        written = Written(faults=error.faults)
    named = written.values.get("layout") if layout is None else layout
    own = "options given" if layout is not None else str(config)
    faults = [Fault(str(config), path, message) for path, message in written.faults]
    try:
        placed = packaged_layout(spec, named)
    except DeploymentError as error:
        faults += [Fault(spec.layouts.get(str(named), own), path, message) for path, message in error.faults]
    except FaultFound as error:
        faults.append(Fault(spec.layouts[str(named)], "", str(error)))
    keys = {
        **dict.fromkeys(key_paths(packaged), package),
        **dict.fromkeys(key_paths(placed), spec.layouts.get(str(named), "")),
    }
    where = Where(package, keys, None if config is None else str(config), written.lines)
    checked.faults += faults
    layers = [packaged, placed, written.values, {"layout": layout}]
    try:
        return merge_deployment(spec.key, *layers, knobs=getattr(spec.knobs, "model_fields", ())), where
    except DeploymentError as error:
        for path, message in error.faults:
            checked.faults.append(Fault(where.file_of(path), path, message))
            layers = [_without(layer, path) for layer in layers]
        return merge_deployment(spec.key, *layers), where


def usable(deployment: Deployment, unusable: Iterable[str]) -> Deployment:
    """*deployment* without the keys at the paths *unusable*."""
    values = deployment.model_dump()
    for path in unusable:
        values = _without(values, path)
    return Deployment.model_validate(values)


def _without(layer: Mapping[Any, Any], path: str) -> dict[Any, Any]:
    """*layer* without the key at *path*, or the nearest one above it that is no mapping."""
    kept = dict(layer)
    for key, value in layer.items():  # a key may be no text, or have dots in it
        if path == str(key) or (path.startswith(f"{key}.") and not isinstance(value, Mapping)):
            del kept[key]
        elif path.startswith(f"{key}."):
            kept[key] = _without(value, path.removeprefix(f"{key}."))
    return kept

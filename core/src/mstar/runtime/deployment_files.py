"""Deployments as they are written: a YAML file of the operator's, or what ships with a family's package.

YAML lets pass what nobody means: a key given twice, of which the last wins, and anchors that refer to themselves. Here
both are faults with their lines.
"""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mstar.spec.errors import DeploymentError, FaultFound, SetupError, nearest
from mstar.spec.model import ModelSpec
from mstar.weights.sources import HUB_ID, expanded

__all__ = [
    "Written",
    "file_deployment",
    "key_paths",
    "named_model",
    "packaged_deployment",
    "packaged_layout",
    "packaged_name",
    "read_deployment",
    "read_file",
]

_DEEPEST = 32
"""Levels of a deployment; none needs more than a handful."""
_MOST = 10_000
"""Keys and values, those counted again that an alias repeats: a few lines of aliases can stand for millions."""
_MERGE, _TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"


@dataclass(frozen=True)
class Written:
    """A deployment as it is written.

    :ivar values: one layer for a merge; its keys are checked then.
    :ivar lines: where each key stands, from 1, by its path (``"scheduler.policy"``).
    :ivar faults: what is wrong with how it is written: (key's path, what).
    """

    values: dict[str, Any] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    faults: tuple[tuple[str, str], ...] = ()


def read_deployment(text: str, where: str) -> Written:
    """The deployment in YAML *text*. *where* names it in errors.

    :raises DeploymentError: it cannot be made of *text*.
    """
    walk = _Walk()
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return Written()
        walk.visit(node, "", ())
        values = loader.construct_document(node)
    except RecursionError:
        raise _unusable(where, f"this is nested more than {_DEEPEST} levels deep") from None
    except _Unreadable as error:
        raise _unusable(where, str(error)) from None
    # PyYAML raises the last four for a value that is not of its tag, as in "!!int x" or a thirteenth month.
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unusable(where, f"this is not valid YAML: {error}") from None
    if values is None:
        return Written()
    if not isinstance(values, dict):
        raise _unusable(where, f"this must be a mapping (key: value), not a {type(values).__name__}")
    return Written(values, walk.lines, tuple(walk.faults))


def read_file(file: str | Path) -> Written:
    """The deployment in YAML *file*.

    :raises SetupError: it cannot be read.
    :raises DeploymentError: no deployment can be made of it.
    """
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise SetupError(f"the deployment file {file} cannot be read: {error}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _unusable(str(file), f"line {line}: this is not UTF-8 ({error.reason})") from None
    return read_deployment(text, str(file))


def file_deployment(spec: ModelSpec, file: str | Path | None) -> Written:
    """The deployment in *file*, which must be for *spec*; nothing without a file. A folder of weights in it is relative
    to the file's.

    :raises SetupError: as :func:`read_file`.
    """
    if file is None:
        return Written()
    written = read_file(file)
    values, faults = dict(written.values), written.faults
    named = values.pop("model", None)
    if named not in (None, spec.key):
        faults = (*faults, ("model", f"this is the deployment of {named!r}, not of {spec.key!r}"))
    weights = values.get("weights")
    if isinstance(weights, str) and weights:
        beside = (Path(file).parent / expanded(weights)).absolute()
        if os.path.exists(beside) or HUB_ID.fullmatch(weights) is None:  # raises for no name
            values["weights"] = str(beside)
    return Written(values, written.lines, faults)


def named_model(file: str | Path, written: Written | None = None) -> str:
    """The key of the model that *file* is for. *written*: what it holds, if that has been read.

    :raises SetupError: as :func:`read_file`, or it names none.
    """
    key = (written or read_file(file)).values.get("model")
    if not isinstance(key, str):
        raise SetupError(f"{file} names no model: add 'model: KEY' (`mstar models` lists the keys)")
    return key


def packaged_deployment(spec: ModelSpec) -> dict[str, Any]:
    """The deployment that ships with *spec*'s package, as one layer for a merge.

    :raises FaultFound: its file cannot be read, or has faults.
    """
    if not isinstance(spec.deployment, str):
        return dict(spec.deployment)
    return _packaged(spec, "deployment", spec.deployment)


def packaged_layout(spec: ModelSpec, name: Any) -> dict[str, Any]:
    """What layout *name* of *spec*'s package changes in its deployment, as the layer that comes next; nothing for what
    is no name.

    :raises DeploymentError: the package has none of that name, or its file has faults.
    :raises FaultFound: its file cannot be read.
    """
    if not isinstance(name, str):  # none, or what the merge refuses
        return {}
    if name not in spec.layouts:
        known = nearest(name, spec.layouts) or "; its package has none"
        raise DeploymentError([("layout", f"{name!r} is no layout of {spec.key!r}{known}")])
    return _packaged(spec, f"layout {name!r}", spec.layouts[name])


def _packaged(spec: ModelSpec, what: str, place: str) -> dict[str, Any]:
    """The file at *place* (``"package:file.yaml"``)."""
    package, _, file = place.partition(":")
    try:
        text = importlib.resources.files(package).joinpath(file).read_text(encoding="utf-8")
    except (ImportError, OSError, UnicodeDecodeError) as error:
        raise FaultFound(f"the {what} of {spec.key!r} ({place}) cannot be read: {error}") from error
    written = read_deployment(text, place)
    if written.faults:
        places = {path: f"{place}:{line}" for path, line in written.lines.items()}
        raise DeploymentError(written.faults, places)
    return written.values


def packaged_name(spec: ModelSpec) -> str:
    """How errors call the deployment that ships with *spec*'s package."""
    return spec.deployment if isinstance(spec.deployment, str) else f"deployment of {spec.key!r}"


def key_paths(layer: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The paths of all keys of *layer* (``"scheduler.policy"``)."""
    for key, value in layer.items():
        yield f"{above}{key}"
        if isinstance(value, Mapping):
            yield from key_paths(value, f"{above}{key}.")


class _Unreadable(Exception):
    """Nothing can be made of the whole."""


def _unusable(where: str, fault: str) -> DeploymentError:
    return DeploymentError([("", fault)], {"": where})


class _Walk:
    """Goes over a document before its values are made, which loses repeated keys and does not end for some anchors."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.faults: list[tuple[str, str]] = []
        self._visited = 0

    def visit(self, node: yaml.Node, path: str, above: tuple[yaml.Node, ...]) -> None:
        """:param above: the nodes around *node*. :raises _Unreadable: the walk would be endless, or too long."""
        line = node.start_mark.line + 1
        self._visited += 1
        if any(node is outer for outer in above):
            raise _Unreadable(f"line {line}: what is anchored here contains itself")
        if len(above) >= _DEEPEST:
            raise _Unreadable(f"line {line}: this is nested more than {_DEEPEST} levels deep")
        if self._visited > _MOST:
            raise _Unreadable(f"line {line}: with what aliases repeat, these are more than {_MOST:,} values")
        around = (*above, node)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, f"{path}.{index}", around)
        elif isinstance(node, yaml.MappingNode):
            prefix = f"{path}." if path else ""
            self._keys(node, prefix)
            for key, value in node.value:
                if key.tag != _MERGE:
                    self.visit(value, f"{prefix}{key.value}", around)
            for key, value in node.value:  # after the mapping's own keys, which win
                if key.tag == _MERGE:
                    for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                        self.visit(merged, path, around)

    def _keys(self, node: yaml.MappingNode, prefix: str) -> None:
        found: dict[str, list[int]] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.tag != _MERGE:
                    key.tag = _TEXT  # "on" and "1" are names like others here
                found.setdefault(key.value, []).append(key.start_mark.line + 1)
        for name, lines in found.items():
            self.lines.setdefault(f"{prefix}{name}", lines[-1])
            if len(lines) > 1:
                listed = " and ".join(map(str, lines))
                where = f"on lines {listed}" if lines[0] != lines[-1] else f"on line {lines[0]}"
                self.faults.append((f"{prefix}{name}", f"given {len(lines)} times, {where}; keep one of them"))

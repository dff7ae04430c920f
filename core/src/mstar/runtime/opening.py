"""From a model's key to what its worker needs: deployment merged, weights in a local folder."""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mstar.cluster.base import WorkerConfig
from mstar.licences import check_licence
from mstar.requirements import require_plugins
from mstar.spec.deployment import Deployment, merge_deployment
from mstar.spec.errors import DeploymentError, FaultFound, SetupError, WeightsError
from mstar.spec.knobs import read_options
from mstar.spec.model import ModelSpec
from mstar.weights.progress import progress_bar
from mstar.weights.sources import (
    HUB_ID,
    SourceContext,
    check_override,
    present_weights,
    resolve_weights,
)

if TYPE_CHECKING:
    from mstar.registry import Registry
    from mstar.settings import Settings

__all__ = [
    "Say",
    "config_model",
    "file_deployment",
    "find_model",
    "key_lines",
    "packaged_deployment",
    "packaged_name",
    "prepare_config",
    "read_deployment",
    "value_faults",
]

Say = Callable[[str], None]
"""Takes a sentence for the operator."""


def prepare_config(
    spec: ModelSpec,
    settings: Settings,
    overrides: Mapping[str, Any],
    registry: Registry,
    *,
    config: str | Path | None = None,
    say: Say | None = None,
) -> WorkerConfig:
    """Merge *spec*'s deployment (package defaults, then file *config*, then *overrides*) and resolve its weights.

    A download or conversion shows its progress on standard error, where *say* writes too by default.

    :raises SetupError: the file, a value or the weights are not as they must be, or the weights' terms want consent.
    """
    check_licence(spec, settings)
    layers = (packaged_deployment(spec), file_deployment(spec, config), dict(overrides))
    places = _places(spec, config, layers)
    deployment = merge_deployment(spec.key, *layers, knobs=spec.knobs.model_fields, places=places)
    if faults := value_faults(spec, deployment, weights=overrides.get("weights") is None):
        raise DeploymentError(faults, places)
    if deployment.required_plugins:
        require_plugins(deployment.required_plugins, registry.plugins)
    with progress_bar() as progress:
        context = SourceContext.of(settings, say=say or _say, progress=progress)
        _check_device(spec, deployment, registry, context)
        weights = resolve_weights(spec, deployment.weights, registry.weight_source, context)
    return WorkerConfig(
        key=spec.key,
        weights=None if weights is None else str(weights),
        deployment=deployment,
        places=places,
        plugins=settings.plugins,
        block_plugins=settings.block_plugins,
        extra_plugins=settings.extra_plugins,
        trace_plugins=settings.trace_plugins,
    )


def value_faults(spec: ModelSpec, deployment: Deployment, *, weights: bool) -> list[tuple[str, str]]:
    """What no key's type can say of *deployment*: options that *spec*'s model would not understand, weights that are
    not there. (Key's path, what is wrong with it.)

    :param weights: a file says which, not an option: then they are looked at, too.
    """
    faults: list[tuple[str, str]] = []
    try:
        read_options(spec.options, deployment.model_kwargs)
    except DeploymentError as error:
        faults += error.faults
    if weights and deployment.weights is not None:
        try:
            check_override(deployment.weights)
        except WeightsError as error:
            faults.append(("weights", str(error)))
    return faults


def _places(spec: ModelSpec, config: str | Path | None, layers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Where each key of the deployment got its value: in the package's own deployment, in the file, or in the options
    given (*layers*, in this order)."""
    packaged, _, options = layers
    places = dict.fromkeys(_paths(packaged), packaged_name(spec))
    if config is not None:
        places.update({path: f"{config}:{line}" for path, line in key_lines(config).items()})
    given = {name: value for name, value in options.items() if value is not None}
    return {**places, **dict.fromkeys(_paths(given), "options given")}


def _paths(layer: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in layer.items():
        yield f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{above}{key}.")


def _check_device(spec: ModelSpec, deployment: Deployment, registry: Registry, context: SourceContext) -> None:
    """Refuse a device that is not here before its weights are fetched. When they are here the worker does that: finding
    out takes torch, which this process needs for nothing else."""
    name = deployment.device
    if name is None or name == "cpu":
        return
    if present_weights(spec, deployment.weights, registry.weight_source, context) is None:
        from mstar.worker.build import pick_device

        pick_device(name)


def find_model(key: str, registry: Registry, config: str | Path | None = None) -> ModelSpec:
    """The model *key*. When there is none, the plugins that the deployment file *config* requires are the better
    explanation.

    :raises SetupError: there is none, or a plugin that *config* requires is missing.
    """
    try:
        return registry.model(key)
    except SetupError:
        if config is not None:
            required = _layer(config).get("required_plugins") or ()
            require_plugins(map(str, [required] if isinstance(required, str) else required), registry.plugins)
        raise


def config_model(config: str | Path) -> str | None:
    """The model that deployment file *config* is for, if it says so. Raises :class:`SetupError`: it cannot be read."""
    model = _layer(config).get("model")
    return None if model is None else str(model)


def read_deployment(text: str, where: str) -> dict[str, Any]:
    """One layer of a deployment from YAML *text*. *where* names it in errors. Keys are checked when it is merged."""
    try:
        layer = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise FaultFound(f"{where} is not valid YAML: {error}") from None
    if layer is None:
        return {}
    if not isinstance(layer, dict):
        raise FaultFound(f"{where} must be a mapping (key: value), not a {type(layer).__name__}")
    return layer


def packaged_deployment(spec: ModelSpec) -> dict[str, Any]:
    """The deployment that ships with *spec*'s package, as one layer for a merge.

    :raises SetupError: its file cannot be read, or is not a mapping.
    """
    if not isinstance(spec.deployment, str):
        return dict(spec.deployment)
    package, _, file = spec.deployment.partition(":")
    try:
        text = importlib.resources.files(package).joinpath(file).read_text(encoding="utf-8")
    except (ImportError, OSError) as error:
        raise FaultFound(f"the deployment of {spec.key!r} ({spec.deployment}) cannot be read: {error}") from error
    return read_deployment(text, spec.deployment)


def packaged_name(spec: ModelSpec) -> str:
    """How errors call the deployment that ships with *spec*'s package."""
    return spec.deployment if isinstance(spec.deployment, str) else f"deployment of {spec.key!r}"


def key_lines(config: str | Path) -> dict[str, int]:
    """The line of each key of YAML file *config*, from 1, by the key's path (``"scheduler.policy"``). Nothing for a
    file that is not YAML."""
    try:
        node = yaml.compose(Path(config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}  # reading it says so
    return dict(_lines(node))


def _lines(node: yaml.Node | None, above: str = "") -> Iterator[tuple[str, int]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield f"{above}{key.value}", key.start_mark.line + 1
        yield from _lines(value, f"{above}{key.value}.")


def file_deployment(spec: ModelSpec, config: str | Path | None) -> dict[str, Any]:
    """The layer in file *config*, which must be for *spec*; nothing without a file. A folder of weights in it is
    relative to the file's."""
    if config is None:
        return {}
    layer = _layer(config)
    if layer.get("model", spec.key) != spec.key:
        raise SetupError(f"{config} is the deployment of {layer['model']!r}, not of {spec.key!r}")
    weights = layer.get("weights")
    if isinstance(weights, str) and weights:
        beside = (Path(config).parent / Path(weights).expanduser()).absolute()
        if beside.exists() or HUB_ID.fullmatch(weights) is None:
            layer["weights"] = str(beside)
    return layer


def _layer(config: str | Path) -> dict[str, Any]:
    try:
        text = Path(config).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"the deployment file {config} cannot be read: {error}") from None
    return read_deployment(text, str(config))


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)

"""From a model's key to what its worker needs: deployment merged, weights in a local folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mstar.cluster.base import WorkerConfig
from mstar.licences import check_licence
from mstar.requirements import require_plugins
from mstar.runtime.deployment_files import (
    Written,
    file_deployment,
    key_paths,
    packaged_deployment,
    packaged_layout,
    packaged_name,
    read_file,
)
from mstar.spec.deployment import Deployment, merge_deployment
from mstar.spec.errors import DeploymentError, SetupError, WeightsError
from mstar.spec.knobs import read_options
from mstar.spec.model import ModelSpec
from mstar.weights.progress import progress_bar
from mstar.weights.sources import SourceContext, check_override, present_weights, resolve_weights

if TYPE_CHECKING:
    from mstar.registry import Registry
    from mstar.settings import Settings

__all__ = ["Say", "find_model", "merged_deployment", "prepare_config", "value_faults"]

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
    deployment, places = merged_deployment(spec, overrides, registry, config=config)
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
        cache=str(settings.cache),
    )


def merged_deployment(
    spec: ModelSpec, overrides: Mapping[str, Any], registry: Registry, *, config: str | Path | None = None
) -> tuple[Deployment, dict[str, str]]:
    """*spec*'s deployment (package defaults, then file *config*, then *overrides*), and where each key got its value.

    :raises SetupError: the file or a value is not as it must be.
    """
    packaged, written = packaged_deployment(spec), file_deployment(spec, config)
    layout = overrides.get("layout")
    layout = written.values.get("layout") if layout is None else layout
    places = _places(config, {packaged_name(spec): packaged}, written, overrides)
    try:
        placed = packaged_layout(spec, layout)
        places = _places(
            config, {packaged_name(spec): packaged, spec.layouts.get(str(layout), ""): placed}, written, overrides
        )
        layers = (packaged, placed, written.values, dict(overrides))
        deployment = merge_deployment(spec.key, *layers, knobs=spec.knobs.model_fields)
    except DeploymentError as error:
        raise DeploymentError([*written.faults, *error.faults], places) from None
    faults = value_faults(spec, deployment, registry, weights=overrides.get("weights") is None)
    if faults := [*written.faults, *faults]:
        raise DeploymentError(faults, places)
    return deployment, places


_NAMED: Mapping[str, tuple[str, Callable[[Deployment], str | None]]] = {
    "executor": ("mstar_executors", lambda deployment: deployment.executor),
    "scheduler.policy": ("mstar_schedulers", lambda deployment: deployment.scheduler.policy),
    "engine.runner": ("mstar_engines", lambda deployment: deployment.engine.runner),
    "engine.attention": ("mstar_attention_backends", lambda deployment: deployment.engine.attention),
}
"""Keys whose value is the name of something that plugins provide: through which hook, and where the value is."""


def value_faults(
    spec: ModelSpec, deployment: Deployment, registry: Registry, *, weights: bool
) -> list[tuple[str, str]]:
    """What no key's type can say of *deployment*: plugins that are not there, names that no plugin provides, options
    that *spec*'s model would not understand, weights that are not there. (Key's path, what is wrong with it.) Nothing
    is imported for it.

    :param weights: a file says which, not an option: then they are looked at, too.
    """
    faults: list[tuple[str, str]] = []
    if deployment.required_plugins:
        try:
            require_plugins(deployment.required_plugins, registry.plugins)
        except SetupError as error:
            faults.append(("required_plugins", str(error)))
    named = [(key, hook, value(deployment)) for key, (hook, value) in _NAMED.items()]
    named += [
        (f"resources.{resource}.backend", "mstar_attention_backends", values.get("backend"))
        for resource, values in deployment.resources.items()
    ]
    for key, hook, name in named:
        try:
            if isinstance(name, str):  # what is no name, the resource's own type refuses
                registry.require(hook, name)
        except SetupError as error:
            faults.append((key, str(error)))
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


def _places(
    config: str | Path | None,
    packaged: Mapping[str, Mapping[str, Any]],
    written: Written,
    options: Mapping[str, Any],
) -> dict[str, str]:
    """Where each key of the deployment got its value: in the package's own files (file → what it says), in the
    operator's, or in the options given."""
    places = {path: name for name, values in packaged.items() for path in key_paths(values)}
    places.update({path: f"{config}:{line}" for path, line in written.lines.items()})
    given = {name: value for name, value in options.items() if value is not None}
    return {**places, **dict.fromkeys(key_paths(given), "options given")}


def _check_device(spec: ModelSpec, deployment: Deployment, registry: Registry, context: SourceContext) -> None:
    """Refuse a device that is not here before its weights are fetched. When they are here the worker does that: finding
    out takes torch, which this process needs for nothing else."""
    name = deployment.device
    if name is None or name == "cpu" or deployment.executor == "ray":  # whose workers are on other machines
        return
    if present_weights(spec, deployment.weights, registry.weight_source, context) is None:
        from mstar.worker.machine import pick_device

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
            required = read_file(config).values.get("required_plugins")
            lines = [required] if isinstance(required, str) else required if isinstance(required, list) else []
            require_plugins(map(str, lines), registry.plugins)
        raise


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)

"""A model's processor by itself: made without its worker, and without its weights' being fetched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mstar.registry import load_object
from mstar.runtime.opening import find_model, merged_deployment
from mstar.spec.deployment import Deployment
from mstar.spec.errors import FaultFound, SetupError
from mstar.spec.knobs import read_options
from mstar.spec.model import ModelSpec
from mstar.spec.origin import describe, family_fault
from mstar.spec.processor import Processor, ProcessorContext
from mstar.weights.sources import SourceContext, present_weights

if TYPE_CHECKING:
    from mstar.registry import Registry
    from mstar.settings import Settings

__all__ = ["load_processor", "present_processor"]


def load_processor(spec: ModelSpec, deployment: Deployment, weights: Path | None, *, warm: bool = False) -> Processor:
    """*spec*'s processor. Takes its time: call it in a thread.

    :param weights: the folder that has them. :param warm: with what it would otherwise load at a first request.
    :raises SetupError: it cannot be made.
    """
    try:
        options = read_options(spec.options, deployment.model_kwargs)
        made: Processor = load_object(spec.processor)(ProcessorContext(spec, weights, options))
        if warm:
            made.warm()
    except SetupError:
        raise
    except Exception as error:
        what = f"the processor of {spec.key!r} could not be loaded"
        fault = family_fault(what, error, (spec.model, spec.processor))
        raise fault or FaultFound(f"{what}: {describe(error)}") from error
    return made


def present_processor(
    key: str, settings: Settings, overrides: Mapping[str, Any], registry: Registry, *, config: str | Path | None = None
) -> Processor | None:
    """The processor of model *key* if its weights are on this machine (or it has none); nothing is fetched or started.
    Arguments as for :func:`~mstar.runtime.service.open_service`. Call it in a thread.

    :raises SetupError: the file is not as it must be, or the processor cannot be made.
    """
    spec = find_model(key, registry, config)
    deployment = merged_deployment(spec, overrides, registry, config=config)[0]
    weights = None
    if spec.weights or deployment.weights is not None:
        weights = present_weights(spec, deployment.weights, registry.weight_source, SourceContext.of(settings))
        if weights is None:
            return None
    return load_processor(spec, deployment, weights)

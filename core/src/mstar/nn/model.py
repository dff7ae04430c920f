"""The worker side of a family: graph, resources, routes and nodes."""

from __future__ import annotations

import abc
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mstar.nn.node import Node
from mstar.spec.graph import Graph
from mstar.spec.knobs import Knobs
from mstar.spec.request import EngineRequest
from mstar.spec.resources import ResourceSpec

__all__ = ["BuildContext", "Demand", "Model", "Outcome", "Run"]


@dataclass(frozen=True)
class BuildContext:
    """What a model is built from.

    :param weights: local folder in the published layout; ``None`` for a model without weights.
    :param options: an instance of the spec's ``options`` class: what the deployment file says under ``model_kwargs``,
        checked, with its defaults filled in. A model reads them as attributes::

            class MyModel(Model):
                def __init__(self, context: BuildContext):
                    super().__init__(context)
                    self.window = context.options.window
    """

    weights: Path | None
    dtype: torch.dtype
    device: torch.device
    options: Any = field(default_factory=Knobs)


@dataclass(frozen=True)
class Run:
    """A route's answer to "what next": a walk, and what the route wants to see afterwards.

    :param signals: values whose contents it wants. :param tokens: samplers of whose tokens it wants those that the
        walk's loops judge (:class:`mstar.spec.graph.TokenStop`).
    :param values: inputs of the graph that are set before the walk begins, as arrays: what the route has made of what
        it saw. ``None`` for one that no walk reads any more: its memory is given back (pixels, once they are encoded).
    """

    walk: str
    signals: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a walk came to. *reason*: why its outermost loop ended (``done`` without one). *signals*: as
    lists/scalars. *tokens*: sampler → ids, the one that ended a loop included."""

    walk: str
    reason: str
    signals: Mapping[str, Any]
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Demand:
    """The most that a request will ever hold of one resource in one context: *tokens* for token-indexed resources,
    ignored by slot resources."""

    resource: str
    context: str = "main"
    tokens: int = 0


class Model(abc.ABC):
    """One model of a family. Cheap to construct: reads config files, builds no module, loads no tensor."""

    def __init__(self, context: BuildContext):
        self.context = context

    def check_options(self) -> None:
        """Called once the model is made, before anything of its weights is read, by whoever is about to load it and by
        ``mstar check``. Raises :class:`~mstar.spec.errors.DeploymentError` with the paths (``model_kwargs.lora.0``) of
        options that do not fit this model, as far as its configuration tells: files that they name, say."""

    @abc.abstractmethod
    def graph(self) -> Graph: ...

    def resources(self) -> Mapping[str, ResourceSpec]:
        return {}

    @abc.abstractmethod
    def build(self, node: str) -> Node:
        """The node's module. Called under ``torch.device("meta")`` when the family loads weights by name (see
        :mod:`mstar.weights.loader`); modules of models without weights create their own tensors."""

    def weights(self, node: str) -> Any:
        """The node's :class:`mstar.weights.names.WeightMap`: published tensor names → parameters. ``None``: the node
        has no published weights."""
        return None

    def loaded(self, node: str, module: Node) -> None:
        """Called once when *module*, the node's, has its weights, on its device, before anything packs, compiles or
        captures it: to fold adapters into them, or to keep what is computed from them instead (a weight norm multiplied
        out). No gradients are kept. Raises :class:`~mstar.spec.errors.SetupError` for what cannot
        be."""

    def vocabulary(self, sampler: str) -> Sequence[bytes] | None:
        """The bytes that each token of resource *sampler* stands for, by id; an empty one is never generated inside of
        a constraint. Called at the first request with a constraint (structured output). ``None``: what the processor
        reads, ``tokenizer.json`` in the weights' folder."""
        return None

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        """Worst-case needs, from which requests are admitted: a request starts only when all of it can be reserved, so
        that a started request never waits for memory that another started request holds (no deadlock, no preemption).
        Slot resources that the graph's calls use are added by the engine; name those that count tokens."""
        return ()

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        """What the partition does for this request. The default runs its walks in the order written."""
        for walk in self._walks_written[partition]:
            yield Run(walk)

    @cached_property
    def _walks_written(self) -> Mapping[str, Sequence[str]]:
        """By partition. A graph may take milliseconds to make, which no request is to wait for."""
        return {partition.name: partition.walks for partition in self.graph().partitions}

"""What a check of a deployment finds: sizes, faults, and how whatever goes wrong becomes a fault."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mstar.nn.model import Model
from mstar.spec.deployment import Deployment
from mstar.spec.errors import DeploymentError, MstarError
from mstar.spec.graph import Graph
from mstar.spec.model import ModelSpec
from mstar.spec.origin import describe
from mstar.spec.resources import ResourceSpec

__all__ = ["Checked", "Fault", "NodeSize", "PoolSize"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """One thing to change. *file*: where it stands (a deployment file, or ``"module:Class"``); *key*: which key of it,
    empty when the whole is meant; *line*: of a deployment file, from 1."""

    file: str
    key: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


@dataclass(frozen=True)
class NodeSize:
    """A node's module. *bytes*: of its parameters and buffers in the deployment's dtype; *step_bytes*: what its largest
    steps need on a GPU, beside the reserve that every model has."""

    name: str
    module: str
    parameters: int
    bytes: int
    step_bytes: int = 0


@dataclass(frozen=True)
class PoolSize:
    """A resource's pool. *units*: pages or slots; *owners*: contexts that may be open at once; *full_requests*: how
    many requests of the longest length it holds together, ``None`` when length does not matter."""

    name: str
    kind: str
    units: int
    bytes: int
    owners: int
    full_requests: int | None


@dataclass
class Checked:
    """What a check found. ``graph`` and what follows it are there as far as the faults allow.

    :ivar complete: every check ran; else further faults may show once these are mended.
    :ivar left_out: keys without which model and processor were made, because their values are at fault. What is made
        so may fail for want of them: that is no fault of its own.
    :ivar remarks: what could not be checked here though it is no fault, in sentences.
    """

    spec: ModelSpec
    weights: Path | None = None
    deployment: Deployment | None = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    model: Model | None = None
    graph: Graph | None = None
    declared: Mapping[str, ResourceSpec] = field(default_factory=dict)
    nodes: list[NodeSize] = field(default_factory=list)
    pools: list[PoolSize] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    complete: bool = False
    left_out: tuple[str, ...] = ()
    remarks: list[str] = field(default_factory=list)

    @contextmanager
    def stage(self, file: str, key: str = "") -> Iterator[None]:
        """Whatever goes wrong inside is a fault of *file*, and the check goes on after it. A family's own code may
        raise anything here: that is what a check is for."""
        try:
            yield
        except Exception as error:
            if self.left_out and file in (self.spec.model, self.spec.processor):
                log.debug("%s without %s", file, ", ".join(self.left_out), exc_info=error)
            else:
                self.faults += self._faults_of(error, file, key)

    def _faults_of(self, error: Exception, file: str, key: str) -> list[Fault]:
        if isinstance(error, DeploymentError):
            return [Fault(file, path, message) for path, message in error.faults]
        if isinstance(error, MstarError):
            return [Fault(file, key, str(error))]
        log.debug("%s", file, exc_info=error)
        return [Fault(file, key, describe(error, (self.spec.model, self.spec.processor)))]

    def has_fault(self, file: str, key: str) -> bool:
        return any((fault.file, fault.key) == (file, key) for fault in self.faults)

"""Checks of a model's graph, its deployment and what its nodes return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar.engine.base import Runner
from mstar.engine.step import declared_shape
from mstar.graph.values import torch_dtype
from mstar.nn.model import BuildContext, Model
from mstar.nn.node import Node, Packed, Sampled, Step
from mstar.registry import load_object
from mstar.runtime.deployment_files import packaged_deployment, packaged_layout
from mstar.spec.check import check_graph
from mstar.spec.deployment import merge_deployment
from mstar.spec.errors import GraphError, SetupError, nearest
from mstar.spec.graph import CLIENT, Entry, Graph, NodeSpec, Port
from mstar.spec.knobs import read_options
from mstar.spec.model import LiveInput, ModelSpec
from mstar.spec.placement import placement_faults
from mstar.testing.conformance.subject import Subject, fail

__all__ = ["GraphChecks"]


class GraphChecks:
    """The graph is sound, the deployment fits it, and nodes return what their ports say."""

    def test_deployment(self, mstar_model: Subject) -> None:
        """The defaults that ship with the model are a valid deployment file, and so is each layout on top of them."""
        spec = mstar_model.spec
        for layout in (None, *spec.layouts):
            try:
                deployment = merge_deployment(spec.key, packaged_deployment(spec), packaged_layout(spec, layout))
                read_options(spec.options, deployment.model_kwargs)
            except SetupError as error:
                what = "default deployment" if layout is None else f"layout {layout!r}"
                fail(f"the {what} of {spec.key!r} is not valid: {error}")

    def test_graph(self, mstar_model: Subject) -> None:
        """The graph has no fault (promise P2), and building it twice gives the same."""
        mstar_model.require_checkpoint()
        spec = mstar_model.spec
        try:
            deployment = merge_deployment(spec.key, packaged_deployment(spec))
            options = read_options(spec.options, deployment.model_kwargs)
        except SetupError:
            pytest.skip("the default deployment is not valid: see test_deployment")
        context = BuildContext(mstar_model.weights, torch.float32, torch.device("cpu"), options)
        model: Model = load_object(spec.model)(context)
        graph, resources = model.graph(), model.resources()
        try:
            check_graph(spec.key, graph, resources)
        except GraphError as error:
            fail(str(error))
        for fault in (*_live_faults(spec.live, graph), *_layout_faults(spec, graph)):
            fail(f"{spec.key!r}: {fault}")
        if model.graph() != graph or dict(model.resources()) != dict(resources):
            fail(f"{spec.model}: graph() and resources() must return the same each time they are called")

    def test_it_loads(self, mstar_model: Subject) -> None:
        """A worker can be built with the model's own defaults: weights, resources, placement, scheduler."""
        mstar_model.require_checkpoint()
        error = mstar_model.load_fault
        if error is not None:
            kind = "" if isinstance(error, SetupError) else f"{type(error).__name__}: "
            fail(f"{mstar_model.spec.key!r} does not load from {mstar_model.weights}: {kind}{error}")

    def test_nodes_return_what_their_ports_say(self, mstar_model: Subject) -> None:
        """Dtypes and shapes of outputs are those of the graph's ports."""
        driver = mstar_model.driver()
        nodes = {driver.worker.engine.nodes[n.name]: n for n in driver.worker.plan.graph.nodes}
        watch = _PortWatch(driver.worker.engine.runner, nodes)
        driver.worker.engine.runner = watch
        for request, example in mstar_model.examples(3, seed=31).items():
            driver.submit(request, example)
        driver.run()
        if watch.faults:
            fail(
                f"{mstar_model.spec.key!r}: nodes break their ports' promises:\n  " + "\n  ".join(sorted(watch.faults))
            )


def _live_faults(live: Sequence[LiveInput], graph: Graph) -> Iterator[str]:
    """Where the spec's streams from the client are not the graph's."""
    streams = {stream.name: stream for stream in graph.streams_from(CLIENT)}
    for item in live:
        stream = streams.get(item.name)
        if stream is None:
            yield f"spec.live: the graph has no stream {item.name!r} from the client{nearest(item.name, streams)}"
        elif (item.modality, item.shape) != (stream.modality, stream.port.shape):
            yield (
                f"spec.live: {item.name!r} is {item.modality} of shape {item.shape}, the graph's stream "
                f"{stream.modality} of shape {stream.port.shape}"
            )


def _layout_faults(spec: ModelSpec, graph: Graph) -> Iterator[str]:
    """What of the package's layouts does not fit the graph."""
    for layout in spec.layouts:
        try:
            deployment = merge_deployment(spec.key, packaged_deployment(spec), packaged_layout(spec, layout))
        except SetupError:
            continue  # test_deployment says so
        for key, fault in placement_faults(deployment.placement, graph):
            yield f"layout {layout!r}: {key}: {fault}"


class _PortWatch(Runner):
    """Compares what nodes return with their entries' ports."""

    def __init__(self, inner: Runner, nodes: Mapping[Node, NodeSpec]):
        self.inner, self.nodes = inner, nodes
        self.faults: set[str] = set()

    def run(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        outputs = self.inner.run(node, entry, step, inputs)
        spec = self.nodes[node]
        where = f"node {spec.name!r} ({type(node).__name__}) entry {entry!r}"
        self.faults.update(f"{where}: {fault}" for fault in _faults(spec.entry(entry), step, outputs))
        return outputs


def _faults(entry: Entry, step: Step, outputs: Mapping[str, Any]) -> Sequence[str]:
    ports = {port.name: port for port in entry.outputs}
    known = ", ".join(ports) or "none"
    faults = [
        f"returns {name!r}, which is no output port; its ports are {known}" for name in outputs.keys() - ports.keys()
    ]
    for name, port in ports.items():
        if name not in outputs:
            faults.append(f"returned no {name!r}, which is an output port")
            continue
        for tensor in _tensors(outputs[name]):
            faults += _port_faults(port, tensor, step)
    return faults


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Sampled):
        return [value.ids]
    if isinstance(value, Packed):
        return [value.data]
    return list(value) if isinstance(value, list | tuple) else [value]


def _port_faults(port: Port, tensor: Tensor, step: Step) -> list[str]:
    wanted = torch_dtype(port.dtype, step.dtype)
    if tensor.dtype != wanted:
        return [
            f"port {port.name!r} is declared {port.dtype}, the node returned {str(tensor.dtype).removeprefix('torch.')}"
            ": change the Port or convert in the node"
        ]
    shape = (None, *port.shape) if port.layout == "stacked" else port.shape
    fits = len(shape) == tensor.ndim and all(
        not isinstance(want, int) or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if fits:
        return []
    return [f"port {port.name!r} is declared {declared_shape(port)}, the node returned shape {tuple(tensor.shape)}"]

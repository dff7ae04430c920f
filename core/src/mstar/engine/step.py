"""Gathers the rows of a step into what a node receives, and splits what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.graph.calls import CallRun
from mstar.graph.program import CallOp
from mstar.graph.values import Ref, gather_hosted, gather_list, gather_packed, gather_stacked, torch_dtype
from mstar.nn.node import Packed, Sampled, Step
from mstar.resources.staging import Lane, Late, Stage, to_device
from mstar.spec.graph import Entry, Port

__all__ = ["NodeFault", "Outcome", "RowResult", "Work", "declared_shape", "gather", "make_step", "split"]


class NodeFault(RuntimeError):
    """A node broke its entry's contract (a missing port, a wrong number of rows)."""


@dataclass(slots=True)
class Work:
    """One call's share of a step: *tokens* items from *start* of its primary packed input. *known*: their ids were
    known to the host when the step was launched. *again*: it is all of a call that follows one like it."""

    call: CallRun
    start: int
    tokens: int
    complete: bool
    known: bool = False
    again: bool = False


@dataclass(slots=True)
class RowResult:
    """What a step gave one call: outputs by port (``None`` for a chunk that is not the last), log-probabilities if the
    request asked for them, known when the step has landed."""

    outputs: dict[str, Ref] | None
    logprobs: list[Any] | None = None


@dataclass(slots=True)
class Outcome:
    """What a launched step will bring to the host.

    :param ids: sampled tokens, of which a negative one marks a row that failed.
    :param reports: read log-probabilities.
    """

    results: list[RowResult]
    ids: list[Late] = field(default_factory=list)
    reports: list[Callable[[], Sequence[Any]]] = field(default_factory=list)


class _UnknownOnHost(Sequence[Any]):
    """What a captured step's rows have differs from replay to replay: a graph must not be made from it."""

    def __init__(self, rows: int):
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: Any) -> Any:
        raise NodeFault("the node reads its rows' lengths on the host")


def make_step(
    entry: str,
    work: Sequence[Work],
    views: Mapping[str, Any],
    stage: Stage,
    device: torch.device,
    dtype: torch.dtype,
) -> Step:
    """What the node of *entry* is told of a step of *work*. Rows and tokens that pad a captured step are counted in."""
    lane = stage.lane
    if lane is not None and lane.tokens == lane.rows:
        # nothing of it differs from step to step: it is on the device from the lane's first one on
        offsets: Tensor = stage.keep("step.offsets", lambda: torch.arange(lane.rows + 1, device=device))
        complete: Sequence[bool] = [w.complete for w in work] + [True] * (lane.rows - len(work))
        return Step([1] * lane.rows, offsets, offsets[:-1], complete, views, device, dtype, lane, entry)
    padded = stage.lengths(np.array([w.tokens for w in work], dtype=np.int64))
    ends = np.zeros(len(padded) + 1, dtype=np.int64)
    np.cumsum(padded, out=ends[1:])
    offsets = stage.put("step.offsets", ends)
    single = bool((padded == 1).all())
    last = offsets[:-1] if single else stage.put("step.last", ends[1:] - 1)
    lengths: Sequence[int] = padded.tolist()
    complete = [w.complete for w in work] + [True] * (len(lengths) - len(work))
    if lane is not None:
        lengths = complete = _UnknownOnHost(len(lengths))
    return Step(lengths, offsets, last, complete, views, device, dtype, lane, entry)


def gather(entry: Entry, op: CallOp, work: Sequence[Work], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The node's keyword arguments: one tensor (or list, or :class:`Packed`) per input port."""
    primary = next((p for p in entry.inputs if p.name == op.primary), None)
    return {port.name: _gather_port(port, primary, entry, work, device, dtype) for port in entry.inputs}


def blank_inputs(entry: Entry, lane: Lane, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Zeros for an entry whose inputs are of known shape, as many as *lane* has. An optional one of unknown shape is
    left out."""
    inputs: dict[str, Any] = {}
    for port in entry.inputs:
        if port.optional and not all(isinstance(size, int) for size in port.shape):
            inputs[port.name] = None
            continue
        shape = (lane.tokens, *port.shape[1:]) if port.layout == "packed" else (lane.rows, *port.shape)
        inputs[port.name] = torch.zeros(shape, dtype=torch_dtype(port.dtype, dtype), device=device)  # type: ignore[arg-type]
    return inputs


def _gather_port(
    port: Port, primary: Port | None, entry: Entry, work: Sequence[Work], device: torch.device, dtype: torch.dtype
) -> Any:
    values: list[Any] = [w.call.inputs.get(port.name) for w in work]
    missing = [v for v in values if v is None]
    if missing:
        if len(missing) < len(values):
            raise NodeFault(f"port {port.name!r} is given by some rows of a step and left out by others")
        return None
    if not isinstance(values[0], Ref):
        return to_device(values, device, torch_dtype(port.dtype, dtype))
    hosted = values[0].base.is_cpu and device.type != "cpu"  # an input that stays on the host, or what the host made
    if port.layout == "stacked":
        return _cast(gather_hosted(values, device, True) if hosted else gather_stacked(values), port, dtype)
    if port.layout == "list":
        return [_cast(_on(t, device), port, dtype) for t in gather_list(values)]
    aligned = primary is not None and port.shape[0] == primary.shape[0]
    if aligned and entry.chunk is not None:
        values = [v if v.row else v.part(w.start, w.start + w.tokens) for v, w in zip(values, work, strict=True)]
    data = _cast(gather_hosted(values, device) if hosted else gather_packed(values), port, dtype)
    return data if aligned else Packed(data, [v.length for v in values])


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """*tensor* on *device*: what the host made (codes) goes there here, the rows of a step together."""
    return to_device(tensor, device) if tensor.device.type == "cpu" != device.type else tensor


def _cast(tensor: Tensor, port: Port, dtype: torch.dtype) -> Tensor:
    wanted = torch_dtype(port.dtype, dtype)
    return tensor if tensor.dtype == wanted else tensor.to(wanted)


def split(entry: Entry, work: Sequence[Work], outputs: Mapping[str, Any]) -> Outcome:
    """One result per row. Ports that the host needs are sent there with one transfer each."""
    results = [RowResult({} if w.complete else None) for w in work]
    outcome = Outcome(results)
    hosted = set[str]().union(*[op.host for op in {w.call.op for w in work}])
    for port in entry.outputs:
        if port.name not in outputs:
            raise NodeFault(f"returned no {port.name!r}; it returned {sorted(outputs)}")
        value = outputs[port.name]
        sampled = isinstance(value, Sampled)
        if sampled:
            report = value.report and value.report()
            if report is not None:
                outcome.reports.append(report)
            value = value.ids
        late = _split_port(port, work, value, results, sampled or port.name in hosted)
        if sampled and late is not None:
            outcome.ids.append(late)
    return outcome


def _split_port(port: Port, work: Sequence[Work], value: Any, results: list[RowResult], hosted: bool) -> Late | None:
    name = port.name
    if port.layout == "list":
        _expect(len(value), len(work), port, f"a list of {len(value)}")
        for result, tensor in zip(results, value, strict=True):
            if result.outputs is not None:
                result.outputs[name] = Ref(
                    tensor, 0, tensor.shape[0] if tensor.ndim else 1, late=Late(tensor) if hosted else None
                )
        return None
    data = value.data if isinstance(value, Packed) else value
    late = Late(data) if hosted else None
    if port.layout == "stacked":
        _expect(_first(data), len(work), port, f"shape {tuple(data.shape)}")
        for i, result in enumerate(results):
            if result.outputs is not None:
                result.outputs[name] = Ref(data, i, i + 1, True, None, late)
    else:
        lengths = value.lengths if isinstance(value, Packed) else [w.tokens for w in work]
        _split_packed(port, work, data, lengths, results, late)
    return late


def _split_packed(
    port: Port,
    work: Sequence[Work],
    data: Tensor,
    lengths: Sequence[int],
    results: list[RowResult],
    late: Late | None,
) -> None:
    _expect(_first(data), sum(lengths), port, f"shape {tuple(data.shape)}")
    start = 0
    for w, length, result in zip(work, lengths, results, strict=True):
        ref = Ref(data, start, start + length, late=late)
        start += length
        partial = w.call.partial
        if result.outputs is None:
            if partial is None:
                partial = w.call.partial = {}
            partial.setdefault(port.name, []).append(ref.tensor())
        elif partial is not None and port.name in partial:
            result.outputs[port.name] = Ref.whole(torch.cat([*partial[port.name], ref.tensor()]))
        else:
            result.outputs[port.name] = ref


def _first(data: Tensor) -> int:
    return data.shape[0] if data.ndim else -1


def _expect(got: int, wanted: int, port: Port, returned: str) -> None:
    if got == wanted:
        return
    what = {"list": "tensors, one a row", "stacked": "rows", "packed": "items, those of all rows"}[port.layout]
    raise NodeFault(
        f"returned {returned} for port {port.name!r}, which is declared {declared_shape(port)}: "
        f"expected {wanted} {what}"
    )


def declared_shape(port: Port) -> str:
    """What a node returns under *port* for a whole step, in words."""
    shape = ", ".join(map(str, port.shape)) + ("," if len(port.shape) == 1 and port.layout != "stacked" else "")
    return {
        "stacked": f"stacked ({', '.join(['rows', *map(str, port.shape)])})",
        "packed": f"packed ({shape}), all rows in one",
        "list": f"a list of ({shape})",
    }[port.layout]

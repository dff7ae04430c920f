"""From published tensors to a module's parameters, without a second copy in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from mstar.spec.errors import WeightsError, nearest
from mstar.weights.checkpoint import Checkpoint, open_checkpoint
from mstar.weights.names import Placement, WeightMap
from mstar.weights.torch_file import TorchCheckpoint

__all__ = ["Progress", "load", "mismatches"]

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all) as the loading goes on."""

_Checkpoint = Checkpoint | TorchCheckpoint

_SHOWN = 10


def load(
    module: nn.Module,
    weightmap: WeightMap,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> None:
    """Give *module*, built on the meta device, its parameters and buffers on *device* and fill them from *folder*.

    Floating-point parameters become *dtype* (but for those that *weightmap* keeps in float32); tied ones stay tied. Of
    what tensor parallelism divides, only this rank's share is read.
    Non-persistent buffers are computed by their module's ``compute_buffers(device) -> {name: tensor}``. Afterwards the
    module is in evaluation mode. Nothing is allocated before names and shapes have been found to match.

    :raises WeightsError: the checkpoint is incomplete or damaged, a parameter is not filled, a tensor is not used, or a
        shape differs (promise P11).
    """
    checkpoint = open_checkpoint(folder / weightmap.folder)
    faults = _faults(_targets(module), weightmap, checkpoint)
    if faults:
        raise WeightsError(
            f"the weights in {folder / weightmap.folder} do not match the model:\n  " + "\n  ".join(faults)
        )
    _materialise(module, weightmap, device, dtype)
    targets = _targets(module)
    total = sum(_share_bytes(checkpoint, place) for place in weightmap.placements)
    report = progress or (lambda done, total: None)
    with torch.no_grad():
        checkpoint.read(
            ((place.published, _rows(targets[place.target], place), place.cut) for place in weightmap.placements),
            lambda done: report(done, total),
        )
        for target, start, rows in weightmap.zeros:
            targets[target][start : start + rows].zero_()
    module.eval()


def mismatches(module: nn.Module, weightmap: WeightMap, folder: Path) -> list[str]:
    """What :func:`load` would raise for, as lines of text: parameters that nothing fills, tensors that nothing uses,
    those of the wrong shape or type. Reads only the headers of the files in *folder*.

    :raises WeightsError: the checkpoint is incomplete or damaged.
    """
    return _faults(_targets(module), weightmap, open_checkpoint(folder / weightmap.folder))


def _faults(targets: dict[str, Tensor], weightmap: WeightMap, checkpoint: _Checkpoint) -> list[str]:
    return [
        *_unfilled(targets, weightmap, checkpoint),
        *_unused(weightmap, checkpoint),
        *_mismatched(targets, weightmap, checkpoint),
    ]


def _targets(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(remove_duplicate=False)) | dict(_persistent_buffers(module))


def _persistent_buffers(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    kept = module.state_dict(keep_vars=True)
    return ((name, buffer) for name, buffer in module.named_buffers(remove_duplicate=False) if name in kept)


def _rows(target: Tensor, place: Placement) -> Tensor:
    return target if place.rows is None else target[place.start : place.start + place.rows]


def _share_bytes(checkpoint: _Checkpoint, place: Placement) -> int:
    info = checkpoint.tensors[place.published]
    return info.nbytes if place.cut is None else info.nbytes * place.cut.length // place.cut.size


def _unfilled(targets: dict[str, Tensor], weightmap: WeightMap, checkpoint: _Checkpoint) -> list[str]:
    """Parameters, or rows of fused ones, that nothing in the checkpoint fills."""
    absent = [place for place in weightmap.placements if place.published not in checkpoint.tensors]
    spare = _spare(weightmap, checkpoint)
    faults = [
        f"{place.target}: no tensor {place.published!r}{_hint(place.published, spare)}" for place in absent[:_SHOWN]
    ] + [place.target for place in absent[_SHOWN:]]
    filled: dict[int, int] = {}
    for place in weightmap.placements:
        target = targets.get(place.target)
        if target is None:
            faults.append(f"{place.target}: the map names it, the module has no such parameter")
            continue
        filled[id(target)] = filled.get(id(target), 0) + (_length(target) if place.rows is None else place.rows)
    for name, _, rows in weightmap.zeros:
        if name in targets:
            filled[id(targets[name])] = filled.get(id(targets[name]), 0) + rows
    for name, target in targets.items():
        if filled.get(id(target), 0) != _length(target):
            faults.append(f"{name}: the map fills {filled.get(id(target), 0)} of {_length(target)} rows")
    return _listed("parameter(s) not filled", faults)


def _unused(weightmap: WeightMap, checkpoint: _Checkpoint) -> list[str]:
    spare = _spare(weightmap, checkpoint)
    missing = [p.published for p in weightmap.placements if p.published not in checkpoint.tensors]
    faults = []
    for name in spare[:_SHOWN]:
        info = checkpoint.tensors[name]
        faults.append(f"{name} {list(info.shape)} in {info.file.name}{_hint(name, missing)}")
    return _listed("tensor(s) not used", faults + spare[_SHOWN:])


def _spare(weightmap: WeightMap, checkpoint: _Checkpoint) -> list[str]:
    """Tensors that the map neither wants nor ignores."""
    wanted = {place.published for place in weightmap.placements}
    return [name for name in checkpoint.tensors if name not in wanted and not weightmap.ignores(name)]


def _mismatched(targets: dict[str, Tensor], weightmap: WeightMap, checkpoint: _Checkpoint) -> list[str]:
    """Of those that are there on both sides."""
    faults = []
    for place in weightmap.placements:
        if place.published not in checkpoint.tensors or place.target not in targets:
            continue
        info, want = checkpoint.tensors[place.published], _rows(targets[place.target], place)
        shape = tuple(want.shape) if place.cut is None else place.cut.unshape(tuple(want.shape))
        if info.shape != shape:
            faults.append(f"{place.published} in {info.file.name} is {list(info.shape)}, expected {list(shape)}")
        elif info.floating != want.is_floating_point():
            faults.append(f"{place.published} in {info.file.name} holds {info.dtype}, expected {want.dtype}")
    return _listed("tensor(s) of the wrong shape or type", faults)


def _length(target: Tensor) -> int:
    return target.shape[0] if target.dim() else 1


def _hint(name: str, candidates: list[str]) -> str:
    """The nearest name if there is one near, not a list of all. Slow among thousands: for the faults shown only."""
    hint = nearest(name, candidates)
    return hint if hint.startswith("; did") else ""


def _listed(what: str, faults: list[str]) -> list[str]:
    if not faults:
        return []
    more = [f"  … and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
    return [f"{len(faults)} {what}:", *(f"  {fault}" for fault in faults[:_SHOWN]), *more]


def _materialise(module: nn.Module, weightmap: WeightMap, device: torch.device, dtype: torch.dtype) -> None:
    """Replace meta tensors by empty ones on *device*; parameters that were one object stay one object."""
    made: dict[int, nn.Parameter] = {}
    for path, owner in module.named_modules():
        computed = owner.compute_buffers(device) if hasattr(owner, "compute_buffers") else {}
        for name, old in owner.named_parameters(recurse=False, remove_duplicate=False):
            if id(old) not in made:
                target = f"{path}.{name}" if path else name
                made[id(old)] = nn.Parameter(_empty(old, target, weightmap, device, dtype), requires_grad=False)
            setattr(owner, name, made[id(old)])
        for name, old_buffer in owner.named_buffers(recurse=False):
            target = f"{path}.{name}" if path else name
            if name in computed:
                setattr(owner, name, computed[name])
            elif name not in owner._non_persistent_buffers_set:
                setattr(owner, name, _empty(old_buffer, target, weightmap, device, dtype))
            elif old_buffer.is_meta:
                raise WeightsError(f"buffer {target} is neither published nor made by {type(owner).__name__}")
            else:
                setattr(owner, name, old_buffer.to(device))


def _empty(old: Tensor, target: str, weightmap: WeightMap, device: torch.device, dtype: torch.dtype) -> Tensor:
    if old.is_floating_point():
        kind = torch.float32 if weightmap.keeps_float32(target) else dtype
    else:
        kind = old.dtype
    return torch.empty(old.shape, dtype=kind, device=device)

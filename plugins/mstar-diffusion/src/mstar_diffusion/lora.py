"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) folded into the weights when these are loaded.

A folded adapter costs nothing when pictures are made. Sums are taken in float32 and rounded once.

Layouts: PEFT (``base_model.model.NAME.lora_A.weight``), diffusers (``transformer.NAME.lora_A.weight``), the authors'
names (``diffusion_model.NAME.lora_A.weight``, also with ``lora_down`` and ``lora_up``), kohya's (``lora_unet_`` and the
name with underscores). What an adapter adds is ``alpha / rank * up @ down``: *alpha* is a tensor of the file, else
one of the configuration in its head or beside it (:mod:`mstar_diffusion.lora_config`), else the rank.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mstar.nn.shards import Cut
from mstar.spec.errors import DeploymentError, SetupError
from mstar.weights.names import Placement, WeightMap
from mstar_diffusion.knobs import Lora
from mstar_diffusion.lora_config import AdapterConfig
from mstar_diffusion.lora_file import Layer, adapter_file, read_layers
from mstar_diffusion.native import NativeNames

__all__ = ["Adapter", "check_adapters", "check_files", "fold", "read_adapter"]

_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.")
_FLAT = ("lora_unet_", "lora_transformer_")


@dataclass(frozen=True)
class Adapter:
    """Of one layer: *down* ``[rank, in]``, *up* ``[out, rank]``, and the factor of their product."""

    down: Tensor
    up: Tensor
    factor: float

    def delta(self, device: torch.device) -> Tensor:
        """float32 ``[out, in]``."""
        return self.up.to(device, torch.float32) @ self.down.to(device, torch.float32) * self.factor


def check_files(adapters: Sequence[Lora]) -> None:
    """Raises :class:`DeploymentError` with the option of every one of *adapters* whose file is not there."""
    _each(adapters, lambda lora: adapter_file(Path(lora.path)))


def check_adapters(module: nn.Module, weightmap: WeightMap, adapters: Sequence[Lora], native: NativeNames) -> None:
    """Whether *adapters* have their places in *module*, which needs no memory (the meta device). No tensor is read.

    :raises DeploymentError: with the option of every adapter that does not fit.
    """
    model = _Layers(module, weightmap, native)

    def check(lora: Lora) -> None:
        file = adapter_file(Path(lora.path))
        model.targets(file, read_layers(file))
        AdapterConfig.read(file)

    _each(adapters, check)


def _each(adapters: Sequence[Lora], check: Callable[[Lora], object]) -> None:
    """Raise what *check* finds wrong with each."""
    faults = []
    for number, lora in enumerate(adapters):
        try:
            check(lora)
        except SetupError as error:
            faults.append((f"model_kwargs.lora.{number}.path", str(error)))
    if faults:
        raise DeploymentError(faults)


def fold(module: nn.Module, weightmap: WeightMap, adapters: Sequence[Lora], native: NativeNames) -> None:
    """Add *adapters* to *module*'s parameters, which have been loaded by *weightmap*.

    :raises SetupError: a file cannot be read, or holds what has no place in this model; names the file and the tensor.
    """
    if not adapters:
        return
    model = _Layers(module, weightmap, native)
    for lora in adapters:
        file = adapter_file(Path(lora.path))
        targets = model.targets(file, read_layers(file))
        for name, adapter in read_adapter(file).items():
            if not targets[name].add(adapter, lora.scale):
                raise SetupError(
                    f"the adapter {file}: with what it adds, weights of {name!r} are too large for their type"
                )


@dataclass(frozen=True)
class _Target:
    """Where an adapter's change of one of the file's layers goes: *rows* of parameters, one below the other, of which a
    rank may have a part (*cuts*)."""

    rows: Sequence[Tensor]
    cuts: Sequence[Cut | None]
    swapped: bool

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The published ones."""
        return [_whole(tuple(own.shape), cut) for own, cut in zip(self.rows, self.cuts, strict=True)]

    def misfit(self, layer: Layer) -> str | None:
        shapes = self.shapes
        if len(shapes[0]) != 2:
            return (
                f"tensor {layer.tensors['lora_A']!r} is for a parameter of shape {list(shapes[0])}, which is no matrix"
            )
        return layer.misfit(sum(shape[0] for shape in shapes), shapes[0][1])

    def add(self, adapter: Adapter, scale: float) -> bool:
        """Whether all weights are numbers yet."""
        delta = adapter.delta(self.rows[0].device) * scale
        if self.swapped:
            delta = torch.cat(delta.chunk(2)[::-1])
        with torch.no_grad():
            changes = torch.split(delta, [shape[0] for shape in self.shapes])
            for own, cut, change in zip(self.rows, self.cuts, changes, strict=True):
                own.copy_(own.float() + (change if cut is None else cut.of(change)))
            return all(bool(own.isfinite().all()) for own in self.rows)


class _Layers:
    """The layers of a denoiser that adapters may change, by the published names and the authors'."""

    def __init__(self, module: nn.Module, weightmap: WeightMap, native: NativeNames):
        weights = [place for place in weightmap.placements if place.published.endswith(".weight")]
        self._places = {place.published.removesuffix(".weight"): place for place in weights}
        self._parameters, self._native = dict(module.named_parameters()), native

    def targets(self, file: Path, layers: Mapping[str, Layer]) -> dict[str, _Target]:
        """Where each of *layers*, those of *file*, goes.

        :raises SetupError: one is none of the model's, or of another shape.
        """
        _check_names(file, list(layers), [*self._places, *self._native])
        found = {name: self._target(name) for name in layers}
        wrong = [fault for name, layer in layers.items() if (fault := found[name].misfit(layer)) is not None]
        if wrong:
            many = f" ({len(wrong)} of {len(layers)} layers do not fit)" if len(layers) > 1 else ""
            raise SetupError(f"the adapter {file}: {wrong[0]}{many}")
        return found

    def _target(self, name: str) -> _Target:
        plain = _plain(name, (*self._places, *self._native))
        own = plain in self._places
        places = [self._places[part] for part in ((plain,) if own else self._native[plain].published)]
        rows = [_rows(self._parameters, place) for place in places]
        return _Target(rows, [place.cut for place in places], not own and self._native[plain].swapped)


def _check_names(file: Path, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse an adapter with layers that this model lacks: how many, and what the first of them could have been."""
    strange = [name for name in names if _plain(name, known) not in known]
    if strange:
        (near,) = difflib.get_close_matches(_plain(strange[0], known), known, n=1, cutoff=0.0)
        raise SetupError(
            f"the adapter {file}: {strange[0]!r} is no layer of this model's denoiser; did you mean {near!r}? "
            f"({len(strange)} of {len(names)} layers are unknown)"
        )


def read_adapter(file: Path) -> dict[str, Adapter]:
    """The adapters in *file* by their layers' names as the file has them."""
    layers, config = read_layers(file), AdapterConfig.read(file)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise SetupError(f"the adapter {file} cannot be read: {error}") from error
    return {name: _adapter(file, name, layer, tensors, config) for name, layer in layers.items()}


def _adapter(file: Path, name: str, layer: Layer, tensors: Mapping[str, Tensor], config: AdapterConfig) -> Adapter:
    found = {part: tensors[key] for part, key in layer.tensors.items()}
    for part, tensor in found.items():
        if not tensor.float().isfinite().all():  # of eight bits PyTorch cannot tell itself
            raise SetupError(f"the adapter {file}: {part} of {name!r} has values that are no numbers (NaN or infinity)")
    factor = float(found["alpha"]) / layer.rank if "alpha" in found else config.factor(_unprefixed(name), layer.rank)
    return Adapter(found["lora_A"], found["lora_B"], factor)


def _whole(own: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
    """The published shape of what a rank has *own* of."""
    return own if cut is None else cut.unshape(own)


def _plain(name: str, known: Iterable[str]) -> str:
    """The layer's name without what trainers put before it."""
    for prefix in _FLAT:
        if name.startswith(prefix):
            flat = name.removeprefix(prefix)
            return next((layer for layer in known if layer.replace(".", "_") == flat), flat)
    return _unprefixed(name)


def _unprefixed(name: str) -> str:
    for prefix in _stripped(name):
        name = name.removeprefix(prefix)
    return name


def _stripped(name: str) -> Iterator[str]:
    """Prefixes of *name*: PEFT's may stand before another's."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            yield prefix
            name = name.removeprefix(prefix)


def _rows(targets: Mapping[str, Tensor], place: Placement) -> Tensor:
    target = targets[place.target]
    return target if place.rows is None else target[place.start : place.start + place.rows]

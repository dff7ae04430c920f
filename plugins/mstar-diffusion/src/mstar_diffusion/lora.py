"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) folded into the weights when these are loaded.

A folded adapter costs nothing when pictures are made. Sums are taken in float32 and rounded once.

Layouts: PEFT (``base_model.model.NAME.lora_A.weight``), diffusers (``transformer.NAME.lora_A.weight``), the authors'
names (``diffusion_model.NAME.lora_A.weight``, also with ``lora_down`` and ``lora_up``), kohya's (``lora_unet_`` and the
name with underscores). What an adapter adds is ``alpha / rank * up @ down``: *alpha* is a tensor of the file, else
one of the configuration in its head or beside it (:mod:`mstar_diffusion.lora_config`), else the rank.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from mstar_diffusion.native import NativeNames

__all__ = ["Adapter", "check_files", "fold", "read_adapter"]

_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.")
_FLAT = ("lora_unet_", "lora_transformer_")
_SUFFIX = re.compile(
    r"(?P<name>.+?)\.(?:(?P<way>lora_A|lora_B|lora_down|lora_up)(?:\.[^.]+)?\.weight|(?P<alpha>alpha))", re.ASCII
)


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
    faults = []
    for number, lora in enumerate(adapters):
        try:
            _file(Path(lora.path))
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
    places = {p.published.removesuffix(".weight"): p for p in weightmap.placements if p.published.endswith(".weight")}
    targets = dict(module.named_parameters())
    for lora in adapters:
        file = _file(Path(lora.path))
        found = read_adapter(file)
        _check_names(file, list(found), [*places, *native])
        for name, adapter in found.items():
            _add(file, name, adapter, lora.scale, places, targets, native)


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
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise SetupError(f"the adapter {file} cannot be read: {error}") from error
    config = AdapterConfig.read(file)
    if not tensors:
        raise SetupError(f"the adapter {file} has no tensors")
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _SUFFIX.fullmatch(key)
        if match is None:
            raise SetupError(
                f"the adapter {file}: tensor {key!r} is none of a low-rank adapter (lora_A, lora_B, lora_down, "
                "lora_up, alpha)"
            )
        part = match["alpha"] or {"lora_down": "lora_A", "lora_up": "lora_B"}.get(match["way"], match["way"])
        parts.setdefault(match["name"], {})[part] = tensor
    return {name: _adapter(file, name, found, config) for name, found in parts.items()}


def _adapter(file: Path, name: str, found: Mapping[str, Tensor], config: AdapterConfig) -> Adapter:
    for part in ("lora_A", "lora_B"):
        if part not in found or found[part].ndim != 2:
            raise SetupError(f"the adapter {file}: {name!r} has no matrix {part}")
    down, up = found["lora_A"], found["lora_B"]
    rank = down.shape[0]
    if up.shape[1] != rank or not rank:
        raise SetupError(f"the adapter {file}: {name!r} has ranks {rank} and {up.shape[1]}")
    for part, tensor in found.items():
        if not tensor.isfinite().all():
            raise SetupError(f"the adapter {file}: {part} of {name!r} has values that are no numbers (NaN or infinity)")
    if "alpha" in found:
        return Adapter(down, up, float(found["alpha"]) / rank)
    return Adapter(down, up, config.factor(_unprefixed(name), rank))


def _add(
    file: Path,
    name: str,
    adapter: Adapter,
    scale: float,
    places: Mapping[str, Placement],
    targets: Mapping[str, Tensor],
    native: NativeNames,
) -> None:
    plain = _plain(name, (*places, *native))
    swapped = plain not in places and native[plain].swapped
    published = (plain,) if plain in places else native[plain].published
    rows = [_rows(targets, places[part]) for part in published]
    delta = adapter.delta(rows[0].device) * scale
    whole = [_whole(tuple(own.shape), places[part].cut) for own, part in zip(rows, published, strict=True)]
    if delta.shape != (sum(shape[0] for shape in whole), whole[0][-1]) or rows[0].ndim != 2:
        shape = [sum(shape[0] for shape in whole), *whole[0][1:]]
        raise SetupError(f"the adapter {file}: {name!r} is for {list(delta.shape)}, this model's layer is {shape}")
    if swapped:
        delta = torch.cat(delta.chunk(2)[::-1])
    with torch.no_grad():
        changes = torch.split(delta, [shape[0] for shape in whole])
        for own, part, change in zip(rows, published, changes, strict=True):
            cut = places[part].cut
            own.copy_(own.float() + (change if cut is None else cut.of(change)))


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


def _file(path: Path) -> Path:
    """*path*, or the one safetensors file in the folder that it is."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            found = ", ".join(file.name for file in files) or "none"
            raise SetupError(f"the adapter {path} should be a folder with one safetensors file; it holds {found}")
        return files[0]
    if not path.is_file():
        raise SetupError(f"the adapter {path} is not there")
    return path

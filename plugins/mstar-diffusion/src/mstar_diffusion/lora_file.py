"""What stands in the file of a low-rank adapter: its layers, their tensors and shapes, from the file's head alone.

The layouts are those that :mod:`mstar_diffusion.lora` names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mstar.spec.errors import SetupError

__all__ = ["Layer", "adapter_file", "read_layers"]

_SUFFIX = re.compile(
    r"(?P<name>.+?)\.(?:(?P<way>lora_A|lora_B|lora_down|lora_up)(?:\.[^.]+)?\.weight|(?P<alpha>alpha))", re.ASCII
)
_PARTS = {"lora_down": "lora_A", "lora_up": "lora_B"}


@dataclass(frozen=True)
class Layer:
    """What the file has for one layer.

    :param tensors: ``lora_A`` (down, ``[rank, in]``), ``lora_B`` (up, ``[out, rank]``) and perhaps ``alpha`` → what the
        file calls the tensor. :param shapes: of the two matrices, likewise.
    """

    tensors: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def rank(self) -> int:
        return self.shapes["lora_A"][0]

    def misfit(self, out: int, width: int) -> str | None:
        """Which tensor is not of a layer with *width* inputs and *out* outputs, and what it should be."""
        for part, wanted in (("lora_A", (self.rank, width)), ("lora_B", (out, self.rank))):
            if self.shapes[part] != wanted:
                found = list(self.shapes[part])
                return f"tensor {self.tensors[part]!r} is {found}, for this model's layer it should be {list(wanted)}"
        return None


def adapter_file(path: Path) -> Path:
    """*path*, or the one safetensors file in the folder that it is. Raises :class:`SetupError`."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            found = ", ".join(file.name for file in files) or "none"
            raise SetupError(f"the adapter {path} should be a folder with one safetensors file; it holds {found}")
        return files[0]
    if not path.is_file():
        raise SetupError(f"the adapter {path} is not there")
    return path


def read_layers(file: Path) -> dict[str, Layer]:
    """The layers in *file* by their names as it has them. No tensor is read.

    :raises SetupError: it cannot be read, or holds something else than pairs of matrices of one rank; names the tensor.
    """
    tensors: dict[str, dict[str, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no mapping
                name, part = _place(file, key)
                tensors.setdefault(name, {})[part] = key
                shapes[key] = tuple(opened.get_slice(key).get_shape())
    except (OSError, SafetensorError) as error:
        raise SetupError(f"the adapter {file} cannot be read: {error}") from error
    if not tensors:
        raise SetupError(f"the adapter {file} has no tensors")
    return {name: _layer(file, name, found, shapes) for name, found in tensors.items()}


def _place(file: Path, key: str) -> tuple[str, str]:
    """The layer that tensor *key* is of, and which part of it."""
    match = _SUFFIX.fullmatch(key)
    if match is None:
        raise SetupError(
            f"the adapter {file}: tensor {key!r} is none of a low-rank adapter (lora_A, lora_B, lora_down, lora_up, "
            "alpha)"
        )
    return match["name"], match["alpha"] or _PARTS.get(match["way"], match["way"])


def _layer(file: Path, name: str, tensors: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> Layer:
    for part in ("lora_A", "lora_B"):
        if part not in tensors:
            raise SetupError(f"the adapter {file}: {name!r} has no matrix {part}")
        if len(shape := shapes[tensors[part]]) != 2:
            raise SetupError(f"the adapter {file}: tensor {tensors[part]!r} is {list(shape)} and no matrix")
    down, up = (shapes[tensors[part]] for part in ("lora_A", "lora_B"))
    if not down[0]:
        raise SetupError(f"the adapter {file}: tensor {tensors['lora_A']!r} is {list(down)}: its rank is 0")
    if up[1] != down[0]:
        raise SetupError(
            f"the adapter {file}: tensor {tensors['lora_B']!r} is {list(up)}; of the rank of its lora_A, which is "
            f"{list(down)}, it should be {[up[0], down[0]]}"
        )
    if "alpha" in tensors and any(side != 1 for side in shapes[tensors["alpha"]]):
        raise SetupError(
            f"the adapter {file}: tensor {tensors['alpha']!r} is {list(shapes[tensors['alpha']])} and no number"
        )
    return Layer(tensors, {"lora_A": down, "lora_B": up})

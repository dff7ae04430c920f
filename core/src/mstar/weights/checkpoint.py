"""A checkpoint's tensors by name: safetensors in one file, or in several with an index; where there are none, a file of
torch's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mstar.nn.shards import Cut
from mstar.spec.errors import WeightsError
from mstar.weights.reader import Piece, read_pieces

if TYPE_CHECKING:
    from mstar.weights.torch_file import TorchCheckpoint

__all__ = ["TORCH_NAMES", "Checkpoint", "TensorInfo", "open_checkpoint"]

TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies (*nbytes* bytes from byte *start* of *file*) and what it is. *dtype* as in the file's header
    (``BF16``, ``F32``…). Of a file of torch's *start* says nothing: torch reads it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("F", "BF"))

    @property
    def torch_dtype(self) -> torch.dtype:
        """:raises WeightsError: this torch has no such dtype."""
        kind = getattr(torch, TORCH_NAMES.get(self.dtype, ""), None)
        if not isinstance(kind, torch.dtype):
            raise WeightsError(
                f"{self.file}: tensor {self.name!r} holds {self.dtype}, which PyTorch {torch.__version__} cannot read"
            )
        return kind


class Checkpoint:
    """All tensors of a folder. Opening reads headers only.

    :raises WeightsError: no checkpoint, a shard missing, damaged or not what the index says.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors: dict[str, TensorInfo] = {}
        index = _index(folder)
        for file in _files(folder, index):
            for info in _header(file):
                if info.name in self.tensors:
                    raise WeightsError(f"tensor {info.name!r} is in {self.tensors[info.name].file.name} and in {file}")
                self.tensors[info.name] = info
        for name, shard in (index or {}).items():
            if name not in self.tensors:
                raise WeightsError(f"tensor {name!r} should be in {folder / shard} by the index, but is not")

    def read(self, plan: Iterable[tuple[str, Tensor, Cut | None]], progress: Callable[[int], None]) -> None:
        """Copy each named tensor, or its *cut*, into its destination (same shape; converted to its dtype, moved to its
        device). Of a tensor that is cut, no other bytes are read.

        All destinations are on one device. Memory beyond them stays within 64 MiB on the host, and as much on a device.
        *progress* is told the bytes done after each read.
        """
        pieces: list[Piece] = []
        for name, destination, cut in plan:
            pieces.extend(_pieces(self.tensors[name], destination, cut))
        read_pieces(pieces, progress)


def _pieces(info: TensorInfo, destination: Tensor, cut: Cut | None) -> Iterator[Piece]:
    """The bytes of *cut* of a tensor, one piece for each of its runs."""
    dtype = info.torch_dtype
    if cut is None:
        yield Piece(info.file, info.start, dtype, destination)
        return
    outer = math.prod(info.shape[: cut.dim])
    item = math.prod(info.shape[cut.dim + 1 :]) * dtype.itemsize
    at = 0
    for first, count in cut.runs:
        part = destination.narrow(cut.dim, at, count)
        at += count
        start = info.start + first * item
        if cut.dim == 0:
            yield Piece(info.file, start, dtype, part)
        else:
            yield Piece(info.file, start, dtype, part.view(outer, -1), info.shape[cut.dim] * item)


def open_checkpoint(folder: Path) -> Checkpoint | TorchCheckpoint:
    """The checkpoint in *folder*: its safetensors, or, if it has none and one file of torch's format, that one. Instead
    of a folder a file of that format may be named.

    :raises WeightsError: as :class:`Checkpoint`.
    """
    from mstar.weights.torch_file import TORCH_FILES, TorchCheckpoint

    if folder.is_file():
        return TorchCheckpoint(folder)
    if not any(folder.glob("*.safetensors*")):
        files = sorted(file for pattern in TORCH_FILES for file in folder.glob(pattern))
        if len(files) == 1:
            return TorchCheckpoint(files[0])
        if files:
            names = ", ".join(file.name for file in files)
            raise WeightsError(f"{folder} has several files of weights: {names}; leave one, or give safetensors")
    return Checkpoint(folder)


def _index(folder: Path) -> dict[str, str] | None:
    """Tensor name → shard's file name, if the folder has an index."""
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise WeightsError(f"{folder} has several indexes: {', '.join(path.name for path in found)}")
    if not found:
        return None
    try:
        return dict(json.loads(found[0].read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{found[0]} is not an index of safetensors: {error!r}") from error


def _files(folder: Path, index: dict[str, str] | None) -> list[Path]:
    if index is not None:
        files = [folder / name for name in sorted(set(index.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            first = next(name for name, shard in index.items() if shard == missing[0])
            raise WeightsError(f"{folder} lacks {', '.join(missing)} (the index puts tensor {first!r} there)")
        return files
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    found = f"has several, and no index: {', '.join(file.name for file in files)}" if files else "has none"
    raise WeightsError(f"{folder} should hold model.safetensors or an index of shards; it {found}")


def _header(file: Path) -> Iterator[TensorInfo]:
    """The library proves the header sound; where each tensor's data lie is only in the header's own JSON."""
    with _opened(file) as handle:
        names = list(handle.keys())
        with file.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            entries = json.loads(raw.read(length))
    for name in names:
        begin, end = entries[name]["data_offsets"]
        shape = tuple(entries[name]["shape"])
        yield TensorInfo(name, file, shape, entries[name]["dtype"], 8 + length + begin, end - begin)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{file} ({file.stat().st_size if file.exists() else 0:,} bytes) is damaged or truncated: {error}"
        ) from error

"""A safetensors checkpoint, one file or several with an index, read in blocks of bounded size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mstar.spec.errors import WeightsError

__all__ = ["Checkpoint", "TensorInfo"]

_BLOCK = 32 << 20
"""Bytes that may be mapped and touched before the mapping is dropped: mapped pages count as resident memory."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is. *dtype* as in the file's header (``BF16``, ``F32``…)."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("F", "BF"))

    @property
    def nbytes(self) -> int:
        bits = int("".join(filter(str.isdigit, self.dtype.split("_")[0])) or 8)  # "F8_E4M3" → 8, "BOOL" → 8
        count = bits // 8
        for size in self.shape:
            count *= size
        return count


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

    def read(self, plan: Iterable[tuple[str, Tensor]], progress: Callable[[int], None]) -> None:
        """Copy each named tensor into its destination (same shape; converted to its dtype, moved to its device).

        Memory beyond the destinations stays within two blocks. *progress* is told the bytes done after each block.
        """
        by_file: dict[Path, list[tuple[TensorInfo, Tensor]]] = {}
        for name, destination in plan:
            info = self.tensors[name]
            by_file.setdefault(info.file, []).append((info, destination))
        done = 0
        for file, items in by_file.items():
            for batch in _batches(items):
                with _opened(file) as handle:
                    for info, destination, rows in batch:
                        _copy(handle, info, destination, rows)
                        done += info.nbytes if rows is None else info.nbytes // info.shape[0] * (rows[1] - rows[0])
                progress(done)


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
    with _opened(file) as handle:
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            part = handle.get_slice(name)
            yield TensorInfo(name, file, tuple(part.get_shape()), str(part.get_dtype()))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{file} ({file.stat().st_size if file.exists() else 0:,} bytes) is damaged or truncated: {error}"
        ) from error


_Read = tuple[TensorInfo, Tensor, "tuple[int, int] | None"]


def _batches(items: list[tuple[TensorInfo, Tensor]]) -> Iterator[list[_Read]]:
    """Group reads so that each group touches about one block of the file; a larger tensor is cut along its rows."""
    batch: list[_Read] = []
    size = 0
    for info, destination in items:
        for rows, nbytes in _cuts(info):
            if batch and size + nbytes > _BLOCK:
                yield batch
                batch, size = [], 0
            batch.append((info, destination, rows))
            size += nbytes
    if batch:
        yield batch


def _cuts(info: TensorInfo) -> Iterator[tuple[tuple[int, int] | None, int]]:
    if info.nbytes <= _BLOCK or not info.shape:
        yield None, info.nbytes
        return
    row = info.nbytes // info.shape[0]
    step = max(1, _BLOCK // row)
    for start in range(0, info.shape[0], step):
        end = min(start + step, info.shape[0])
        yield (start, end), row * (end - start)


def _copy(handle: Any, info: TensorInfo, destination: Tensor, rows: tuple[int, int] | None) -> None:
    try:
        if rows is None:
            destination.copy_(handle.get_tensor(info.name))
        else:
            destination[rows[0] : rows[1]].copy_(handle.get_slice(info.name)[rows[0] : rows[1]])
    except SafetensorError as error:
        raise WeightsError(f"{info.file}: tensor {info.name!r} cannot be read: {error}") from error

"""A checkpoint in one file of torch's own format (``torch.save``), for models that are published so.

Only tensors and plain containers are read (``weights_only``): nothing that the file says is executed. Settings of the
training that lie beside the tensors (omegaconf's objects) are left out without being made. The file is mapped, not
copied: of a large one only what is asked for comes into memory.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mstar.nn.shards import Cut
from mstar.spec.errors import WeightsError
from mstar.weights.checkpoint import TORCH_NAMES, TensorInfo

__all__ = ["TORCH_FILES", "TorchCheckpoint", "flat"]

TORCH_FILES = ("*.pth", "*.pt", "*.ckpt", "*.bin")
_NAMES = {kind: name for name, kind in TORCH_NAMES.items()}


class TorchCheckpoint:
    """All tensors of *file*, under the names of :func:`flat`; used like a :class:`mstar.weights.checkpoint.Checkpoint`.

    :raises WeightsError: the file is damaged, or holds more than tensors and plain containers.
    """

    def __init__(self, file: Path):
        self.file = file
        self._found = dict(flat(_loaded(file)))
        self.tensors = {name: _info(name, file, tensor) for name, tensor in self._found.items()}

    def read(self, plan: Iterable[tuple[str, Tensor, Cut | None]], progress: Callable[[int], None]) -> None:
        """Copy each named tensor, or its *cut*, into its destination (same shape; converted to its dtype, moved to its
        device). *progress* is told the bytes done after each."""
        done = 0
        for name, destination, cut in plan:
            found = self._found[name]
            if cut is not None:
                found = cut.of(found)
            destination.copy_(found)
            done += found.nbytes
            progress(done)


def flat(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in dictionaries of dictionaries, each under its keys joined by dots. What is no tensor (a step
    counter, a version) is left out."""
    for key, value in content.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")


def _loaded(file: Path) -> Mapping[Any, Any]:
    try:
        try:
            content = _read(file)
        except pickle.UnpicklingError:
            names = _settings(file)
            if not names:
                raise
            with torch.serialization.safe_globals([(_LeftOut, name) for name in names]):
                content = _read(file)
    except MemoryError:
        raise
    except Exception as error:  # of bytes that are no such file torch's reader raises what it happens to (KeyError…)
        told = isinstance(error, OSError | EOFError | RuntimeError | ValueError | pickle.UnpicklingError)
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__) if told else "it is damaged"
        raise WeightsError(f"{file} cannot be read as a file of tensors: {reason}") from error
    if not isinstance(content, Mapping):
        raise WeightsError(f"{file} holds a {type(content).__name__}, expected named tensors")
    return content


def _read(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(file, map_location="cpu", weights_only=True)  # a file of torch before 1.6


_SETTING = re.compile(
    r"omegaconf\.[\w.]+|typing\.Any|collections\.defaultdict|pathlib\.\w*Path"
    r"|builtins\.(dict|list|tuple|int|float|str|bool)"
)


def _settings(file: Path) -> list[str]:
    """The classes that *file* names beside tensors, if they are those of omegaconf's settings and nothing else."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except ValueError:  # a file of torch before 1.6
        return []
    return names if all(map(_SETTING.fullmatch, names)) else []


class _LeftOut:
    """Takes the place of a setting: whatever it would be made of is dropped."""

    def __new__(cls, *parts: object) -> _LeftOut:
        return object.__new__(cls)

    def __init__(self, *parts: object):
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _info(name: str, file: Path, tensor: Tensor) -> TensorInfo:
    kind = _NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if kind is None or tensor.layout is not torch.strided:
        raise WeightsError(f"{file}: tensor {name!r} is of a kind that is not served ({tensor.dtype}, {tensor.layout})")
    return TensorInfo(name, file, tuple(tensor.shape), kind, 0, tensor.nbytes)

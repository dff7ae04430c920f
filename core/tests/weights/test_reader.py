"""Reading: every dtype, any layout of file and destination, threads that overlap, a device's way, files that change."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mstar.nn.shards import Cut, Share
from mstar.spec.errors import WeightsError
from mstar.weights import reader
from mstar.weights.checkpoint import Checkpoint
from mstar.weights.writer import write_safetensors

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 3
    if dtype.is_complex:
        return torch.complex(drawn, -drawn)
    return drawn.to(dtype) if dtype.is_floating_point or dtype.is_signed else drawn.abs().to(torch.uint8).to(dtype)


def read(folder: Path, destinations: dict[str, Tensor]) -> list[int]:
    seen: list[int] = []
    Checkpoint(folder).read(((name, to, None) for name, to in destinations.items()), seen.append)
    return seen


@pytest.mark.parametrize("block", [16, 1 << 20])
def test_every_dtype_as_it_is_and_cast(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_BLOCK", block)
    tensors = {str(dtype): values(dtype, 5, 3) for dtype in DTYPES}
    save_file(tensors, tmp_path / "model.safetensors")
    same = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    cast = {name: torch.empty(5, 3) for name, tensor in tensors.items() if not tensor.is_complex()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert read(tmp_path, same)[-1] == size
    read(tmp_path, cast)
    for name, tensor in tensors.items():
        assert torch.equal(same[name].view(torch.uint8), tensor.view(torch.uint8)), name
    for name, found in cast.items():
        assert torch.equal(found, tensors[name].to(torch.float32)), name


CUTS = {
    "rows": Cut(0, 6, (Share(2, 3),)),
    "columns": Cut(1, 10, (Share(4, 5),)),
    "inner": Cut(2, 4, (Share(1, 2),)),
    "rows of sections": Cut(0, 6, (Share(1, 2), Share(4, 1))),
    "columns of sections": Cut(1, 10, (Share(0, 2), Share(6, 3))),
}


@pytest.mark.parametrize("block", [64, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as it is", "cast"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_part_is_read_and_nothing_else(
    cut: Cut, dtype: torch.dtype, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_BLOCK", block)
    runs: list[tuple[int, int]] = []
    spread = reader._Read.runs

    def watched(self: Any) -> Iterator[tuple[int, int]]:
        for run in spread(self):
            runs.append(run)
            yield run

    monkeypatch.setattr(reader._Read, "runs", watched)
    whole = torch.randn(6, 10, 4)
    save_file({"other": torch.zeros(3), "x": whole}, tmp_path / "model.safetensors")
    expected = cut.of(whole)
    found = torch.empty(expected.shape, dtype=dtype)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.read([("x", found, cut)], lambda done: None)
    assert torch.equal(found, expected.to(dtype))
    start = checkpoint.tensors["x"].start
    read_places = {place for first, count in runs for place in range(first - start, first - start + count)}
    wanted = cut.of(torch.arange(whole.numel()).view(whole.shape)).flatten().tolist()
    assert read_places == {4 * place + byte for place in wanted for byte in range(4)}


def test_a_dtype_that_torch_lacks_is_named(tmp_path: Path) -> None:
    save_file({"odd": values(torch.int8, 4)}, tmp_path / "model.safetensors")
    found = Checkpoint(tmp_path)
    object.__setattr__(found.tensors["odd"], "dtype", "F6_E2M3")
    with pytest.raises(WeightsError, match=r"model\.safetensors: tensor 'odd' holds F6_E2M3"):
        found.read([("odd", torch.empty(4), None)], lambda done: None)


@pytest.mark.parametrize("block", [8, 1 << 20])
def test_data_at_odd_places_of_the_file(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_BLOCK", block)
    first, second = values(torch.uint8, 3), values(torch.float32, 4, 2)
    layout = {"a": ("U8", (3,)), "b": ("F32", (4, 2)), "c": ("F32", (0, 7)), "d": ("U8", ())}
    data = [first.numpy().tobytes(), second.numpy().tobytes(), b"", b"\x07"]
    write_safetensors(tmp_path / "model.safetensors", layout, data)
    into = {"a": torch.empty(3), "b": torch.empty(4, 2, dtype=torch.float64), "c": torch.empty(0, 7)}
    scalar = torch.empty((), dtype=torch.int32)
    read(tmp_path, into | {"d": scalar})
    assert torch.equal(into["a"], first.float())
    assert torch.equal(into["b"], second.double())
    assert scalar.item() == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [4, 20, 64, 1 << 20])
def test_a_destination_with_gaps(
    dtype: torch.dtype, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_BLOCK", block)
    tensor = values(torch.float32, 5, 3, 4)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    store = torch.full((4, 6, 3), 9.0, dtype=dtype)  # the destination is part of it, with its axes in another order
    read(tmp_path, {"x": store[:, :5, :].permute(1, 2, 0)})
    assert torch.equal(store[:, :5, :].permute(1, 2, 0), tensor.to(dtype))
    assert (store[:, 5] == 9).all()


def test_large_casts_are_whole(tmp_path: Path) -> None:
    """More elements than one serial copy takes."""
    tensor = values(torch.float32, 300, 401)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    found = torch.empty(300, 401, dtype=torch.bfloat16)
    read(tmp_path, {"x": found})
    assert torch.equal(found, tensor.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_overlap(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {str(n): values(torch.float32, 64) for n in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    together, fill = threading.Barrier(4, timeout=30), reader._fill

    def meet(target: Tensor, part: Any) -> None:
        together.wait()
        fill(target, part)

    monkeypatch.setattr(reader, "_BLOCK", 256)
    monkeypatch.setattr(reader, "_fill", meet)
    found = {name: torch.empty(64, dtype=dtype) for name in tensors}
    read(tmp_path, found)
    assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_that_shrinks_is_told_as_truncated(dtype: torch.dtype, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": values(torch.float32, 100)}, file)
    found = Checkpoint(tmp_path)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(WeightsError, match=re.escape(str(file)) + r" \([\d,]+ bytes\) is damaged or truncated"):
        found.read([("x", torch.empty(100, dtype=dtype), None)], lambda done: None)


def test_a_file_that_goes_away(tmp_path: Path) -> None:
    save_file({"x": values(torch.float32, 100)}, tmp_path / "model.safetensors")
    found = Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="cannot be read"):
        found.read([("x", torch.empty(100), None)], lambda done: None)


class LazyStream:
    """A stream as a device may run it: what is queued happens only when someone waits for it."""

    waits = 0

    def __init__(self) -> None:
        self.work: list[Any] = []

    def synchronize(self) -> None:
        LazyStream.waits += 1
        work, self.work = self.work, []
        for copy in work:
            copy()


class LazySlot(reader._CudaSlot):
    """The device's slot on the CPU: its staging is host memory, its copies wait for their stream."""

    def __init__(self, nbytes: int, device: torch.device):
        self.buffer, self._staging = torch.empty(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
        self._stream = self._lazy = LazyStream()

    def land(self, part: reader._Read) -> None:
        run = super().land
        self._lazy.work.append(lambda: run(part))


@contextmanager
def _on(stream: LazyStream) -> Iterator[None]:
    yield


def test_the_devices_way_never_overwrites_what_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of waits and copies of the CUDA path, on streams that do nothing until they are waited for."""
    monkeypatch.setattr(reader, "_BLOCK", 128)
    monkeypatch.setattr(reader, "_CUDA_SLOTS", 3)
    monkeypatch.setattr(reader, "_slots", lambda reads: [LazySlot(128, torch.device("cpu")) for _ in range(3)])
    monkeypatch.setattr(torch.cuda, "stream", _on)
    tensors = {str(n): values(torch.float32, 50) + n for n in range(20)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = {name: torch.zeros(50, dtype=torch.float64) for name in tensors}
    read(tmp_path, found)
    assert all(torch.equal(found[name], tensor.double()) for name, tensor in tensors.items())
    assert LazyStream.waits > 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("block", [64, 1 << 20])
def test_onto_a_gpu(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_BLOCK", block)
    tensors = {str(n): values(torch.bfloat16, 70, 9) + n for n in range(30)}
    save_file(tensors, tmp_path / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float32):
        store = torch.zeros(30, 70, 9, dtype=dtype, device="cuda")
        read(tmp_path, {str(n): store[n] for n in range(30)})
        assert torch.equal(store.cpu(), torch.stack([tensors[str(n)] for n in range(30)]).to(dtype))

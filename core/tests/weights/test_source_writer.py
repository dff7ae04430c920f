"""The streaming safetensors writer, read back by the library."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from mstar.weights.writer import write_safetensors


def test_the_library_reads_it_back(tmp_path: Path) -> None:
    arrays: dict[str, NDArray[Any]] = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array([1, -2], dtype=np.int64),
        "empty": np.zeros((0, 4), dtype=np.float16),
        "scalar": np.array(3, dtype=np.uint8),
    }
    names = {"float32": "F32", "int64": "I64", "float16": "F16", "uint8": "U8"}
    layout = {name: (names[array.dtype.name], array.shape) for name, array in arrays.items()}
    file = tmp_path / "w.safetensors"
    write_safetensors(file, layout, (array.tobytes() for array in arrays.values()))
    read = load_file(file)
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)
    with safe_open(file, "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_the_header_is_aligned(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    for name in ("x", "xy", "xyz"):
        write_safetensors(file, {name: ("BF16", (1,))}, [b"\0\0"])
        (length,) = struct.unpack("<Q", file.read_bytes()[:8])
        assert length % 8 == 0
        assert json.loads(file.read_bytes()[8 : 8 + length])[name]["data_offsets"] == [0, 2]


@pytest.mark.parametrize(
    ("data", "complaint"), [([b"\0"], "layout says 4"), ([], "shorter"), ([b"1234", b""], "longer")]
)
def test_data_must_fit_the_layout(tmp_path: Path, data: list[bytes], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        write_safetensors(tmp_path / "w", {"x": ("F32", (1,))}, data)
